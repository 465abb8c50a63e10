"""Finding the one loss-scale state in any pytree: get, set, stats, metrics, and what is said when it is not there."""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from loss_scales import Halving

import jamp
from jamp import DynamicLossScale, StaticLossScale

CONFIG = DynamicLossScale(8.0, growth_interval=2, min_scale=2.0**-4, max_scale=64.0, hysteresis=2)
TX = jamp.loss_scaled(optax.adam(1e-3), CONFIG)
PARAMS = {"w": jnp.ones(3)}


class TrainState(NamedTuple):
    """What a user may write, with a field of the name that is looked for."""

    step: Any
    loss_scale: Any
    extra: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Model:
    params: Any
    opt_state: Any


OPT_STATE = TX.init(PARAMS)
STATE = CONFIG.init()
HOLDERS = {
    "the state": STATE,
    "a static one": StaticLossScale(8.0).init(),
    "a user's own": Halving().init(),
    "an optimizer state": OPT_STATE,
    "a dict": {"params": PARAMS, "opt": OPT_STATE, "none": None},
    "lists and tuples": [PARAMS, (1, [OPT_STATE, "text"])],
    "a dataclass": Model(PARAMS, OPT_STATE),
    "a NamedTuple with a field loss_scale": TrainState(0, STATE),
    "a NamedTuple with an optimizer state": TrainState(0, OPT_STATE),
    "optax.chain": optax.chain(TX, optax.scale(1.0)).init(PARAMS),
    "optax.named_chain": optax.named_chain(("scaled", TX), ("after", optax.scale(1.0))).init(PARAMS),
    "around MultiSteps": jamp.loss_scaled(optax.MultiSteps(optax.adam(1e-3), 4), CONFIG).init(PARAMS),
    "inject_hyperparams": optax.inject_hyperparams(
        lambda learning_rate: jamp.loss_scaled(optax.sgd(learning_rate), CONFIG)
    )(learning_rate=0.1).init(PARAMS),
}
EACH_HOLDER = pytest.mark.parametrize("tree", HOLDERS.values(), ids=HOLDERS)


def described(tree):
    """Structure, shapes, dtypes and weak types."""
    spec = lambda x: (x.shape, x.dtype, x.weak_type) if isinstance(x, jax.Array) else x
    return jax.tree.structure(tree), [spec(x) for x in jax.tree.leaves(tree)]


@EACH_HOLDER
def test_get_and_set_find_the_state_wherever_it_is(tree):
    scale = jamp.get_loss_scale(tree)
    assert (scale.item(), scale.shape, scale.dtype) == (8.0, (), jnp.float32)
    for value in (32, 32.0, np.float64(32.0), jnp.float32(32.0), jnp.float16(32.0)):
        new = jamp.set_loss_scale(tree, value)
        assert float(jamp.get_loss_scale(new)) == 32.0
        assert described(new) == described(tree)
    assert float(jamp.get_loss_scale(tree)) == 8.0  # the tree itself is not changed


@pytest.mark.parametrize("key", [k for k in HOLDERS if k != "lists and tuples"])  # that one holds a string
def test_get_and_set_work_under_jit(key):
    scale, new = jax.jit(lambda t: (jamp.get_loss_scale(t), jamp.set_loss_scale(t, 32)))(HOLDERS[key])
    assert float(scale) == 8.0
    assert float(jamp.get_loss_scale(new)) == 32.0


def test_set_loss_scale_changes_nothing_else():
    new = jamp.set_loss_scale(OPT_STATE, 32.0)
    new = new._replace(loss_scale_state=OPT_STATE.loss_scale_state)
    jax.tree.map(np.testing.assert_array_equal, new, OPT_STATE)


def scales(state, overflow):
    update, result = jax.jit(CONFIG.update), []
    for c in overflow:
        state = update(state, c == "0")
        result.append(float(state.loss_scale))
    return result


@pytest.mark.parametrize("set_scale", [jamp.set_loss_scale, jax.jit(jamp.set_loss_scale)], ids=["eager", "jit"])
def test_set_loss_scale_restarts_growth_count_and_refills_hysteresis(set_scale):
    tired = CONFIG.update(CONFIG.init(), jnp.bool_(False))  # the next overflow backs off
    assert scales(tired, "1") == [4]
    assert scales(set_scale(tired, 32.0), "11") == [32, 16]
    assert scales(set_scale(tired, 32.0), "011") == [32, 32, 16]
    near = CONFIG.update(CONFIG.init(), jnp.bool_(True))  # the next finite step grows
    assert scales(near, "0") == [16]
    assert scales(set_scale(near, 32.0), "00") == [32, 64]
    assert scales(set_scale(near, 32.0), "100") == [32, 32, 64]


@pytest.mark.parametrize(
    ("value", "healed"),
    [(1e6, 64), (1e-6, 2.0**-4), (0, 2.0**-4), (-8, 2.0**-4), (jnp.inf, 64), (-jnp.inf, 2.0**-4), (jnp.nan, 8)],
)
def test_a_hand_set_scale_out_of_range_comes_back_inside_at_the_next_update(value, healed):
    for overflow in "01":
        new = jamp.set_loss_scale(OPT_STATE, value)
        np.testing.assert_array_equal(jamp.get_loss_scale(new), np.float32(value))
        grads = {"w": jnp.full(3, jnp.inf if overflow == "1" else 1.0)}
        assert float(jamp.get_loss_scale(TX.update(grads, new, PARAMS)[1])) == healed


