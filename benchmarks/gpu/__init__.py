"""Measurements on one GPU: gradients, products in float8, optimizer steps, and a step in a loop."""
