"""scale_loss, unscale_and_check, value_and_grad and grad: what comes out, and where they may be called."""

import linecache
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from loss_scales import recorded
from steps import NO_GRADIENTS, OVERWRITTEN
from trees import assert_equal, assert_same_quotients

import jamp

TORCH = recorded("torch_unscale.json")
MAX, TINY = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)
WIDE = "float32", "complex64", "float64", "complex128"
NO_OP = jamp.NoOpLossScale().init()
TRUE = jnp.bool_(True)
unscale = jamp.unscale_and_check


def state_of(scale):
    return jamp.StaticLossScaleState(jnp.array(scale, jnp.float32))


@pytest.mark.filterwarnings("ignore:The loss is float16:UserWarning")
def test_float16_and_bfloat16_losses_come_out_float32_and_others_keep_their_dtype(x64):
    losses = {name: jnp.array(3.0, name) for name in (*WIDE, "float16", "bfloat16")}
    expected = {name: jnp.array(3.0 * 2.0**16, name if name in WIDE else "float32") for name in losses}
    assert_equal(jamp.scale_loss(losses, state_of(2.0**16)), expected)  # 196608 is not a float16
    scaled = jamp.scale_loss([0.5, None, jnp.bfloat16(2.0)], state_of(4.0))
    assert [(float(x), x.weak_type) for x in jax.tree.leaves(scaled)] == [(2.0, False), (8.0, False)]


def test_no_op_scales_nothing_and_is_constantly_finite():
    """That nothing is computed: test_contract.py."""
    tree = {"a": jnp.bfloat16([jnp.inf]), "b": jnp.float32(2.0)}
    as_float32 = {"a": jnp.float32([jnp.inf]), "b": jnp.float32(2.0)}
    assert_equal((jamp.scale_loss(tree, NO_OP), unscale(tree, NO_OP)), (as_float32, (as_float32, TRUE)))


def test_a_loss_that_is_not_floating_is_an_error():
    for loss in (3, jnp.int32(3), True, {"a": jnp.float32(1.0), "b": jnp.uint8(1)}, jax.random.key(0)):
        for state in (state_of(8.0), NO_OP):
            with pytest.raises(TypeError, match="floating"):
                jamp.scale_loss(loss, state)
            with pytest.raises(TypeError, match="floating"):
                jamp.value_and_grad(lambda w, loss=loss: (loss, w), state)(jnp.float32(1.0))


def warned(call, *args):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(*args)
    return [w for w in caught if "loss is float16" in str(w.message)]


def test_a_float16_loss_warns_once_per_trace_at_the_users_line_and_no_other_does():
    state, half_loss = state_of(2.0), lambda w: jnp.sum(w).astype(jnp.float16)
    jitted = jax.jit(lambda w: jamp.grad(half_loss, state)(w))  # the user's line
    for call in (
        lambda w: jamp.scale_loss([half_loss(w), half_loss(w)], state),  # the user's line
        lambda w: jamp.value_and_grad(half_loss, state)(w),  # the user's line
        lambda w: [jitted(w) for _ in range(3)],
    ):
        (warning,) = warned(call, jnp.ones(2))
        assert "# the user's line" in linecache.getline(__file__, warning.lineno)
        assert (warning.filename, "astype(jnp.float32)" in str(warning.message)) == (__file__, True)  # the cure
    assert len(warned(jitted, jnp.ones(3))) == 1
    for loss, scaler in ((jnp.bfloat16(1), state), (jnp.float32(1), state), (jnp.float16(1), NO_OP)):
        assert not warned(jamp.scale_loss, loss, scaler)


