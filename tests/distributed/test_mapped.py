"""shard_map, pmap and vmap with an axis name: who is asked, and what happens when somebody is forgotten."""

import functools
import re
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from distributed.hlo import SCALAR, collectives, loops
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from steps import with_masters
from trees import assert_equal

import jamp

N = 8
WAYS = ["shard_map", "shard_map without vma", "pmap", "vmap"]
SGD = optax.sgd(0.5, momentum=0.5)
PAGE = Path(__file__).resolve().parents[2] / "docs/distributed.md"


def mesh(**axes):
    axes = axes or {"data": N}
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def mapped(way, f):
    """`f` on each replica. Every argument and every result has a leading axis of replicas."""
    if way in ("pmap", "vmap"):
        return jax.pmap(f, "data") if way == "pmap" else jax.jit(jax.vmap(f, axis_name="data"))
    stacked = lambda *args: jax.tree.map(lambda x: x[None], f(*jax.tree.map(lambda x: x[0], args)))
    specs = {"in_specs": P("data"), "out_specs": P("data")}
    return jax.jit(jax.shard_map(stacked, mesh=mesh(), check_vma=way == "shard_map", **specs))


def gradients(bad=False):
    rng = np.random.default_rng(bad)
    grads = {"w": rng.normal(size=(N, 4, 3)).astype(np.float32), "b": rng.normal(size=(N, 3)).astype(np.float32)}
    if bad:
        grads["b"][5, 1] = np.nan
    return grads


def everywhere(x):
    return jax.tree.map(lambda x: jnp.stack([x] * N), x)


CASES = [*((way, jamp.loss_scaled) for way in WAYS), ("shard_map", with_masters)]


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(("way", "wrapper"), CASES)
def test_replicas_agree_on_local_or_averaged_gradients_and_nobody_averages_them(way, wrapper):
    tx, params = wrapper(SGD, axis_name="data"), everywhere({"w": jnp.ones((4, 3)), "b": jnp.ones(3)})
    check = lambda g, state: (jamp.all_finite(g, axis_name="data"), *jamp.unscale_and_check(g, state, axis_name="data"))
    averaged = lambda g, p: [x.update(lax.pmean(g, "data"), x.init(p), p) for x in (wrapper(SGD), tx)]
    f = mapped(way, lambda g, state, p: (*tx.update(g, state, p), averaged(g, p), *check(g, state)))
    state = jax.jit(jax.vmap(tx.init))(params)
    for bad in (False, True):
        grads = gradients(bad)
        updates, new_state, of_averaged, *found, true, ok = f(grads, state, params)
        assert_equal([*found, ok, *map(jamp.get_grads_finite, (new_state, *of_averaged))], [np.full(N, not bad)] * 5)
        of_averaged = jax.device_get(of_averaged)
        assert_equal(of_averaged, everywhere(jax.tree.map(lambda x: x[0], of_averaged)))
        assert_equal(true, jax.tree.map(lambda g: g * np.float32(2.0**-16), grads))
        if bad:
            assert_equal(new_state.inner_state, state.inner_state)
            assert_equal(jamp.get_loss_scale(new_state), np.full(N, 2.0**15, np.float32))
            assert all(np.all((x == 0) & np.signbit(x)) for x in jax.tree.leaves(jax.device_get(updates)))
        elif wrapper is jamp.loss_scaled:
            assert_equal(updates, jax.tree.map(lambda g: np.float32(-0.5) * g, grads))  # the first step of SGD
        state = new_state


def test_gradients_under_shard_map_are_jaxs_and_of_a_mean_the_batchs_unlike_flaxs():
    x, w, state = np.arange(N * 3, dtype=np.float32).reshape(N, 3), jnp.ones(3), jamp.StaticLossScale(2.0**12).init()
    loss = lambda w, x: jnp.mean((w * x) ** 2)
    assert_equal(
        *mapped("shard_map", lambda x: (jamp.value_and_grad(loss, state)(w, x), jax.value_and_grad(loss)(w, x)))(x)
    )
    f = jamp.value_and_grad(lambda w, x: lax.pmean(loss(w, x), "data"), state)
    found = jax.jit(jax.shard_map(f, mesh=mesh(), in_specs=(P(), P("data")), out_specs=P()))(w, x)
    assert_equal(found, jax.value_and_grad(loss)(w, x))


