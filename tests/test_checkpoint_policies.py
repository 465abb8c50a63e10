"""Which values the policies of `jax.checkpoint` keep: docs/checkpoint-policies.md, for this JAX."""

import functools
from pathlib import Path

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from configurations import next_checkpoint
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxprs import normal, products

import jamp

POLICIES = jax.checkpoint_policies
NEXT = getattr(jax.config, "jax_remat3", None) is not None  # JAX 0.10.0 and 0.10.1 have no next checkpoint
VERSION = jax.__version_info__


# A result of each kind has a shape of its own.
SHAPES = {
    (3, 5): "dots without batch dimensions",
    (2, 3, 6): "dots with them",
    (1, 7, 7, 2): "convolutions",
    (10, 8): "ragged dots",
    (9, 1): "this name",
    (13, 1): "other names",
    (11,): "other",
}
ARGS = [
    jnp.ones(shape)
    for shape in ((3, 4), (4, 5), (2, 3, 4), (2, 4, 6), (1, 7, 7, 3), (3, 3, 3, 2), (10, 4), (2, 4, 8), (9,), (13,))
]
OTHER = jnp.ones((1, 11))


def every_kind(x, w, b, c, image, kernel, rows, groups, this, others, other):
    results = [
        x @ w,
        jnp.einsum("bij,bjk->bik", b, c),
        lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")),
        lax.ragged_dot(rows, groups, jnp.array([4, 6])),
        checkpoint_name(jnp.expand_dims(jnp.exp(this), 1), "this"),
        checkpoint_name(jnp.expand_dims(jnp.exp(others), 1), "another"),
        jnp.exp(other[0]),
    ]
    return sum(jnp.sum(jnp.sin(y)) for y in results)


def kept(policy):
    """The kinds of results that JAX keeps for the backward pass."""
    fun = jax.checkpoint(every_kind, policy=policy)
    jaxpr = jax.make_jaxpr(lambda *args: jax.tree.leaves(jax.vjp(fun, *args)[1]))(*ARGS, OTHER).jaxpr
    outvars = {v for v in jaxpr.outvars if not isinstance(v, jax.extend.core.Literal)} - {*jaxpr.invars}
    return {SHAPES[v.aval.shape] for v in outvars if v.aval.shape in SHAPES}


def own(primitive, *_, **__):
    return primitive.name in ("dot_general", "exp", "name")


FIRST = "dots without batch dimensions"
DOTS = f"{FIRST}, dots with them"
NAMES = "this name, other names"
ALL = ", ".join(SHAPES.values())
CASES = {
    "no policy": None,
    "`nothing_saveable`": POLICIES.nothing_saveable,
    "`save_only_these_names`": POLICIES.save_only_these_names("this"),
    "`save_any_names_but_these`": POLICIES.save_any_names_but_these("this"),
    "`dots_with_no_batch_dims_saveable`": POLICIES.dots_with_no_batch_dims_saveable,
    "`dots_saveable`": POLICIES.dots_saveable,
    "`everything_saveable`": POLICIES.everything_saveable,
    "`offload_dot_with_no_batch_dims`": POLICIES.offload_dot_with_no_batch_dims("device", "pinned_host"),
    "`save_and_offload_only_these_names`": POLICIES.save_and_offload_only_these_names(
        names_which_can_be_saved=["this"],
        names_which_can_be_offloaded=["another"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
    "`save_from_both_policies`": POLICIES.save_from_both_policies(
        POLICIES.dots_with_no_batch_dims_saveable, POLICIES.save_only_these_names("this")
    ),
    "`save_anything_except_these_names`": POLICIES.save_anything_except_these_names("this"),
    "your own": own,
}
# What is kept with the default checkpoint, and with the next one from each version of JAX on.
DEFAULT = ["", "", "this name", "other names", FIRST, f"{DOTS}, convolutions", ALL]
DEFAULT += [FIRST, NAMES, f"{FIRST}, this name", ALL, f"{DOTS}, {NAMES}, other"]
IN_0_10_2 = ["", "", "this name", "other names", FIRST, DOTS, NAMES, "", "", "", "", ""]
IN_0_11_0 = [*IN_0_10_2[:7], FIRST, NAMES, "", "", ""]
IN_0_11_2 = [*IN_0_10_2[:6], ALL, FIRST, NAMES, "this name", NAMES, NAMES]
IN_0_12_0 = [*DEFAULT[:10], f"{DOTS}, convolutions, {NAMES}", f"{DOTS}, {NAMES}"]
COLUMNS = {(0, 10, 2): IN_0_10_2, (0, 11, 0): IN_0_11_0, (0, 11, 2): IN_0_11_2, (0, 12, 0): IN_0_12_0}


@pytest.mark.parametrize("flag", [False, True] if NEXT else [False])
def test_policies_keep_what_the_table_says(flag):
    nearest = max(version for version in COLUMNS if version <= max(VERSION[:3], min(COLUMNS)))
    column = COLUMNS[nearest] if flag else DEFAULT
    with next_checkpoint(flag):
        found = {name: kept(policy) for name, policy in CASES.items()}
    expected = {name: set(cell.split(", ")) - {""} for name, cell in zip(CASES, column, strict=True)}
    message = f"JAX {jax.__version__}; the nearest column of the table is {nearest}. If this JAX differs, add a column."
    assert found == expected, message


def page_rows():
    short = {ALL: "everything", f"{DOTS}, {NAMES}, other": "what it says", "": "nothing"}
    cell = lambda text: short.get(text, text.replace(DOTS, "dots").replace(NAMES, "names").replace(FIRST, "some dots"))
    columns = [DEFAULT, *COLUMNS.values()]
    return [f"| {name} | {' | '.join(cell(column[i]) for column in columns)} |" for i, name in enumerate(CASES)]


def test_the_page_has_this_table():
    page = Path(__file__).parents[1] / "docs" / "checkpoint-policies.md"
    assert "\n".join(page_rows()) in page.read_text()


W, X = normal(64, 64, scale=0.125), normal(8, 64, seed=1)
layer = lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w)


def loss_of(policy):
    return lambda w, x: jnp.sum(jax.checkpoint(layer, policy=policy)(w, x) ** 2)


@pytest.mark.parametrize("flag", [False, True] if NEXT else [False])
def test_autocast_enters_a_checkpoint_also_the_next_one(flag):
    with next_checkpoint(flag):
        cast = jamp.autocast(loss_of(None), jnp.bfloat16)
        assert products(cast, W, X) == {jnp.dtype(jnp.bfloat16)}
        found = jax.grad(cast)(W, X)
    truth = jax.grad(loss_of(None))(W, X)
    assert jnp.linalg.norm(found - truth) < 0.02 * jnp.linalg.norm(truth)


@pytest.mark.parametrize("name", ["recompute", "autocast", "recompute of autocast"])
def test_a_budget_works_with_the_next_checkpoint_or_says_which_jax_it_needs(name):
    ways = {
        "recompute": lambda fun: jamp.recompute(fun, 0.3),
        "autocast": lambda fun: jamp.autocast(fun, jnp.bfloat16, memory_budget=0.3),
        "recompute of autocast": lambda fun: jamp.recompute(jamp.autocast(fun, jnp.bfloat16), 0.3),
    }
    loss = lambda w, x: jnp.mean(layer(w, layer(w, x)) ** 2)
    grad = lambda: jax.grad(ways[name](loss))(W, X)
    truth = jax.grad(loss)(W, X)
    with next_checkpoint(NEXT):
        if NEXT and VERSION < (0, 11):
            message = r"needs JAX 0\.11\.0 or later, got memory_budget=0\.3 and JAX 0\.10.*\"jax_remat3\", False"
            with pytest.raises(NotImplementedError, match=message):
                grad()
            return
        np.testing.assert_allclose(grad(), truth, rtol=0.1, atol=2e-3)


@pytest.mark.parametrize("way", [lambda fun: jamp.autocast(fun, jnp.bfloat16), lambda fun: jamp.recompute(fun, 1.0)])
def test_a_policy_that_jax_ignores_is_a_warning(way, recwarn):
    with next_checkpoint(NEXT):
        for policy in (None, POLICIES.dots_saveable, POLICIES.save_only_these_names("h")):
            jax.make_jaxpr(way(loss_of(policy)))(W, X)
        assert not recwarn.list
        if NEXT and VERSION < (0, 11, 2):
            with pytest.warns(UserWarning, match=r"ignores the policy own of .*test_checkpoint_policies\.py:\d+"):
                jax.make_jaxpr(way(loss_of(own)))(W, X)
        else:
            jax.make_jaxpr(way(loss_of(own)))(W, X)
            assert not recwarn.list
    with next_checkpoint(False):
        jax.make_jaxpr(way(loss_of(own)))(W, X)


def plain(x, w):
    return x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)


