"""The stages of one training step: scale the loss, unscale and check the gradients, step or skip, adapt."""
