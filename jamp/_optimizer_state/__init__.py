"""Optimizer states in fewer bytes: masters, 16-bit parameters, 8-bit moments."""
