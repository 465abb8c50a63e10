"""The table of JAX's primitives knows all that this release of JAX has."""

import re
from pathlib import Path

import jamp
from jamp._jaxprs import constructs, ir, primitives as classes

NAMES = ("PRODUCTS", "MOVES", "TRANSFERS", "COPIES", "GATHERS", "ARITHMETIC", "EXPENSIVE", "OTHERS")
CLASSES = {name: getattr(classes, name) for name in NAMES}


def test_every_primitive_of_jax_is_in_a_class():
    """A new one is computed again, kept, or left alone only if somebody says so here."""
    known = frozenset().union(constructs.CONSTRUCTS, *CLASSES.values())
    assert not ir.primitive_names() - known


def test_no_primitive_is_in_two_classes():
    names = [*constructs.CONSTRUCTS, *(name for names in CLASSES.values() for name in names)]
    assert len(names) == len(set(names))


def test_every_primitive_of_jamp_has_a_name_for_users():
    """`operation` names a product as the user's, and the others by what a user knows."""
    sources = "".join(path.read_text() for path in Path(jamp.__file__).parent.rglob("*.py"))
    own = set(re.findall(r'(?:Primitive|define|_identity)\(\s*"(\w+)"', sources))
    assert {"attach", "barrier", "product", "scaled_linear_call"} <= own
    assert own - ir.primitive_names() <= classes._SHOWN.keys() | classes._OF_PRODUCTS