def test_value_and_grad_returns_the_true_loss_and_no_scaled_gradient():
    found = jamp.value_and_grad(lambda w: w + 3e38, state_of(2.0**16))(jnp.float32(0.0))
    assert_equal(found, (jnp.float32(3e38), jnp.float32(1.0)))  # Only the scaled loss overflows.
    w, fun = jnp.float32([0.1, 0.2, 0.3]), lambda factor: lambda w: jnp.sum(jnp.sin(w) * factor)
    ours = jax.jit(lambda factor, state: jamp.value_and_grad(fun(factor), state)(w))
    theirs = jax.jit(lambda factor: jax.value_and_grad(fun(factor))(w))
    for scale in (TINY, 2.0**-10, 1.0, 3.0, 1000.0, 2.0**16, 2.0**24, 2.0**120):
        factor = 2.0**10 if scale == TINY else 2.0**-60  # So small a scale underflows, unlike its reciprocal.
        found, expected = ours(factor, state_of(scale)), theirs(factor)
        np.testing.assert_allclose(found[0], expected[0], rtol=0)
        np.testing.assert_allclose(found[1], expected[1], rtol=3e-7 if scale in (TINY, 3.0, 1000.0) else 0)


def test_arguments_and_errors_are_as_for_jax(x64):
    state = state_of(2.0**16)

    def same(fun, *args, argnums=0, has_aux=False, holomorphic=False, **kwargs):
        options = {"argnums": argnums, "has_aux": has_aux, "holomorphic": holomorphic}
        for ours, theirs in ((jamp.grad, jax.grad), (jamp.value_and_grad, jax.value_and_grad)):
            assert_equal(ours(fun, state, **options)(*args, **kwargs), theirs(fun, **options)(*args, **kwargs))

    power = lambda a, b, c, *, power: a**power + jnp.sum(b["x"] * 3) + a * c
    for argnums in (0, 1, -1, (0,), (0, 1), (2, 0), [0, 2]):
        same(power, jnp.float32(2.0), {"x": jnp.float32([1.0, 2.0])}, jnp.float32(5.0), argnums=argnums, power=3)
    aux = {"half": jnp.float16(1), "count": jnp.int32(3), "nothing": None, "key": jax.random.key(1)}
    same(lambda w: (jnp.sum(w**2), (w.astype(jnp.float16), aux)), jnp.float32([1.0, 2.0]), has_aux=True)
    for z in (jnp.complex64(1 + 2j), jnp.complex64(3e19j)):  # The scaled loss of the second overflows.
        same(lambda z: z * z, z, holomorphic=True)
    same(lambda w: jnp.sum(w**2), jnp.array([1e-300, 2.0], jnp.float64))
    params = {"w": jnp.float32([1.0, 2.0]), "n": jnp.int32([3, 4])}
    fun = lambda p: jnp.sum(p["w"] * p["n"].astype(jnp.float32))
    assert_equal(jamp.grad(fun, state, allow_int=True)(params), jax.grad(fun, allow_int=True)(params))
    for call, match in (
        (lambda: jamp.grad(jnp.abs, state, holomorphic=True)(jnp.complex64(1.0)), "holomorphic"),
        (lambda: jamp.grad(fun, state)(params), "int32"),
        (lambda: jamp.value_and_grad(lambda w: w, state)(jnp.ones(2)), r"float64\[2\].*jnp\.mean"),
        (lambda: jamp.grad(lambda w: (w, 1), state)(1.0), "has_aux=True"),
        (lambda: jamp.grad(lambda w: w, state, has_aux=True)(1.0), "one array"),
        (lambda: jamp.grad(lambda w: (w, 1, 2), state, has_aux=True)(1.0), "a tuple"),
    ):
        with pytest.raises(TypeError, match=match):
            call()


CONTEXTS = {"eager": unscale, "jit": jax.jit(unscale)}


