"""Tables and pictures of the documentation, made of results."""
