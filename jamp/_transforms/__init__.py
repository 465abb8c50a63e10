"""The public transformations, `autocast` and `recompute`, and their reports. They run the passes."""
