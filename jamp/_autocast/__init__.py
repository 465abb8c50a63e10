"""Autocast in passes: cast, quantize, each from a closed jaxpr to a closed jaxpr; the report."""
