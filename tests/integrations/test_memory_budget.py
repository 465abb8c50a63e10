"""A memory budget on the models of Flax and Equinox: with dropout, statistics and counts of their own.

Its arguments and warnings are in test_recompute.py, its promises for random programs in test_memory_budget.py.
"""

import functools

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jaxprs import PRODUCTS, equations, normal
from trees import assert_close

import jamp
import jamp.debug
import jamp.equinox
import jamp.linen
import jamp.nnx
import jamp.plot

WIDTH, LAYERS = 32, 3
X = normal(64, WIDTH)
TX = optax.sgd(0.1, momentum=0.9)


def of_linen():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(LAYERS):
                h = nn.gelu(nn.Dense(4 * WIDTH)(nn.BatchNorm(use_running_average=False)(x)))
                x = x + nn.Dropout(0.1, deterministic=False)(nn.Dense(WIDTH)(h))
            return x

    model = Net()
    variables = jax.jit(model.init)({"params": jax.random.key(0), "dropout": jax.random.key(1)}, X)
    state = jamp.linen.TrainState.create(apply_fn=model.apply, tx=TX, **variables)

    def step(state, x, wrap):
        def loss_fn(params):
            variables, rngs = {"params": params, "batch_stats": state.batch_stats}, {"dropout": jax.random.key(2)}
            out, updates = state.apply_fn(variables, x, mutable=["batch_stats"], rngs=rngs)
            return jnp.mean((out - 1) ** 2), updates

        (_, updates), grads = state.value_and_grad(wrap(loss_fn), has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, **updates)

    return step, state


def of_nnx():
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.norm, self.drop = nnx.BatchNorm(WIDTH, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)
            self.up, self.down = (nnx.Linear(*n, rngs=rngs) for n in ((WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)))
            self.calls = nnx.Variable(jnp.array(0))

        def __call__(self, x):
            self.calls[...] += 1
            return x + self.drop(self.down(nnx.gelu(self.up(self.norm(x)))))

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])

        def __call__(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    model = nnx.jit(Net)(nnx.Rngs(0))
    graphdef, state = nnx.split((model, jamp.nnx.Optimizer(model, TX, wrt=nnx.Param)))

    def step(state, x, wrap):
        model, optimizer = nnx.merge(graphdef, state, copy=True)
        loss_fn = wrap(lambda model, x: jnp.mean((model(x) - 1) ** 2))
        _, grads = jamp.nnx.value_and_grad(loss_fn, optimizer)(model, x)
        optimizer.update(model, grads)
        return nnx.as_pure(nnx.state((model, optimizer)))

    return step, state


def of_equinox():
    class Net(eqx.Module):
        layers: list
        drop: eqx.nn.Dropout

        def __init__(self, key):
            shapes = [(WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)] * LAYERS
            self.layers = [eqx.nn.Linear(*n, key=key) for n, key in zip(shapes, jax.random.split(key, 6), strict=True)]
            self.drop = eqx.nn.Dropout(0.1)

        def __call__(self, x, key):
            for up, down in zip(self.layers[::2], self.layers[1::2], strict=True):
                key, used = jax.random.split(key)
                x = x + self.drop(down(jax.nn.gelu(up(x))), key=used)
            return x

    tx, net = jamp.loss_scaled(TX), eqx.filter_jit(Net)(jax.random.key(0))
    arrays, static = eqx.partition(net, eqx.is_inexact_array)

    def step(state, x, wrap):
        model, opt_state = eqx.combine(state[0], static), state[1]
        keys = jax.random.split(jax.random.key(2), len(x))
        loss_fn = wrap(lambda model, x: jnp.mean((jax.vmap(model)(x, keys) - 1) ** 2))
        _, grads = jamp.equinox.filter_value_and_grad(loss_fn, opt_state)(model, x)
        model, opt_state = jamp.equinox.apply_gradients(tx, grads, opt_state, model)
        return eqx.filter(model, eqx.is_inexact_array), opt_state

    return step, (arrays, tx.init(arrays))


def of_haiku():
    hk = pytest.importorskip("haiku")

    def net(x):
        for _ in range(LAYERS):
            h = jax.nn.gelu(hk.Linear(4 * WIDTH)(hk.BatchNorm(True, True, 0.9)(x, is_training=True)))
            x = x + hk.dropout(hk.next_rng_key(), 0.1, hk.Linear(WIDTH)(h))
        return x

    model, tx = hk.transform_with_state(net), jamp.loss_scaled(TX)
    params, statistics = jax.jit(model.init)(jax.random.key(0), X)

    def step(state, x, wrap):
        params, statistics, opt_state = state

        def loss_fn(params):
            out, new = model.apply(params, statistics, jax.random.key(2), x)
            return jnp.mean((out - 1) ** 2), new

        (_, statistics), grads = jamp.value_and_grad(wrap(loss_fn), opt_state, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), statistics, opt_state

    return step, (params, statistics, tx.init(params))


MODELS = {"Linen": of_linen, "NNX": of_nnx, "Equinox": of_equinox, "Haiku": of_haiku}
WRAPS = {
    "autocast": functools.partial(jamp.autocast, compute_dtype=jnp.bfloat16),
    "recompute": lambda fun, memory_budget: jamp.recompute(fun, memory_budget),
}


QUICK = {"Linen": "autocast", "NNX": "recompute"}
CASES = [
    pytest.param(model, wrap, marks=[pytest.mark.slow] * (wrap != QUICK.get(model)))
    for model in MODELS
    for wrap in WRAPS
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "wrap"), CASES)
def test_a_budget_computes_products_again_and_moves_the_state_of_the_model_once(model, wrap):
    step, state = MODELS[model]()
    results, counts = [], []
    for budget in (1.0, 0.5):
        bounded = functools.partial(WRAPS[wrap], memory_budget=budget)
        traced = jax.jit(functools.partial(step, wrap=bounded)).trace(state, X)
        found = [eqn for eqn in equations(traced.jaxpr) if eqn.primitive.name in PRODUCTS]
        counts.append(sum(eqn.invars[0].aval.ndim > 1 for eqn in found))  # without that of the check for overflows
        results.append(traced.lower().compile()(state, X))
    # In each layer two products, and two gradients of each. The loss of Equinox closes over x, which has none.
    without = 6 * LAYERS - (model == "Equinox")
    assert counts == [without, without + 2]  # half of the bytes are those of two of the three wide layers
    assert_close(*results, rtol=1e-4, atol=1e-4)  # another dropout mask differs by more
    moved = [not np.array_equal(*pair) for pair in zip(*map(jax.tree.leaves, (state, results[1])), strict=True)]
    assert sum(moved) > len(moved) / 2
    if model == "NNX":
        assert [int(block["calls"]) for block in results[1][0]["blocks"].values()] == [1] * LAYERS