def test_a_tree_with_a_set_scale_can_be_donated():
    # The value is copied: it may be a buffer of the same tree, or one that the caller goes on using.
    step = jax.jit(lambda state: TX.update(PARAMS, state, PARAMS)[1], donate_argnums=0)
    value = jnp.float32(32.0)
    state = step(jamp.set_loss_scale(TX.init(PARAMS), value))
    assert float(value) == 32.0
    state = step(jamp.set_loss_scale(state, jamp.get_stats(state).max_loss_scale))
    assert float(jamp.get_loss_scale(state)) == 32.0


def test_optax_tree_set_resets_the_loss_scale_to_the_initial_state():
    state = TX.init(PARAMS)
    for grad in (1.0, jnp.inf, jnp.inf):
        state = TX.update({"w": jnp.full(3, grad)}, state, PARAMS)[1]
    assert float(jamp.get_loss_scale(state)) == 4.0
    reset = optax.tree.set(state, loss_scale_state=CONFIG.init())
    jax.tree.map(np.testing.assert_array_equal, reset.loss_scale_state, CONFIG.init())
    jax.tree.map(
        np.testing.assert_array_equal, reset._replace(loss_scale_state=None), state._replace(loss_scale_state=None)
    )
    assert described(reset) == described(state)
    assert float(jamp.get_loss_scale(TX.update(PARAMS, reset, PARAMS)[1])) == 8.0


def test_get_grads_finite_says_whether_the_last_step_was_applied():
    state = TX.init(PARAMS)
    seen = [jamp.get_grads_finite(state)]
    for grad in (1.0, jnp.nan, -jnp.inf, 1.0):
        state = TX.update({"w": jnp.array([1.0, grad, 1.0])}, state, PARAMS)[1]
        seen.append(jamp.get_grads_finite({"nested": [state]}))
    assert all(isinstance(x, jax.Array) and (x.shape, x.dtype) == ((), bool) for x in seen)
    assert [bool(x) for x in seen] == [True, True, False, False, True]


def test_vmapped_states_keep_their_axis():
    many = jax.vmap(TX.init)({"w": jnp.ones((4, 3))})
    assert jamp.get_loss_scale(many).shape == (4,)
    assert jamp.get_grads_finite(many).shape == (4,)
    assert {k: v.shape for k, v in jamp.metrics(many).items()} == dict.fromkeys(jamp.metrics(OPT_STATE), (4,))
    assert described(jamp.set_loss_scale(many, 32.0)) == described(many)
    each = jamp.set_loss_scale(many, jnp.array([1.0, 2.0, 4.0, 8.0]))
    assert jamp.get_loss_scale(each).tolist() == [1, 2, 4, 8]
    inside = jax.vmap(lambda s: jamp.set_loss_scale(s, jamp.get_loss_scale(s) * 2))(each)
    assert jamp.get_loss_scale(inside).tolist() == [2, 4, 8, 16]
    grads = {"w": jnp.ones((4, 3)).at[2, 1].set(jnp.inf)}
    for _ in range(2):  # the first overflow is held by the hysteresis
        each = jax.vmap(TX.update)(grads, each, {"w": jnp.ones((4, 3))})[1]
    assert jamp.get_loss_scale(each).tolist() == [2, 4, 2, 16]
    assert jamp.get_grads_finite(each).tolist() == [True, True, False, True]


# Errors

LOOKUPS = {
    "get_loss_scale": jamp.get_loss_scale,
    "set_loss_scale": partial(jamp.set_loss_scale, value=1.0),
    "get_stats": jamp.get_stats,
    "get_grads_finite": jamp.get_grads_finite,
    "metrics": jamp.metrics,
}
EACH_LOOKUP = pytest.mark.parametrize("lookup", LOOKUPS.values(), ids=LOOKUPS)


@EACH_LOOKUP
@pytest.mark.parametrize(
    ("tree", "name"),
    [
        (optax.adam(1e-3).init(PARAMS), "tuple"),
        ({}, "dict"),
        (None, "NoneType"),
        (1024.0, "float"),
        ({"loss_scale": jnp.float32(8.0)}, "dict"),
        (jax.tree.leaves(OPT_STATE), "list"),
    ],
    ids=["unwrapped optimizer", "empty", "None", "number", "state as a dict", "split"],
)
def test_no_state_is_an_error_that_says_what_was_found_and_how_to_fix_it(lookup, tree, name):
    with pytest.raises(ValueError, match=rf"found no loss-scale.* in this {name}\.") as error:
        lookup(tree)
    assert "merge or restore it first" in str(error.value)
    assert "`tx = jamp.loss_scaled(tx)`" in str(error.value)


@EACH_LOOKUP
def test_several_states_are_an_error_that_says_where_they_are(lookup):
    with pytest.raises(ValueError, match=r"^Expected exactly one .*, found 2") as error:
        lookup({"generator": OPT_STATE, "critic": [0, Model(PARAMS, OPT_STATE)], "params": PARAMS})
    assert "['generator']" in str(error.value)
    assert "['critic'][1].opt_state" in str(error.value)
    assert "Pass the one that is meant." in str(error.value)


@pytest.mark.parametrize("lookup", [jamp.get_stats, jamp.get_grads_finite, jamp.metrics])
def test_a_bare_loss_scale_state_has_no_stats(lookup):
    with pytest.raises(ValueError, match="found no loss-scaled optimizer state in this DynamicLossScaleState"):
        lookup(STATE)


def test_a_state_inside_a_namedtuple_with_a_scale_of_its_own_counts_as_several():
    # Taking the outer one would scale by a number that no update moves.
    with pytest.raises(ValueError, match=r"^Expected exactly one .*, found 2"):
        jamp.get_loss_scale(TrainState(0, jnp.float32(1.0), OPT_STATE))