@jax.custom_jvp
def calls_itself(x, w):
    return plain(x, w)


@jax.custom_jvp
def multiplies(x, w):
    return plain(x, w)


tangent = lambda primals, tangents: plain(tangents[0], primals[1]) + plain(primals[0], tangents[1])
calls_itself.defjvp(lambda primals, tangents: (calls_itself(*primals), tangent(primals, tangents)))
multiplies.defjvp(lambda primals, tangents: (plain(*primals), tangent(primals, tangents)))


def chain(product):
    return lambda w, x: jnp.sum(functools.reduce(lambda x, _: jnp.sin(product(x, w).astype(jnp.float32)), range(3), x))


def saving_dots(fun):
    return jax.checkpoint(fun, policy=POLICIES.dots_saveable)


# What `dots_saveable` keeps of three products, with the default checkpoint and with the next one.
OF_THREE = {
    "by JAX": (lambda: saving_dots(chain(plain)), 3, 3),
    "by a custom_jvp whose rule calls it": (lambda: saving_dots(chain(calls_itself)), 0, 0),
    "by a custom_jvp whose rule multiplies": (lambda: saving_dots(chain(multiplies)), 3, 0),
    "by autocast inside": (lambda: saving_dots(jamp.autocast(chain(jnp.matmul), jnp.bfloat16)), 3, 3),
    "by autocast around": (lambda: jamp.autocast(saving_dots(chain(jnp.matmul)), jnp.bfloat16), 3, 3),
    "in 8 bit": (lambda: jamp.autocast(saving_dots(chain(jnp.matmul)), jamp.Float8(min_size=1)), 3, 3),
}


@pytest.mark.parametrize("flag", [False, True] if NEXT else [False])
@pytest.mark.parametrize("name", OF_THREE)
def test_a_policy_for_products_sees_those_of_autocast_and_not_those_of_every_custom_jvp(name, flag):
    """So `lower` attaches a derivative to JAX's own product, and makes no custom_jvp of it."""
    make, *counts = OF_THREE[name]
    with next_checkpoint(flag):
        jaxpr = jax.make_jaxpr(lambda *args: jax.tree.leaves(jax.vjp(make(), *args)[1]))(W, X).jaxpr
    results = {v for v in jaxpr.outvars if not isinstance(v, jax.extend.core.Literal)} - {*jaxpr.invars}
    assert sum(v.aval.shape == X.shape and v.aval.dtype == jnp.bfloat16 for v in results) == counts[flag]
