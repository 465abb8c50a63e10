"""Read, build, rewrite and evaluate jaxprs. Only this package knows what a jaxpr is."""
