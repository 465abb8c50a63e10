"""A sum over rows, some rows at a time, whose gradient is computed in the forward pass."""
