"""Keep fewer values for the backward pass of any function, and compute the others again."""
