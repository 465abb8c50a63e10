"""All that knows what a jaxpr is: read, build, rewrite and evaluate it."""
