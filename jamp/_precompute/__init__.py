"""`precompute`, and the split of a jaxpr into equations that depend on the parameters alone and the rest."""

from .precomputation import precompute as precompute
