"""shard_map as people write it: weights that all devices share, a sharded batch, and the default check_vma."""

import jax
import jax.numpy as jnp
import numpy as np
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
CHECKED = [pytest.param(True, id="vma"), pytest.param(False, id="no vma")]


def gradients_of(fun, axes, check_vma):
    """`jax.grad(fun)`, also inside a scan. Without the types of check_vma, the gradients are averaged by hand."""

    def run(params, x, gain):
        add = lambda total, i: (jax.tree.map(jnp.add, total, jax.grad(fun)(params, x, gain)), None)
        first = jax.grad(fun)(params, x, gain)
        found = lax.scan(add, jax.tree.map(jnp.zeros_like, first), jnp.arange(2))[0]
        return (first, found) if check_vma else lax.pmean((first, found), tuple(axes))

    return run


@pytest.mark.parametrize("check_vma", CHECKED)
@pytest.mark.parametrize("name", WAYS)
def test_scaled_gradients_are_jaxs_and_replicas_try_again_together(name, check_vma):
    fun, axes, of_params, of_batch = WAYS[name]
    of_params = of_params if check_vma else P()
    tries = (2, 1, 0)
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
