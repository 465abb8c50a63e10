"""The state of a scaler: finding it in any pytree, reading and setting the loss scale, and its statistics."""

import operator
import sys
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from loss_scales import Halving, flags, run
from trees import assert_equal, assert_same_quotients, avals, bits

import jamp
from jamp import LossScaleStats

CONFIG = jamp.DynamicLossScale(8.0, growth_interval=2, min_scale=2.0**-4, max_scale=64.0, hysteresis=2)
TX = jamp.loss_scaled(optax.sgd(0.1, momentum=0.9), CONFIG)
PARAMS = {"w": jnp.ones(3)}
STATE, OPT_STATE = CONFIG.init(), TX.init(PARAMS)
to_32 = partial(jamp.set_loss_scale, value=32)


class TrainState(NamedTuple):  # what a user may write, with a field of the name that is looked for
    step: Any
    loss_scale: Any
    extra: Any = None


@jax.tree_util.register_dataclass
@dataclass
class Model:
    params: Any
    opt_state: Any


HOLDERS = {
    "the state": STATE,
    "a static one": jamp.StaticLossScale(8.0).init(),
    "a user's own": Halving().init(),
    "an optimizer state": OPT_STATE,
    "a dict": {"params": PARAMS, "opt": OPT_STATE, "none": None},
    "lists and tuples": [PARAMS, (1, [OPT_STATE, "text", object()])],
    "a dataclass": Model(PARAMS, OPT_STATE),
    "a NamedTuple with a field loss_scale": TrainState(jnp.int32(0), STATE),
    "a NamedTuple with an optimizer state": TrainState(jnp.int32(0), OPT_STATE),
    "optax.chain": optax.chain(TX, optax.scale(1.0)).init(PARAMS),
    "optax.named_chain": optax.named_chain(("scaled", TX), ("after", optax.scale(1.0))).init(PARAMS),
    "around MultiSteps": jamp.loss_scaled(optax.MultiSteps(optax.sgd(0.1), 4), CONFIG).init(PARAMS),
    "inject_hyperparams": optax.inject_hyperparams(lambda rate: TX)(0.1).init(PARAMS),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_every_function_finds_the_state_wherever_it_is(name):
    tree = HOLDERS[name]
    assert_equal(jamp.get_loss_scale(tree), jnp.float32(8.0))
    changed = [jamp.set_loss_scale(tree, x) for x in (32, 32.0, np.float64(32.0), jnp.float32(32.0), jnp.float16(32.0))]
    if name != "lists and tuples":  # That one holds a string.
        changed.append(jax.jit(to_32)(tree))
        assert float(jax.jit(jamp.get_loss_scale)(tree)) == 8.0
    arrays = lambda tree: [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    for new in changed:
        assert float(jamp.get_loss_scale(new)) == 32.0
        assert jax.tree.structure(new) == jax.tree.structure(tree)
        assert avals(arrays(new)) == avals(arrays(tree))
        if tree is OPT_STATE:
            assert_equal(new._replace(loss_scale_state=STATE), OPT_STATE)  # Nothing else is changed.
    assert float(jamp.get_loss_scale(tree)) == 8.0  # Nor is the tree itself.
    w = jnp.float32([1.0, 2.0])
    assert jamp.scale_loss(jnp.float32(0.5), tree) == 4.0
    assert_equal(jamp.unscale_and_check({"w": w * 8.0}, tree), ({"w": w}, jnp.bool_(True)))
    assert_equal(jamp.value_and_grad(jnp.sum, tree)(w), (jnp.float32(3.0), jnp.ones(2)))


def test_set_loss_scale_restarts_growth_refills_hysteresis_and_copies_the_value():
    scales = lambda state, overflow: run(CONFIG, state, flags(overflow)).loss_scale.tolist()
    tired, near = (CONFIG.update(STATE, jnp.bool_(ok)) for ok in (False, True))
    assert (scales(tired, "100")[0], scales(near, "000")[0]) == (4, 16)  # The next overflow backs off, a step grows.
    for changed in (to_32(tired), to_32(near), jax.jit(to_32)(tired), jax.jit(to_32)(near)):
        found = [scales(changed, overflow) for overflow in ("011", "100", "110")]
        assert found == [[32, 32, 16], [32, 32, 64], [32, 16, 16]]
    # The value is copied: it may be a buffer of the same tree, or one that the caller goes on using.
    step, value = jax.jit(lambda state: TX.update(PARAMS, state)[1], donate_argnums=0), jnp.float32(32.0)
    state = step(jamp.set_loss_scale(TX.init(PARAMS), value))
    state = step(jamp.set_loss_scale(state, jamp.get_stats(state).max_loss_scale))
    assert float(jamp.get_loss_scale(state)) == float(value) == 32.0


def test_optax_tree_get_and_set_reach_the_scale_and_the_inner_state():
    tx = jamp.loss_scaled(optax.inject_hyperparams(optax.sgd)(0.1), CONFIG)
    state = tx.init(PARAMS)
    assert [float(optax.tree.get(state, k)) for k in ("loss_scale", "learning_rate")] == [8.0, np.float32(0.1)]
    changed = optax.tree.set(state, loss_scale=jnp.float32(16.0), learning_rate=jnp.float32(0.5))
    assert_equal(optax.tree.set(changed, loss_scale_state=STATE)[0], STATE)
    updates, changed = tx.update(PARAMS, changed)
    assert (float(jamp.get_loss_scale(changed)), updates["w"].tolist()) == (16.0, [-0.5] * 3)


def test_every_state_is_a_named_tuple_by_its_base_and_survives_tree_map():
    """Levanter's checkpoints find NamedTuples by `__bases__`, and take a subclass of one for a tuple."""
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "jamp"]
    kinds = {x for module in modules for x in vars(module).values() if isinstance(x, type) and issubclass(x, tuple)}
    assert {"LossScaledState", "ScaledGradsState", "ScalerState"} < {kind.__name__ for kind in kinds}
    for kind in kinds:
        assert (kind.__bases__, len(kind._fields) > 0) == ((tuple,), True), kind
        leaves = kind(*map(float, range(len(kind._fields))))
        assert_equal(jax.tree.map(lambda x: x + 1, leaves), kind(*(x + 1 for x in leaves)))


def test_a_state_with_unscale_is_another_type_that_every_look_up_finds():
    tx = jamp.loss_scaled(optax.sgd(0.1, momentum=0.9), CONFIG, unscale=True)
    state = tx.init(PARAMS)
    assert type(state) is not type(OPT_STATE)
    assert (state._fields, bits(tuple(state))) == (OPT_STATE._fields, bits(tuple(OPT_STATE)))
    assert_equal(jamp.interop.wrap_state(state.inner_state, CONFIG, unscale=True), state)
    assert_equal(jamp.interop.unwrap_state({"opt": state}), {"opt": OPT_STATE.inner_state})
    assert jamp.scale_loss(jnp.float32(0.5), state) == 4.0
    assert_equal(jamp.reset(tx.update(PARAMS, state, grads_finite=False)[1], CONFIG)[:3], state[:3])
    assert_equal(jamp.metrics(state), jamp.metrics(OPT_STATE))
    assert type(jamp.set_loss_scale(state, 2.0)) is type(jamp.convert_loss_scale(state, Halving())) is type(state)


def test_vmapped_states_keep_their_axis():
    many = jax.vmap(TX.init)({"w": jnp.ones((4, 3))})
    assert {x.shape for x in jamp.metrics(many).values()} == {(4,)}
    assert avals(jamp.set_loss_scale(many, 32.0)) == avals(many)
    each = jamp.set_loss_scale(many, jnp.array([0.5, 1.0, 2.0, 4.0]))
    each = jax.vmap(lambda s: jamp.set_loss_scale(s, jamp.get_loss_scale(s) * 2))(each)
    assert jamp.get_loss_scale(each).tolist() == [1, 2, 4, 8]
    grads = {"w": jnp.ones((4, 3)).at[2, 1].set(jnp.inf)}
    for _ in range(2):  # The first overflow is held by the hysteresis.
        _, each = jax.vmap(TX.update)(grads, each)
    assert jamp.get_loss_scale(each).tolist() == [2, 4, 2, 16]


WITH_STATS = {"get_stats": jamp.get_stats, "get_grads_finite": jamp.get_grads_finite, "metrics": jamp.metrics}
LOOKUPS = WITH_STATS | {
    "get_loss_scale": jamp.get_loss_scale,
    "set_loss_scale": to_32,
    "scale_loss": partial(jamp.scale_loss, jnp.float32(1.0)),
    "unscale_and_check": partial(jamp.unscale_and_check, jnp.float32(1.0)),
    "value_and_grad": partial(jamp.value_and_grad, jnp.sum),
    "grad": partial(jamp.grad, jnp.sum),
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_none_or_several_states_are_an_error_that_says_what_was_found(name):
    lookup, none = LOOKUPS[name], [optax.sgd(0.1, momentum=0.9).init(PARAMS), {}, None, 1024.0]
    none += [{"loss_scale": jnp.float32(8.0)}, jax.tree.leaves(OPT_STATE), *([STATE] if name in WITH_STATS else [])]
    for tree in none:
        with pytest.raises(ValueError, match=rf"found none in this {type(tree).__name__}\.") as error:
            lookup(tree)
        cures = "merge or restore it first", "`tx = jamp.loss_scaled(tx)`"
        is_number = isinstance(tree, float)  # such as a loss in the place of the state
        assert all(x in str(error.value) for x in (("jamp.scale_loss(loss, opt_state)",) if is_number else cures))
    places = r"at \['critic'\]\[1\]\.opt_state.*, \['generator'\].*\. Pass the one that is meant\."
    with pytest.raises(ValueError, match=rf"^Expected exactly one .*, found 2: {places}"):
        lookup({"generator": OPT_STATE, "critic": [0, Model(PARAMS, OPT_STATE)], "params": PARAMS})
    if name not in WITH_STATS:  # To take the outer one would be to scale by a number that no update changes.
        with pytest.raises(ValueError, match=r"^Expected exactly one .*, found 2"):
            lookup(TrainState(0, jnp.float32(1.0), OPT_STATE))


CONFIGS = [jamp.DynamicLossScale(4.0, growth_interval=2, hysteresis=2, max_scale=10.0)]
CONFIGS += [jamp.AdaptiveLossScale(4.0, windows=(1, 2)), jamp.StaticLossScale(4.0), Halving()]


def check(stats, finite, scales):
    """The statistics after every step are those of plain Python."""
    found = *stats, np.asarray(stats.success_rate)
    for n in range(1, len(finite) + 1):
        steps, seen = finite[:n], scales[: n + 1]
        in_a_row = n if not any(steps) else steps[::-1].index(True)
        moves = [sum(move(*pair) for pair in pairwise(seen)) for move in (operator.lt, operator.gt)]
        counts = steps.count(True), steps.count(False), in_a_row, *moves
        *exact, rate = (x[n - 1] for x in found)
        assert exact == [*counts, min(seen), max(seen)]
        assert_same_quotients(rate, np.float32(counts[0]) / np.float32(n))


def test_statistics_of_any_scales_agree_with_plain_python_and_counts_saturate():
    def all_stats(scales, finite):
        step = lambda stats, x: (stats.update(*x),) * 2
        return jax.lax.scan(step, LossScaleStats.init(scales[0]), (finite, scales[:-1], scales[1:]))[1]

    random = np.random.default_rng(0)
    finite = random.random((100, 24)) < random.random((100, 1))
    scales = 2.0 ** np.cumsum(random.integers(-1, 2, (100, 25)), axis=1, dtype=np.float32)
    found = jax.device_get(jax.jit(jax.vmap(all_stats))(scales, finite))
    for i in range(100):
        check(jax.tree.map(lambda x, i=i: x[i], found), finite[i].tolist(), scales[i].tolist())
    two, four = jnp.float32(2.0), jnp.float32(4.0)
    full = LossScaleStats(*[jnp.int32(2**31 - 2)] * 5, two, two)
    for _ in range(2):
        full = full.update(jnp.bool_(False), two, four).update(jnp.bool_(False), four, two)
        full = full._replace(finite_steps=full.update(jnp.bool_(True), two, two).finite_steps)
    assert [int(x) for x in full[:5]] == [2**31 - 1] * 5
    assert float(full.success_rate) == 0.5


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_an_optimizer_keeps_the_statistics_of_its_loss_scale(config):
    # From the ceiling, where nothing grows, to the floor, where nothing shrinks.
    finite = flags("001101000000000111111111000")
    tx, w = jamp.loss_scaled(optax.sgd(1.0), config), jnp.float32(0)

    def step(carry, ok):
        updates, state = tx.update(jnp.where(ok, 1.0, jnp.inf), carry[1])
        return ((new := (carry[0] + updates, state)), new)

    params, states = jax.device_get(jax.jit(lambda c: jax.lax.scan(step, c, finite)[1])((w, tx.init(w))))
    scales = run(config, config.init(), finite).loss_scale.tolist()
    check(states.stats, finite.tolist(), [float(config.init().loss_scale), *scales])
    np.testing.assert_array_equal(jamp.get_loss_scale(states), scales)
    np.testing.assert_array_equal(jamp.get_grads_finite(states), finite)
    np.testing.assert_array_equal(params, -np.cumsum(finite))


def test_metrics_hold_every_field_and_str_is_one_readable_line_or_the_repr():
    stats, printed = LossScaleStats.init(jnp.float32(4.0)), []
    for ok in (True, True, True, False):  # It takes a Python bool.
        stats = stats.update(ok, jnp.float32(4.0), jnp.float32(4.0 if ok else 2.0))
    metrics = jamp.metrics(jamp.loss_scaled(optax.sgd(0.1)).init(jnp.ones(1))._replace(stats=stats))
    assert all(isinstance(x, jax.Array) for x in metrics.values())
    assert list(metrics) == ["loss_scale", "grads_finite", *stats._fields, "success_rate"]
    assert [x.item() for x in metrics.values()] == [2.0**16, True, 3, 1, 1, 0, 1, 2.0, 4.0, 0.75]
    steps = "3 steps applied, 1 skipped (75.00% applied, 1 skipped in a row)"
    line = f"{steps}; loss scale raised 0 and lowered 1 times, between 2 and 4"
    assert [str(stats), f"{stats}", str(jax.device_get(stats))] == [line] * 3
    jax.make_jaxpr(lambda s: printed.append((str(s), repr(s))))(stats)  # The fields are not concrete.
    leaves = jax.ShapeDtypeStruct((), jnp.int32), jnp.ones(3), "leaf", None
    printed += [(str(s), repr(s)) for s in (LossScaleStats(*[leaf] * 7) for leaf in leaves)]
    assert len(printed) == 5
    assert all(text == other and text.startswith("LossScaleStats(finite_steps=") for text, other in printed)


@pytest.mark.parametrize("x64", [False, True])
def test_fields_are_strongly_typed_scalars_in_buffers_of_their_own(x64):
    with jax.enable_x64(x64):
        args = jnp.bool_(True), jnp.float32(8.0), jnp.float32(16.0)
        for wrap in (lambda f: f, jax.jit):
            first = wrap(LossScaleStats.init)(args[1])
            assert [x.item() for x in (*first, first.success_rate)] == [0, 0, 0, 0, 0, 8, 8, 1]
            assert len({x.unsafe_buffer_pointer() for x in (*first, args[1])}) == 8
            for stats in (first, wrap(LossScaleStats.update)(first, *args)):
                types = [(x.shape, x.dtype, x.weak_type) for x in (*stats, stats.success_rate)]
                assert types == [((), jnp.int32, False)] * 5 + [((), jnp.float32, False)] * 3


def test_a_reset_state_goes_where_the_parameters_are():
    """`jit` may move arrays that no one has placed, and not those of `device_put`."""
    opt_state = jamp.reset(TX.init(PARAMS), CONFIG)
    assert not any(x.committed for x in jax.tree.leaves(opt_state))
    elsewhere = jax.device_put(PARAMS, jax.devices()[-1])
    _, opt_state = jax.jit(TX.update)(elsewhere, opt_state, elsewhere)
    assert {x.sharding for x in jax.tree.leaves(jamp.reset(opt_state, CONFIG))} == {elsewhere["w"].sharding}


@pytest.mark.parametrize("wrong", [jamp.DynamicLossScale, "dynamic", 8.0, jamp.GradScaler()])
@pytest.mark.parametrize(
    "call", [jamp.reset, jamp.convert_loss_scale, lambda state, x: jamp.interop.wrap_state(state.inner_state, x)]
)
def test_what_is_no_loss_scale_is_an_error_that_says_what_is(call, wrong):
    with pytest.raises(TypeError, match="loss scale"):
        call(OPT_STATE, wrong)


def test_a_loss_scale_of_one_field_adapts_unless_it_is_jamp_s_constant():
    tx = optax.apply_if_finite(jamp.loss_scaled(optax.sgd(0.1), Halving()), 3)
    with pytest.raises(ValueError, match="apply_if_finite"):
        jamp.value_and_grad(lambda p: jnp.sum(p["w"]), tx.init(PARAMS))(PARAMS)
    static = optax.apply_if_finite(jamp.loss_scaled(optax.sgd(0.1), jamp.StaticLossScale(8.0)), 3)
    assert float(jamp.value_and_grad(lambda p: jnp.sum(p["w"]), static.init(PARAMS))(PARAMS)[0]) == 3


def test_a_user_s_own_loss_scale_that_is_off_may_stand_anywhere():
    class OffState(NamedTuple):
        loss_scale: Any
        is_noop = True

    class Off:
        def init(self):
            return OffState(jnp.float32(1))

        def update(self, state, grads_finite):
            return state

    tx = optax.apply_if_finite(jamp.loss_scaled(optax.sgd(0.1), Off()), 3)
    assert float(jamp.value_and_grad(lambda p: jnp.sum(p["w"]), tx.init(PARAMS))(PARAMS)[0]) == 3


def test_what_is_logged_outlives_a_donated_state_and_transfers_nothing():
    @jax.jit
    def train(params, opt_state):
        grads = jamp.grad(lambda p: jnp.sum(p["w"] ** 2), opt_state)(params)
        updates, opt_state = TX.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, jamp.metrics(opt_state)

    donating = jax.jit(train, donate_argnums=(0, 1))
    params, opt_state = jax.tree.map(jnp.copy, PARAMS), TX.init(PARAMS)
    kept, scaler = [], jamp.GradScaler()
    with jax.transfer_guard("disallow"):
        for _ in range(2):
            params, opt_state, inside = donating(params, opt_state)
            reads = jamp.metrics, jamp.get_loss_scale, jamp.get_stats, jamp.get_grads_finite
            kept += [inside, *(read(opt_state) for read in reads)]
        kept += [scaler.get_scale(), scaler.stats]
        jax.jit(lambda x: x, donate_argnums=0)(scaler)
    assert [int(metrics["finite_steps"]) for metrics in kept[0::5][:2]] == [1, 2]
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(kept))


def test_reset_gives_the_initial_scale_and_statistics_where_they_were():
    _, after = TX.update(PARAMS, TX.update(PARAMS, OPT_STATE, grads_finite=False)[1])
    for tree in (after, {"deep": (after, 3)}):
        fresh = jamp.reset(tree, jamp.DynamicLossScale())
        assert (float(jamp.get_loss_scale(fresh)), int(jamp.get_stats(fresh).finite_steps)) == (2.0**16, 0)
        assert jax.tree.structure(fresh) == jax.tree.structure(tree)
    assert_equal(fresh["deep"][0].inner_state, after.inner_state)
    members = jax.vmap(TX.init)(jax.tree.map(lambda x: jnp.stack([x] * 3), PARAMS))
    assert jamp.get_loss_scale(jax.jit(lambda s: jamp.reset(s, jamp.DynamicLossScale(8.0)))(members)).shape == (3,)
    scaler = jamp.reset(jamp.GradScaler(init_scale=4.0).update(overflow=True), jamp.DynamicLossScale(4.0))
    assert float(scaler.get_scale()) == 4.0
