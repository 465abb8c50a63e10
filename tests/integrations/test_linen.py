"""jamp.linen.TrainState: what is special to it. That nothing of it moves on an overflow: test_contract.py."""

import abc
import copy
import functools
import pickle
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import freeze
from flax.struct import field
from flax.training import train_state
from flax.training.dynamic_scale import DynamicScale
from jaxprs import normal, products
from norms import distance
from steps import with_masters
from trees import bits

import jamp
import jamp.debug
from jamp.linen import TrainState

X = np.asarray(normal(4, 4, 4, 2))
SGD = optax.sgd(optax.linear_schedule(1e-1, 1e-2, 10), momentum=0.9)


class Net(nn.Module):
    dtype: Any = jnp.float16

    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False)(nn.Conv(24, (3, 3), dtype=self.dtype)(x))
        x = nn.relu(x).reshape(x.shape[0], -1, 24)
        x = x + nn.MultiHeadDotProductAttention(num_heads=2, dtype=self.dtype)(nn.LayerNorm()(x))
        x = nn.Dropout(0.5, deterministic=False)(nn.gelu(x)).mean(1)
        return nn.Dense(3, dtype=self.dtype)(x).astype(jnp.float32)


class WithFields(TrainState):  # Its key is a collection that it does not declare.
    batch_stats: Any
    ema: Any


INIT = jax.jit(lambda: Net().init({"params": jax.random.key(0), "dropout": jax.random.key(2)}, X))


def created(model=Net(), **kwargs):
    variables = INIT()
    fields = {"apply_fn": model.apply, "tx": SGD, "ema": variables["params"], "key": jax.random.key(1)}
    return WithFields.create(**fields | variables | kwargs)


def loss_fn(params, state, x):
    variables, rngs = {"params": params, "batch_stats": state.batch_stats}, {"dropout": state.key}
    out, updates = state.apply_fn(variables, x, mutable=["batch_stats"], rngs=rngs)
    return jnp.mean(out**2), updates["batch_stats"]


def train_step(state, x, wrap=lambda f: f):
    (loss, batch_stats), grads = state.value_and_grad(wrap(loss_fn), has_aux=True)(state.params, state, x)
    ema = optax.incremental_update(state.params, state.ema, 0.1)
    key = jax.random.split(state.key)[0]
    return state.apply_gradients(grads=grads, batch_stats=batch_stats, ema=ema, key=key), loss


def test_on_an_overflow_the_collections_and_the_fields_of_a_subclass_stay():
    step, what_trains = jax.jit(train_step), lambda s: (s.params, s.opt_state.inner_state, s.batch_stats, s.ema, s.key)
    state, _ = step(created(), X)
    skipped, loss = step(state, X * np.float32(np.inf))
    applied, _ = step(skipped, X)
    assert np.isnan(loss)
    assert bits(what_trains(skipped)) == bits(what_trains(state))
    assert bits(skipped.metrics()) == bits(jamp.metrics(skipped)) != bits(jamp.metrics(state))
    assert all(bits(x) != bits(y) for x, y in zip(what_trains(applied), what_trains(skipped), strict=True))


@pytest.mark.slow
def test_optax_maps_8_bit_moments_of_a_train_state_with_its_parameters():
    tx, params = jamp.quantized_state(optax.adam(1e-2)), {"w": jnp.ones((64, 128)), "b": jnp.ones(128)}
    state = TrainState.create(apply_fn=None, params=params, tx=tx)
    shapes = jax.tree.map(lambda x: str(x.shape), params)
    found = optax.tree.map_params(state.tx, lambda x, shape: shape, state.opt_state, shapes)
    has_codes = lambda x: hasattr(x, "codes")
    moments = list(filter(has_codes, jax.tree.leaves(found, is_leaf=has_codes)))
    assert len(moments) == 2
    for moment in moments:
        assert moment.codes == moment.scales == shapes


@pytest.mark.slow
def test_float16_trains_as_float32_does():
    states = [created(loss_scale=jamp.DynamicLossScale(init_scale=256.0)), created(Net(jnp.float32))]
    run = lambda state: jax.lax.scan(lambda state, _: train_step(state, X), state, length=100)[1]
    half, full = jax.jit(lambda states: [*map(run, states)])(states)
    np.testing.assert_allclose(half, full, rtol=2e-2)
    assert half[-1] < half[0] / 2


