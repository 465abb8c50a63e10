"""shard_map as people write it: weights that all devices share, a sharded batch, and the default check_vma."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

import jamp

ONE, TWO = {"data": 8}, {"data": 4, "model": 2}


def mapped(fun, axes, in_specs, out_specs=P(), **kwargs):
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    return jax.jit(jax.shard_map(fun, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **kwargs))


@jax.custom_vjp
def through_float16(x, gain):
    """`x`, whose cotangents pass through float16 multiplied by `gain`."""
    return x


half = lambda x: x.astype(jnp.float16).astype(jnp.float32)
through_float16.defvjp(lambda x, gain: (x, gain), lambda gain, g: (half(g * gain) / gain, jnp.zeros_like(gain)))


def loss_fn(params, x, gain):
    """The mean of a network's squared results. `gain` has a number for each example."""
    h = jnp.tanh(x @ params["w1"] + params["b"]) @ params["w2"]
    return jnp.mean(through_float16(h, gain[:, None]) ** 2)


def tensor_parallel(params, x, gain):
    h = lax.psum(jnp.tanh(x @ params["w1"] + params["b"]) @ params["w2"], "model")
    return jnp.mean(through_float16(h, gain[:, None]) ** 2)


def two_losses(params, x, gain):
    """Losses of split and of shared weights, without communication."""
    return jnp.mean(through_float16(params["w1"], jnp.max(gain)) ** 2), jnp.mean(jnp.sin(params["b"]) ** 2)


RNG = np.random.default_rng(0)
PARAMS = {
    name: jnp.asarray(RNG.normal(size=n), jnp.float32) for name, n in {"w1": (4, 6), "b": 6, "w2": (6, 2)}.items()
}
X = jnp.asarray(RNG.normal(size=(16, 4)), jnp.float32)
SPLIT = {"w1": P(None, "model"), "b": P("model"), "w2": P("model")}
WAYS = {
    "one axis": (loss_fn, ONE, P(), P("data")),
    "one of two axes": (loss_fn, TWO, P(), P("data")),
    "two axes": (loss_fn, TWO, P(), P(("data", "model"))),
    "a mean over the batch": (lambda *args: lax.pmean(loss_fn(*args), "data"), ONE, P(), P("data")),
    "two losses": (two_losses, TWO, {"w1": P("data"), "b": P(), "w2": P()}, P("data")),
    "split weights": (tensor_parallel, TWO, SPLIT, P("data")),
    "varying weights": (lambda p, *args: loss_fn(lax.pcast(p, "data", to="varying"), *args), ONE, P(), P("data")),
}


def gradients_of(fun, axes, check_vma):
    """`jax.grad(fun)`, also inside a scan. Without the types of check_vma, the gradients are averaged by hand."""

    def run(params, x, gain):
        add = lambda total, i: (jax.tree.map(jnp.add, total, jax.grad(fun)(params, x, gain)), None)
        first = jax.grad(fun)(params, x, gain)
        found = lax.scan(add, jax.tree.map(jnp.zeros_like, first), jnp.arange(2))[0]
        return (first, found) if check_vma else lax.pmean((first, found), tuple(axes))

    return run


# "two losses" leaves one of two axes out and splits a weight, too, "scaled" in STEPS below takes a mean over the batch,
# and the weights of test_mapped.py vary.
REST = "one of two axes", "a mean over the batch", "varying weights", "split weights"
WAYS_CHECKED = [
    pytest.param(name, check_vma, marks=[pytest.mark.slow] * (name in REST or (not check_vma and name != "one axis")))
    for name in WAYS
    for check_vma in (True, False)
]


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(("name", "check_vma"), WAYS_CHECKED)
def test_scaled_gradients_are_jaxs_and_replicas_try_again_together(name, check_vma):
    fun, axes, of_params, of_batch = WAYS[name]
    of_params = of_params if check_vma else P()
    tries = (2, 1, 0) if name == "one axis" else (2, 0)
    run = lambda f: gradients_of(lambda *args: sum(jax.tree.leaves(f(*args))), axes, check_vma)
    every = lambda *args: [run(f)(*args) for f in (fun, *(jamp.scaled(fun, retries=n) for n in tries))]
    specs = (of_params, of_batch, of_batch), [(of_params, of_params)] * (1 + len(tries))
    program = mapped(every, axes, *specs, check_vma=check_vma)
    for overflows in ((), (5,), (0, 15)):
        # The scale of 2**15 overflows in these examples. That of the first retry does not.
        gain = jnp.ones(16).at[jnp.array(overflows, int)].set(2.0**7)
        expected = program(PARAMS, X, jnp.ones(16))[0]
        for n, found in zip(tries, program(PARAMS, X, gain)[1:], strict=True):
            if overflows and not n:
                assert not jamp.all_finite(found)
                continue
            jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-3, atol=2e-4), found, expected)
            for x in jax.tree.leaves(found) if of_params == P() else ():
                assert len({np.asarray(shard.data).tobytes() for shard in x.addressable_shards}) == 1


