"""The optimizer step and whole training steps: bytes, kernels and time."""