def test_step_counts_applied_steps_where_flaxs_own_counts_all():
    loss = lambda params, target: jnp.sum((params["w"] * target) ** 2)
    step = jax.jit(lambda s, target: s.apply_gradients(grads=jamp.grad(loss, s)(s.params, target)))
    kinds = (train_state.TrainState, jamp.loss_scaled(SGD)), (TrainState, SGD)
    starts = [kind.create(apply_fn=None, params={"w": jnp.ones(2)}, tx=tx) for kind, tx in kinds]
    theirs, ours = (functools.reduce(step, (1.0, jnp.inf, 2.0), start) for start in starts)
    assert bits((theirs.params, theirs.opt_state)) == bits((ours.params, ours.opt_state))
    assert (int(theirs.step), int(ours.step)) == (3, 2)


def test_a_skip_costs_no_memory_traffic_on_the_parameters_and_their_ema():
    def cost(loss_scale):
        params, ema = jnp.ones((256, 256)), lambda state: optax.incremental_update(state.params, state.ema, 0.1)
        fields = {"apply_fn": None, "tx": optax.trace(0.9), "params": params, "ema": params, "loss_scale": loss_scale}
        state, grads = TrainState.create(**fields), jnp.copy(params)
        step = jax.jit(lambda state, grads: state.apply_gradients(grads=grads, ema=ema(state)), donate_argnums=0)
        compiled = step.lower(state, grads).compile()
        compiled(state, grads)  # The parameters may be given twice: both are donated.
        return np.array([compiled.cost_analysis()["bytes accessed"], compiled.memory_analysis().temp_size_in_bytes])

    accessed, temporary = cost(jamp.DynamicLossScale()) - cost(jamp.NoOpLossScale())
    # The check reads the gradients once more. On CPU it also writes and reads one answer for each.
    assert 0 <= accessed - 3 * 4 * 256 * 256 < 20_000
    assert temporary < 20_000


def test_autocast_and_casts_combine_with_a_train_state_its_statistics_and_dropout():
    state = created(Net(None), tx=optax.trace(0.9))  # which keeps the gradients
    wraps = (
        functools.partial(jamp.autocast, compute_dtype=jnp.float16),
        lambda f: lambda p, *a: f(jamp.cast_floating(p, jnp.float16), *a),
        lambda f: f,
    )
    steps = [lambda state, wrap=wrap: train_step(state, X, wrap) for wrap in wraps]
    gradients = lambda state: state.value_and_grad(jamp.autocast(loss_fn, jnp.float16), has_aux=True)(
        state.params, state, X
    )
    assert products(gradients, state) == {jnp.dtype(jnp.float16)}
    assert "f16[" in str(jax.make_jaxpr(steps[1])(state))
    results = jax.jit(lambda state: [step(state) for step in steps])(state)
    trained = [(new.opt_state.inner_state, new.batch_stats, loss) for new, loss in results]
    assert distance(trained[0], trained[2]) < 1e-2
    dtypes = [{x.dtype.name for x in jax.tree.leaves(new.params)} for new, _ in results]
    assert (dtypes, [int(new.step) for new, _ in results]) == ([{"float32"}] * 3, [1] * 3)


def test_mistakes_with_collections_and_optimizers_are_named():
    state, params = TrainState.create(apply_fn=None, params={"w": X}, tx=SGD, batch_stats={"mean": X}), {"w": X}
    for wrong in ({"batch_stats": state.batch_stats}, freeze(state.batch_stats), {"mean": np.int32(X)}):
        with pytest.raises(ValueError, match=r"updates\['batch_stats'\]"):
            state.apply_gradients(grads=params, batch_stats=wrong)
    assert state.replace(batch_stats=7, step=5).batch_stats == 7
    with pytest.raises(AttributeError, match="object has no attribute 'missing'"):
        _ = state.missing
    for scaled in (with_masters(SGD), optax.chain(jamp.loss_scaled(SGD))):
        with pytest.raises(ValueError, match="plain"):
            TrainState.create(apply_fn=None, params=params, tx=scaled)


FP8 = nn.Sequential([nn.Dense(n, dot_general_cls=nn.Fp8DirectDotGeneralOp) for n in (8, 4)])
X8 = np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 6)
FP8_VARIABLES = jax.jit(FP8.init)(jax.random.key(0), X8)
FP8_SGD, OWG = optax.sgd(1e-3, momentum=0.9), "_overwrite_with_gradient"


def fp8_state(loss_scale, variables=FP8_VARIABLES):
    return TrainState.create(apply_fn=FP8.apply, params=variables, tx=FP8_SGD, loss_scale=loss_scale)


