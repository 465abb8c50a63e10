"""The tables of primitives and of rules: they know all that this release of JAX has, with a reason."""

import re
from pathlib import Path

from jaxprs import PRODUCTS

import jamp
from jamp._autocast.rules import CATEGORIES, RULES, RULES_OF_FLOAT64
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


def test_the_table_has_a_reason_for_every_rule_and_lists_names_of_primitives():
    from jax.extend.core import primitives

    known = {getattr(primitives, name).name for name in dir(primitives) if name.endswith("_p")}
    assert {rule.category for rule in RULES.values()} == CATEGORIES.keys()
    assert all(rule.reason for rule in RULES.values())
    # Names that only some releases have, or that no public module lists.
    elsewhere = {
        "ragged_dot_general",
        "log2",
        "one_minus_square",
        "polynomial",
        "split",
        "stack",
        "tile",
        "unstack",
        "copy_p",
        "mesh_cast",
        "optimization_barrier",
        "pbroadcast",
        "pvary",
    }
    elsewhere |= {"nonbatchable", "nondifferentiable_backward", "nontraceable", "select_if_vmap"}  # Equinox
    elsewhere |= {
        "barrier",
        "barrier_unless_tpu",
        "cotangents_behind_barrier",
        "in_one_kernel_on_tpu",
        "rounded",
        "row_major",
        "scaled_sums",
    }  # jamp
    elsewhere |= {"reshard", "psum_invariant", "reduce_scatter", "all_gather_invariant", "collective_permute"}
    elsewhere |= {"all_gather_reduced", "preduced", "unreduced_psum", "unreduced_reduce_scatter"}
    elsewhere |= {f"{cast}{end}" for cast in ("reduced_vary_cast", "vary_unreduced_cast") for end in ("", "_p")}
    assert {key.split("[")[0] for key in RULES} - elsewhere <= known


def test_the_rules_of_float64_have_a_reason_each():
    assert RULES_OF_FLOAT64.keys() - RULES.keys() == {f"{name}[linalg]" for name in PRODUCTS}
    assert {rule.category for rule in RULES_OF_FLOAT64.values()} == {"compute", "accumulate", "float64", "widest"}
    assert not [rule.reason for rule in RULES_OF_FLOAT64.values() if "16" in rule.reason]