USES = [
    lambda g, name: jamp.all_finite(g, axis_name=name),
    lambda g, name: jamp.unscale_and_check(g, jamp.StaticLossScale().init(), axis_name=name),
    lambda g, name: (tx := jamp.loss_scaled(SGD, axis_name=name)).update(g, tx.init(g)),
    lambda g, name: (tx := with_masters(SGD, axis_name=name)).update(g, tx.init(g), g),
]


def test_a_wrong_or_missing_axis_name_is_a_clear_error():
    for f in (functools.partial(use, name="rows") for use in USES):
        for way in (*(mapped(way, f) for way in WAYS), jax.jit(f), f):
            with pytest.raises(NameError, match=r"enclosing shard_map.*'rows'"):
                way(gradients())


def local_steps(axis_name, check_vma):
    """A state that is said to be replicated, after a step with an overflow on one of the replicas."""
    tx = jamp.loss_scaled(SGD, axis_name=axis_name)
    f = lambda g, state: tx.update(jax.tree.map(lambda x: x[0], g), state)[1]._replace(inner_state=None)
    f = jax.shard_map(f, mesh=mesh(), in_specs=(P("data"), P()), out_specs=P(), check_vma=check_vma)
    grads = gradients(bad=True)
    return jax.jit(f)(grads, jax.device_put(tx.init(jax.tree.map(lambda x: x[0], grads)), NamedSharding(mesh(), P())))


@pytest.mark.slow
@pytest.mark.promotes("optax.adamw in the page")
def test_a_forgotten_axis_name_is_found_by_check_vma_or_by_the_documented_assertion():
    page = {}
    for program in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        exec(compile(program, PAGE, "exec"), page)
    with pytest.raises(ValueError, match="out_specs"):
        local_steps(None, check_vma=True)
    for check_vma in (True, False):
        page["assert_replicated"](local_steps("data", check_vma))
    with pytest.raises(AssertionError, match=r"\.loss_scale_state\.loss_scale differs between .* 65536.* and .* 32768"):
        page["assert_replicated"](local_steps(None, check_vma=False))


@pytest.mark.parametrize("check_vma", [True, False])
def test_all_axes_that_gradients_are_sharded_over_are_named(check_vma):
    """The overflow is on one of four replicas, in one of its two parts."""
    grads, on = np.ones((8, 6), np.float32), {"mesh": mesh(data=4, model=2), "check_vma": check_vma}
    grads[5, 4] = np.inf
    names = ("data", "model"), "data", "model"
    check = lambda g: [jamp.all_finite(g, axis_name=name)[None] for name in names]
    found = jax.shard_map(check, in_specs=P("data", "model"), out_specs=P(("data", "model")), **on)(grads)
    expected = [False] * 8, [True, False] * 4, [True] * 4 + [False] * 2 + [True] * 2
    assert [x.tolist() for x in found] == [*expected]


@pytest.mark.parametrize("check_vma", [True, False])
def test_micro_batches_under_shard_map_are_checked_once_at_the_end(check_vma):
    def step(tx, value_and_grad, params, state, x):
        mine = jax.tree.map(lambda w: lax.pcast(w, "data", to="varying"), params)
        loss = lambda ws, x: jnp.mean(functools.reduce(lambda x, w: jnp.tanh(x @ w), ws, x) ** 2)
        add = lambda total, x: (jax.tree.map(jnp.add, total, value_and_grad(loss, state)(mine, x)), None)
        zeros = jax.tree.map(jnp.zeros_like, (x[0, 0, 0], mine))
        (value, grads), _ = lax.scan(add, zeros, x)
        # Each part is checked where it is, and reduced once.
        updates, state = tx.update(lax.pmean(grads, "data"), state, params)
        return optax.apply_updates(params, updates), state, lax.pmean(value, "data")

    params, x, texts = [jnp.ones((16, 16)) / 4] * 2, jnp.ones((4, N * 2, 16)), []
    on = {"mesh": mesh(), "in_specs": (P(), P(), P(None, "data")), "out_specs": P(), "check_vma": check_vma}
    plain = SGD, lambda loss, state: jax.value_and_grad(loss)
    for tx, value_and_grad in ((jamp.loss_scaled(SGD, axis_name="data"), jamp.value_and_grad), plain):
        f = functools.partial(step, tx, value_and_grad)
        texts.append(jax.jit(jax.shard_map(f, **on)).lower(params, tx.init(params), x).compile().as_text())
    assert collectives(texts[0]) == collectives(texts[1]) + Counter({SCALAR: 1})
    assert [collectives(loops(text)) for text in texts] == [Counter()] * 2