fp8_loss = lambda params, x: jnp.sum(FP8.apply(params, x) ** 2)
leaves = lambda tree: {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree.leaves_with_path(tree)}
ADAPTIVE = jamp.AdaptiveLossScale(init_scale=2.0**6, windows=(3, 10), initial_window=3)


@pytest.mark.parametrize(
    "loss_scale",
    [jamp.DynamicLossScale(init_scale=2.0**6, growth_interval=3), pytest.param(ADAPTIVE, marks=pytest.mark.slow)],
)
def test_amax_histories_are_those_without_loss_scaling_but_for_output_gradients(loss_scale):
    step = jax.jit(lambda state, x: state.apply_gradients(grads=state.value_and_grad(fp8_loss)(state.params, x)[1]))
    good = [X8 * np.float32(factor) for factor in (1.0, 0.9, 0.8, 0.7, 0.6)]
    plain, states = functools.reduce(step, good, fp8_state(jamp.NoOpLossScale())), [fp8_state(loss_scale)]
    for x in (good[0], X8 * np.float32(np.nan), *good[1:]):
        states.append(step(states[-1], x))
    scales = [float(jamp.get_loss_scale(state)) for state in (states[0], *states[2:-1])]
    assert (int(states[-1].step), scales) == (5, [2.0**6, 2.0**5, 2.0**5, 2.0**5, 2.0**6])
    assert bits(states[2].params) == bits(states[1].params)  # the skip moved the scale alone
    ours = leaves(states[-1].params)
    for path, expected in leaves(plain.params).items():
        if "output_grad_amax_history" in path:  # each amax as many times larger as its loss was
            in_order = lambda history: np.roll(history, -1)[-5:]  # the newest is kept first, the others behind it
            np.testing.assert_allclose(in_order(ours[path]), in_order(expected) * scales, rtol=1e-4)
        elif "output_grad_scale" in path:  # the history's largest amax is the first
            np.testing.assert_allclose(ours[path], expected * 2.0**6, rtol=1e-6)
        else:
            np.testing.assert_allclose(ours[path], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_flax_dynamic_scale_divides_fp8_state_by_the_loss_scale_but_jamp_does_not():
    theirs = lambda params, x: DynamicScale(scale=2.0**6).value_and_grad(fp8_loss)(params, x).grad
    ours = jamp.grad(fp8_loss, jamp.StaticLossScale(2.0**6).init()), jax.grad(jamp.scaled(fp8_loss, 2.0**6))
    grads = jax.jit(lambda x: [f(FP8_VARIABLES, x) for f in (jax.grad(fp8_loss), theirs, *ours)])
    true, theirs, *ours = (leaves(x[OWG]) for x in grads(X8))
    for path in (path for path in true if "output_grad" not in path):
        for found in ours:
            np.testing.assert_array_equal(found[path], true[path])
        np.testing.assert_array_equal(theirs[path], true[path] / 2.0**6)
    # The layers clip an infinite batch out of sight, but the histories show it.
    clipped, *_ = grads(X8 * np.float32(np.inf))
    assert [bool(jamp.all_finite(x)) for x in (clipped, clipped[OWG])] == [True, False]


@pytest.mark.parametrize("kind", [dict, freeze])
def test_fp8_state_is_replaced_and_skipped_and_has_no_optimizer_state(kind):
    state = fp8_state(jamp.DynamicLossScale(), kind(FP8_VARIABLES))
    assert OWG not in str(jax.tree.structure(state.opt_state))
    grads = jax.tree.map(lambda x: np.asarray(x) + np.float32(1), state.params)
    new, skipped = (state.apply_gradients(grads=grads, extra_args={"grads_finite": ok}) for ok in (True, False))
    assert jax.tree.structure(new) == jax.tree.structure(state)
    assert (bits(new.params[OWG]), bits(skipped.params)) == (bits(grads[OWG]), bits(state.params))


def test_in_a_linen_model_the_layer_is_the_name_of_the_module():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            for name in [f"h_{i}" for i in range(4)]:
                x = jnp.tanh(nn.Dense(16, name=name)(x))
            return x.sum()

    x = jnp.ones((2, 16))
    variables = Net().init(jax.random.key(0), x)
    variables["params"]["h_3"]["kernel"] *= 1e5
    found = jamp.debug.find_nonfinite(jamp.autocast(Net().apply, jnp.float16), grad=True)(variables, x).finding
    assert (found.scope, found.parameter) == ("Net/h_3", "variables['params']['h_3']['kernel']")
    assert "(__call__) > flax/linen/linear.py:" in found.source


class WithMethods(TrainState, abc.ABC):
    def doubled(self):
        return 2 * self.ema


@pytest.mark.parametrize("cls", [TrainState, WithMethods])
@pytest.mark.parametrize("added", [{}, {"ema": jnp.ones(2), "key": jnp.arange(2)}], ids=["", "added fields"])
def test_a_state_and_its_type_are_pickled_and_copied_like_any_other(cls, added):
    state = cls.create(apply_fn=None, params=jnp.ones(2), tx=SGD, **added)
    state = state.replace(tx=None)  # Optax's closures cannot be pickled.
    assert pickle.loads(pickle.dumps(type(state))) is type(state)
    for again in (pickle.loads(pickle.dumps(state)), copy.deepcopy(state), copy.copy(state)):
        assert type(again) is type(state)
        assert bits(again) == bits(state)
        assert jax.tree.structure(again) == jax.tree.structure(state)
    assert not added or cls is TrainState or bits(again.doubled()) == bits(2 * added["ema"])
    assert copy.deepcopy(type(state)) is type(state)


def test_a_state_that_is_a_constant_of_the_jitted_step_warns():
    state = TrainState.create(apply_fn=None, params=jnp.ones(2), tx=SGD)
    loss = lambda params: jnp.sum(params**2)
    with pytest.warns(UserWarning, match="keeps the first scale forever") as caught:
        jax.jit(lambda params: state.value_and_grad(loss)(params)).lower(state.params)
    assert [w.filename for w in caught] == [__file__]
    jax.jit(lambda state: state.value_and_grad(loss)(state.params)).lower(state)
    state.value_and_grad(loss)(state.params)


def test_two_states_of_one_optimizer_have_one_structure_as_in_flax():
    tx, loss_scale = optax.adam(1e-3), jamp.DynamicLossScale()
    create = lambda: TrainState.create(apply_fn=None, params={"w": jnp.ones(3)}, tx=tx, loss_scale=loss_scale)
    shardings = jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0]), jax.eval_shape(create))
    step = jax.jit(lambda state: state.apply_gradients(grads={"w": jnp.ones(3)}))
    jax.tree.map(np.testing.assert_array_equal, step(create()), step(create()))
    assert step._cache_size() == 1
    jax.tree.map(np.testing.assert_array_equal, create(), jax.jit(create, out_shardings=shardings)())


