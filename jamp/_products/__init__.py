"""Products, the decision about each, and how they are computed in 16 and 8 bit."""