def steps_of_nnx():
    def make(budget):
        @nnx.jit
        def step(model, optimizer, x):
            loss_fn = jamp.recompute(lambda model, x: jnp.mean((model(x) - 1) ** 2), budget)
            optimizer.update(model, nnx.grad(loss_fn)(model, x))

        return step

    rngs = nnx.Rngs(0)
    shapes = [(WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)] * LAYERS
    model = nnx.Sequential(*(layer for n in shapes for layer in (nnx.Linear(*n, rngs=rngs), nnx.gelu)))
    return make, (model, nnx.Optimizer(model, TX, wrt=nnx.Param), X)


def steps_of_equinox(jit):
    def make(budget):
        @jit
        def step(model, opt_state, x):
            loss_fn = jamp.recompute(lambda model, x: jnp.mean((jax.vmap(model)(x) - 1) ** 2), budget)
            updates, opt_state = TX.update(eqx.filter_grad(loss_fn)(model, x), opt_state, model)
            return eqx.apply_updates(model, updates), opt_state

        return step

    model = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, LAYERS, jax.nn.gelu, key=jax.random.key(0))
    return make, (model, TX.init(eqx.filter(model, eqx.is_inexact_array)), X)


STEPS = {
    "nnx.jit": steps_of_nnx,
    "eqx.filter_jit": lambda: steps_of_equinox(eqx.filter_jit),
    "eqx.filter_jit, donated": lambda: steps_of_equinox(eqx.filter_jit(donate="all")),
    "no jit": lambda: steps_of_equinox(lambda step: step),
}


@pytest.mark.slow_after(1)
@pytest.mark.filterwarnings("ignore:Some donated buffers")  # the batch
@pytest.mark.parametrize(
    "jit", [pytest.param(jit, marks=[pytest.mark.slow] * (jit == "eqx.filter_jit")) for jit in STEPS]
)
def test_memory_curve_takes_the_steps_of_flax_and_equinox_and_runs_none(jit):
    make, args = STEPS[jit]()
    find = jamp.debug.memory_curve(make, (0.3, 1.0))
    arrays = lambda: jax.tree.map(np.array, eqx.filter(args, eqx.is_array))
    before = arrays()
    low, high = find(*args).points
    assert high.flops < low.flops <= 1.5 * high.flops
    sizes = [x.size * x.dtype.itemsize for x in jax.tree.leaves(args) if hasattr(x, "dtype")]
    copies = (high.total - high.temporary) / sum(sizes)
    assert copies < 1.1 if "donated" in jit else 1.7 < copies < 2.1  # state, and new state
    jax.tree.map(np.testing.assert_array_equal, before, arrays())
    if "no jit" in jit:
        assert find(*eqx.filter_eval_shape(lambda: args)).points == (low, high)


def test_the_curve_of_a_function_without_products_and_of_a_wrong_limit():
    curve = jamp.debug.memory_curve(lambda budget: jax.grad(lambda x: jnp.sum(jnp.sin(x))), (1.0, 0))(jnp.ones(8))
    assert "0.000" in str(curve)
    jamp.plot.memory_curve({"sine": curve})
    with pytest.raises(TypeError, match="must be the function"):
        jamp.debug.memory_curve(jax.jit(jax.grad(jnp.sum)))(jnp.ones(8))
    for wrong in ("15.5gb", 3):
        with pytest.raises(ValueError, match=r"15\.5GiB"):
            curve.largest(wrong)