def network(params, x):
    return jnp.mean((jnp.tanh(jnp.tanh(x @ params["w1"]) @ params["w2"]) @ params["w1"].T) ** 2)


WIDE = {
    name: jnp.asarray(RNG.normal(size=shape) / 8, jnp.float32)
    for name, shape in {"w1": (16, 64), "w2": (64, 64)}.items()
}
ROWS = jnp.asarray(RNG.normal(size=(16, 16)), jnp.float32)
LOW = jax.tree.map(lambda x: x.astype(jnp.bfloat16), WIDE)
SGD = optax.sgd(0.5, momentum=0.5)
named = lambda tx, axes: jamp.loss_scaled(tx, axis_name=axes)
unscaling = lambda axes: jamp.loss_scaled(SGD, unscale=True, axis_name=axes)


def trains(wrap, grad=jamp.grad, params=WIDE):
    """A train step of the optimizer `wrap(axes)`, with the gradients of `grad(loss, state)`, and its arguments."""

    def make(loss, axes):
        tx = wrap(axes)
        step = lambda params, state, x: tx.update(grad(loss, state)(params, x), state, params)
        return step, tx.init(params), params

    return make


def autocast(target):
    kwargs = {"rules": {"dot_general": "compute"}} if not isinstance(target, str) else {}
    return trains(lambda axes: named(SGD, axes), lambda fun, s: jamp.grad(jamp.autocast(fun, target, **kwargs), s))


def rounded(tx):
    of_float32 = lambda fun: lambda params, x: fun(jamp.cast_floating(params, "float32"), x)
    return trains(lambda axes: named(tx, axes), lambda fun, s: jamp.grad(of_float32(fun), s), LOW)


def with_grad_scaler(loss, axes):
    def step(params, state, x):
        scaler, opt_state = state
        grads = scaler.value_and_grad(loss)(params, x)[1]
        return scaler.step(SGD, opt_state, params, grads=grads)

    return step, (jamp.GradScaler(axis_name=axes), SGD.init(WIDE)), WIDE


def manual(loss, axes):
    tx = named(SGD, axes)

    def step(params, state, x):
        scaled = jax.grad(lambda p: jamp.scale_loss(loss(p, x), state))(params)
        true, finite = jamp.unscale_and_check(scaled, state, axis_name=axes)
        return tx.update(true, state, params, grads_finite=finite)

    return step, tx.init(WIDE), WIDE


STEPS = {
    "grad": trains(lambda axes: named(SGD, axes)),
    "without axis_name": trains(lambda axes: jamp.loss_scaled(SGD)),  # The gradients are those of the batch.
    "unscale": trains(unscaling, lambda fun, s: jax.grad(lambda *args: jamp.scale_loss(fun(*args), s))),
    "unscale_and_check": manual,
    "scaled": trains(
        lambda axes: jamp.skip_nonfinite(SGD, axis_name=axes),
        lambda fun, _: jax.grad(jamp.scaled(jamp.autocast(fun, jnp.float16))),
    ),
    "GradScaler": with_grad_scaler,
    "quantized_state": trains(lambda axes: named(jamp.quantized_state(SGD), axes)),
    "master_params": rounded(jamp.master_params(SGD)),
    "master_params, split": rounded(jamp.master_params(SGD, split=True)),
    "stochastic_rounding": rounded(jamp.stochastic_rounding(SGD)),
    "autocast to float16": autocast("float16"),
    "autocast to bfloat16": autocast("bfloat16"),
    "autocast to float8": autocast(jamp.Float8(min_size=1)),
    "autocast to int8": autocast(jamp.Int8(min_size=1)),
}
BATCHES = {"one axis": (ONE, ("data",)), "one of two axes": (TWO, ("data",)), "two axes": (TWO, ("data", "model"))}
ROUNDED = "autocast", "scaled", "stochastic_rounding", "quantized_state"