@pytest.mark.parametrize("way", ["jit", "shard_map"])
def test_autocast_keeps_shardings_and_collectives(way):
    like = lambda shape, spec: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh(), spec))
    w, x = like((16, 32), P("data") if way == "jit" else P()), like((64, 16), P("data"))
    on = {"mesh": mesh(), "in_specs": (P(), P("data")), "out_specs": P()}

    def compile(loss):
        f = jax.value_and_grad(loss)
        if way == "shard_map":
            f = jax.shard_map(jax.value_and_grad(lambda w, x: lax.pmean(loss(w, x), "data")), **on)
        compiled = jax.jit(f).lower(w, x).compile()
        found = collectives(compiled.as_text())  # of float32 or float16
        return Counter({(kind, shape[3:]): n for (kind, shape), n in found.items()}), compiled.output_shardings

    loss = lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)
    assert compile(jamp.autocast(loss, jnp.float16)) == compile(loss) != (Counter(), ())


@pytest.mark.slow
@pytest.mark.promotes("optax")
def test_index_specs_make_stochastic_rounding_in_shard_map_that_of_the_whole():
    specs = {"w": P("data"), "v": P(None, "data"), "b": P()}
    params = {
        "w": jnp.ones((16, 4), jnp.bfloat16),
        "v": jnp.ones((3, 16), jnp.bfloat16),
        "b": jnp.ones(5, jnp.bfloat16),
    }

    def step(tx, params):
        updates, state = tx.update(
            jax.tree.map(lambda p: p.astype(jnp.float32) * 1e-3, params), tx.init(params), params
        )
        return optax.apply_updates(params, updates), state.inner_state[0].trace

    rounding = functools.partial(jamp.stochastic_rounding, optax.sgd(1.0, momentum=0.9), state_dtype="bfloat16")
    shards = functools.partial(jax.shard_map, mesh=mesh(), in_specs=(specs,), out_specs=(specs, specs))
    whole = jax.jit(functools.partial(step, rounding()))(params)
    mapped_step = jax.jit(shards(functools.partial(step, rounding(index_specs=specs))))
    assert_equal(jax.device_get(mapped_step(params)), jax.device_get(whole))
    rounding(index_specs=specs).init(params)  # outside too
    assert not collectives(mapped_step.lower(params).compile().as_text())
    local = np.asarray(jax.jit(shards(functools.partial(step, rounding())))(params)[0]["w"], np.float32)
    assert np.array_equal(local, np.tile(local[:2], (8, 1)))  # Without them, equal shards are rounded alike.
    assert len(np.unique(np.asarray(whole[0]["w"], np.float32))) == 2


@pytest.mark.parametrize("way", [pytest.param(x, marks=[pytest.mark.slow] * (x == "pmap")) for x in WAYS])
def test_scaled_gives_the_gradients_of_a_loss_over_all_replicas(way):
    """One replica's backward pass overflows in float16, and its collectives would wait for the others forever."""

    @jax.custom_vjp
    def through(x, gain):
        return x

    half = lambda x: x.astype(jnp.float16).astype(jnp.float32)
    backward = lambda gain, g: (half(g * gain) / gain, jnp.zeros_like(gain))
    through.defvjp(lambda x, gain: (x, gain), backward)

    def loss_fn(w, x, gain):
        return lax.pmean(jnp.mean(through(jnp.sin(x @ w), gain) ** 2), "data")

    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.normal(size=4), jnp.float32)
    x = rng.normal(size=(N, 5, 4)).astype(np.float32)
    gains = np.float32([1] * 6 + [2.0**17, 2.0**9])
    run = lambda fun, gains: mapped(way, lambda *args: jax.grad(fun)(*args))(everywhere(w), x, gains)
    ones = np.ones(N, np.float32)
    np.testing.assert_allclose(run(jamp.scaled(loss_fn, retries=3), gains), run(loss_fn, ones), rtol=5e-3, atol=1e-4)