def test_a_state_may_be_made_inside_jit_with_a_traced_learning_rate():
    def loss(rate):
        state = TrainState.create(apply_fn=None, params={"w": jnp.ones(3)}, tx=optax.sgd(rate))
        return jnp.sum(state.apply_gradients(grads={"w": jnp.ones(3)}).params["w"])

    with jax.checking_leaks():
        assert float(jax.jit(loss)(0.5)) == 1.5


def test_a_static_field_of_a_subclass_stays_as_it_is():
    class WithConfig(TrainState):
        config: Any = field(pytree_node=False, default=None)

    config = {1: "a", "b": 2}  # no pytree: its keys have no order
    assert WithConfig.create(apply_fn=None, params={}, tx=SGD, config=config).config is config


def test_a_declared_field_that_starts_as_the_parameters_can_be_donated_with_them():
    class WithAverage(TrainState):
        average: Any = None

    params = {"w": jnp.ones(3)}
    state = WithAverage.create(apply_fn=None, params=params, tx=optax.sgd(0.1), average=params)
    step = jax.jit(lambda state: state.apply_gradients(grads={"w": jnp.ones(3)}), donate_argnums=0)
    np.testing.assert_array_equal(step(state).average["w"], np.ones(3))


def test_a_collection_that_starts_as_a_python_number_does_not_retrace_the_step():
    state = TrainState.create(apply_fn=None, params={"w": jnp.ones(3)}, tx=SGD, average=0.0, key=jax.random.key(0))
    step = jax.jit(lambda state: state.apply_gradients(grads=state.params, average=jnp.sum(state.params["w"])))
    assert float(step(step(state)).average) < 3
    assert step._cache_size() == 1


def test_the_error_inside_a_property_of_a_subclass_is_the_one_that_is_raised():
    class WithVariables(TrainState):
        @property
        def variables(self):
            return {"params": self.params, "batch_stats": self.batch_stats}

    state = WithVariables.create(apply_fn=None, params={}, tx=SGD)
    with pytest.raises(AttributeError, match="'WithVariables' object has no attribute 'batch_stats'"):
        state.variables  # noqa: B018
