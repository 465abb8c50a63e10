"""The table of JAX's primitives knows all that this release of JAX has."""

from jamp import _jaxpr, _primitives as classes

NAMES = ("PRODUCTS", "MOVES", "TRANSFERS", "COPIES", "GATHERS", "ARITHMETIC", "EXPENSIVE", "OTHERS")
CLASSES = {name: getattr(classes, name) for name in NAMES}


def test_every_primitive_of_jax_is_in_a_class():
    """A new one is computed again, kept, or left alone only if somebody says so here."""
    known = frozenset().union(_jaxpr.CONSTRUCTS, *CLASSES.values())
    assert not _jaxpr.primitive_names() - known


def test_no_primitive_is_in_two_classes():
    names = [*_jaxpr.CONSTRUCTS, *(name for names in CLASSES.values() for name in names)]
    assert len(names) == len(set(names))
