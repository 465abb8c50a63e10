"""float8: where training ends."""