@pytest.mark.parametrize("context", CONTEXTS)
def test_gradients_of_every_dtype(context, x64):
    def make(values, dtype):
        w = jnp.array(values, dtype)
        return {"w": w, "scalar": w[0], "empty": jnp.zeros((0, 3), dtype)}

    dtypes = (*WIDE, "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
    grads = {name: make([8, -4, 0], name) for name in dtypes}
    true = {name: make([2, -1, 0], name if name in WIDE else "float32") for name in dtypes}
    assert_equal(CONTEXTS[context](grads, state_of(4.0)), (true, TRUE))
    for name in dtypes:
        unscaled, finite = CONTEXTS[context](grads | {name: make([8, np.nan, 0], name)}, state_of(4.0))
        assert not finite
        found = unscaled[name]["w"]
        assert (found[0], jnp.isfinite(found[1])) == (2.0, False)  # Finite neighbours are unscaled too.


@pytest.mark.parametrize("context", CONTEXTS)
def test_ints_bools_keys_float0_none_and_masked_nodes_pass_untouched(context):
    """And so does what overwrites, as the statistics of Flax's fp8 do, at any depth, by its key or its type."""
    kept = {"scale": jnp.float32([8.0]), "half": jnp.float16([jnp.inf]), "nan": jnp.float32(jnp.nan), "n": jnp.int32(3)}
    rest = {k: x for k, x in NO_GRADIENTS.items() if context == "eager" or k not in ("object", "string")}
    grads = {"w": jnp.float32([8.0]), "rest": rest, "model": [{"_overwrite_with_gradient": {"layer": kept}}]}
    grads |= {"nnx": {"a": [OVERWRITTEN(kept["half"])], "b": type("Subclass", (OVERWRITTEN,), {})(kept)}}
    assert_equal(CONTEXTS[context](grads, state_of(4.0)), (grads | {"w": jnp.float32([2.0])}, TRUE))
    assert jamp.all_finite(grads)
    assert not jamp.all_finite(grads | {"w": jnp.float32([jnp.nan])})
    for tree in (None, {}, [], (), optax.EmptyState(), {"a": {}, "b": [None]}):
        assert_equal(CONTEXTS[context](tree, state_of(4.0)), (tree, TRUE))


def test_gradients_of_at_most_32_bits_come_out_as_dtype_and_are_computed_in_float32(x64):
    grads = {name: jnp.array([24.0], name) for name in ("float16", "bfloat16", "float32", "float8_e5m2")}
    kept = {name: jnp.array([24.0], name) for name in ("float64", "complex64")}
    for dtype in (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64):
        quarter, same = ({k: jnp.array([x], dtype) for k in grads} for x in (6.0, 24.0))
        expected = quarter | {k: v / 4 for k, v in kept.items()}
        assert_equal(unscale(grads | kept, state_of(4.0), dtype=dtype), (expected, TRUE))
        assert_equal(unscale(grads, NO_OP, dtype=dtype)[0], same)
        # What overflows in the dtype that it comes out as is not finite.
        out, finite = unscale(jnp.float32([1e6, 4.0]), state_of(4.0), dtype=dtype)
        assert jnp.isfinite(out).all() == finite == (dtype != jnp.float16)
    for scale in (2.0**16, 2.0**30):  # In float16 the reciprocal is subnormal, or 0.
        assert_equal(unscale(jnp.float32([scale * 1.5]), state_of(scale), dtype=jnp.float16)[0], jnp.float16([1.5]))


def test_multiplies_by_the_float32_reciprocal_to_the_bit_as_torchs_kernel_does(x64):
    for record in TORCH["unscale_kernel"][:24]:  # In the others XLA flushes, or torch's check is of scaled gradients.
        grads, want = (jnp.array([float(x) for x in record[k]], record["dtype"]) for k in ("in", "out"))
        want = want.astype(jnp.float64 if record["dtype"] == "float64" else jnp.float32)
        out = unscale(grads, state_of(1.0 / record["inv_scale_f32"]))
        assert_same_quotients(out[0], want)
        assert_equal(out[1], jnp.bool_(record["found_inf"] == 0.0))
    records = [record for record in TORCH["inv_scale"] if record["scale_f32"] >= TINY]
    random = np.random.default_rng(0)
    scales, grads = (np.float32(2.0 ** random.uniform(*r, 10000)) for r in ((-126, 126), (-60, 60)))
    scales[: len(records)] = [record["scale_f32"] for record in records]
    grads *= random.choice(np.float32([-1.0, 1.0]), grads.size)
    out, finite = jax.jit(jax.vmap(unscale))(grads, jax.vmap(state_of)(scales))
    reciprocals = np.float32(1.0) / scales
    np.testing.assert_array_equal(reciprocals[: len(records)], [np.float32(r["inv_via_f64"]) for r in records])
    with np.errstate(over="ignore"):
        want = grads * reciprocals
    normal = (np.abs(want) >= TINY) & (reciprocals >= TINY)  # XLA flushes the subnormal ones.
    assert normal.mean() > 0.8
    assert_same_quotients(np.asarray(out)[normal], want[normal])
    np.testing.assert_array_equal(finite[normal], np.isfinite(want[normal]))


CALLS = CONTEXTS | {
    "constant of jit": lambda g, state: jax.jit(lambda g: unscale(g, state))(g),
    "NumPy constant of jit": lambda g, state: jax.jit(lambda g: unscale(g, jax.tree.map(np.asarray, state)))(g),
    "made in jit": lambda g, s: jax.jit(lambda g: unscale(g, jamp.StaticLossScale(float(s.loss_scale)).init()))(g),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_every_scale_gives_the_quotient_and_the_check_is_of_the_quotient(call):
    above = float(np.nextafter(np.float32(2.0**126), np.float32(MAX)))  # From here on the reciprocal is subnormal.
    for scale in (TINY, 2.0**-100, 0.5, 1.0, 2.0**126, above, 2.0**127, MAX):
        largest = min(MAX * scale, MAX)  # whose quotient is finite
        for g in (largest, min(1.0001 * largest, MAX) if scale < 1 else np.inf):
            grads = np.float32([g, -0.3 * largest, 12.0 * min(scale, 1e30), 0.0, 1e-40, -1e-45, TINY])
            with np.errstate(over="ignore"):
                want = (grads.astype(np.float64) / scale).astype(np.float32)
            out, finite = call(jnp.asarray(grads), state_of(scale))
            np.testing.assert_allclose(out, want, rtol=3e-7, atol=TINY / min(scale, 1.0))  # XLA flushes.
            assert bool(finite) == np.isfinite(want[0])


def test_one_dispatch_outside_jit_dissolved_inside_it():
    events, listener = [], lambda event, duration, **kwargs: events.append(event)
    loss, inner = {"a": jnp.float32(1.0), "b": jnp.bfloat16(1.0)}, jnp.ones(1000)
    grads = {"a": jnp.ones((2, 5)), "b": jnp.ones((2, 5)), "c": jnp.ones(3, jnp.float16), "n": jnp.int32(3)}
    state, other = jamp.DynamicLossScale(init_scale=4.0).init(), state_of(8.0)
    # Only the scale goes in, and not the tree that holds it, which may be of anything, and donated by then.
    tree = {"opt_state": (state, inner), "config": object(), "name": "adam", "fn": len, "more": [jnp.ones(7)]}
    inner.delete()
    jax.clear_caches()  # so that every operation that is dispatched on its own must be compiled
    scale_loss, check = (
        lambda loss, _, state: jamp.scale_loss(loss, state),
        lambda _, grads, state: jamp.all_finite(grads),
    )
    for call in (scale_loss, lambda _, grads, state: unscale(grads, state), check):
        for holder, compilations in ((state, 1), (other, 0), (tree, 0)):
            events.clear()
            jax.monitoring.register_event_duration_secs_listener(listener)
            call(loss, grads, holder)
            jax.monitoring.unregister_event_duration_listener(listener)
            assert events.count("/jax/core/compile/backend_compile_duration") == compilations
        assert_equal(call(loss, grads, tree), call(loss, grads, state))
        lowered = jax.jit(call).lower(loss, grads, other).as_text()
        assert not re.findall(r"func\.func private @(?!_where)\w+", lowered)  # jnp.where itself is always a call
