"""float8: where training ends, and what the compiler for an H200 makes of the products."""