AUTOCAST = {name for name in STEPS if name.startswith("autocast")}
GRAD = {"grad", "without axis_name"}
CASES = [
    pytest.param(STEPS.keys() - AUTOCAST, "two axes", id="float32, two axes"),
    pytest.param(GRAD, "one of two axes", id="grad, one of two axes"),
    pytest.param(AUTOCAST, "two axes", id="autocast, two axes", marks=pytest.mark.slow),
    pytest.param(STEPS.keys() - GRAD, "one of two axes", id="others, one of two axes", marks=pytest.mark.slow),
    pytest.param(STEPS.keys(), "one axis", id="one axis", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("names", "batch"), CASES)
def test_a_train_step_is_that_of_the_batch_and_skips_an_overflow_of_one_shard(names, batch):
    """All train steps are one program."""
    axes, over = BATCHES[batch]
    names = sorted(names)
    whole, states, params = zip(*(STEPS[name](network, None) for name in names), strict=True)
    shards = [STEPS[name](lambda *args: lax.pmean(network(*args), over), over)[0] for name in names]
    every = lambda steps: lambda *args: [step(*arg, args[-1]) for step, *arg in zip(steps, *args[:-1], strict=True)]
    of_shards, of_whole = mapped(every(shards), axes, (P(), P(), P(over))), jax.jit(every(whole))
    for x in (ROWS, ROWS.at[3, 1].set(jnp.inf)):
        results = (program(list(params), list(states), x) for program in (of_shards, of_whole))
        for name, found, expected in zip(names, *results, strict=True):
            rtol, atol = (0.1, 0.02) if name.startswith(ROUNDED) else (1e-3, 1e-5)
            assert jax.tree.structure(found) == jax.tree.structure(expected)
            for ours, theirs in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
                assert ours.dtype == theirs.dtype
                wide = [np.asarray(y, np.float32) for y in (ours, theirs)]
                np.testing.assert_allclose(*wide, rtol, atol * np.abs(wide[1]).max(), err_msg=name)
                assert len({np.asarray(shard.data).tobytes() for shard in ours.addressable_shards}) == 1


def test_a_check_over_two_axes_takes_gradients_that_are_split_over_one():
    """jax.lax.psum takes no array that varies along one of its axes and not along the other."""
    check = lambda g: jamp.all_finite(g, axis_name=("data", "model"))
    specs = P("data"), P("model"), P(None, "model"), P()
    program = mapped(lambda *split: [check(x) for x in split], TWO, specs)
    for x, is_finite in ((jnp.ones((4, 4)), True), (jnp.ones((4, 4)).at[3, 3].set(jnp.nan), False)):
        assert [bool(found) for found in program(*[x] * 4)] == [is_finite] * 4


def test_an_overflow_is_seen_over_an_axis_of_vmap_and_one_of_shard_map():
    """Of both at once JAX takes a sum only without check_vma."""
    every = ("v", "d"), ["d", "v"], "d", ["d"]
    check = lambda x: [
        jax.vmap(lambda y, names=names: jamp.all_finite(y, axis_name=names), axis_name="v")(x)[:, None]
        for names in every
    ]
    program = mapped(check, {"d": 8}, P(None, "d"), P(None, "d"), check_vma=False)
    for names, found in zip(every, program(jnp.ones((3, 8)).at[1, 2].set(jnp.inf)), strict=True):
        assert found.tolist() == [[i != 1 and "v" not in names] * 8 for i in range(3)]
