"""Memory of gradients and training steps, compiled for devices that are not there."""
