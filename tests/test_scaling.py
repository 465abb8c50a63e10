"""scale_loss, unscale_and_check, value_and_grad and grad: what comes out, and where they may be called."""

import json
import linecache
import re
import warnings
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings, strategies as st

import jamp

TORCH = json.loads((Path(__file__).parent / "data" / "torch_unscale.json").read_text())
MAX, TINY = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)
NO_STATE, SEVERAL_STATES = {"w": np.ones(2)}, [jamp.StaticLossScale().init(), jamp.DynamicLossScale().init()]
quick = settings(deadline=None, max_examples=60, derandomize=True, database=None)
no_warning_for_numpy_overflow = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


def state_of(scale):
    return jamp.StaticLossScaleState(jnp.array(scale, jnp.float32))


def assert_same(tree, other, rtol=0.0):
    """The same structure, dtypes and values: to the bit, signs of zero included, unless `rtol` is given."""
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        assert jnp.result_type(x) == jnp.result_type(y)
        if jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        if rtol:
            np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol)
        elif jnp.result_type(x) == jax.dtypes.float0:
            assert x.shape == y.shape
        else:
            np.testing.assert_array_equal(x, y)
            if jnp.issubdtype(jnp.result_type(x), jnp.floating):
                ordered = ~np.isnan(np.asarray(x, np.float64))
                np.testing.assert_array_equal(np.signbit(x)[ordered], np.signbit(y)[ordered])


# --- scale_loss ---


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize(
    ("dtype", "out"),
    [
        (jnp.float16, jnp.float32),
        (jnp.bfloat16, jnp.float32),
        (jnp.float32, jnp.float32),
        (jnp.complex64, jnp.complex64),
        (jnp.float64, jnp.float64),
        (jnp.complex128, jnp.complex128),
    ],
)
@pytest.mark.filterwarnings("ignore:The loss is float16:UserWarning")
def test_float16_and_bfloat16_losses_come_out_float32_and_others_keep_their_dtype(x64, dtype, out):
    scaled = jamp.scale_loss(jnp.array(3.0, dtype), state_of(2.0**16))  # 196608 is no float16
    assert_same(scaled, jnp.array(3.0 * 2.0**16, out))


def test_a_loss_may_be_a_python_number_or_a_pytree_of_losses():
    losses = {"a": jnp.float32(1.5), "b": [jnp.bfloat16(2.0), None, 0.5]}
    scaled = jamp.scale_loss(losses, state_of(4.0))
    assert_same(scaled, {"a": jnp.float32(6.0), "b": [jnp.float32(8.0), None, jnp.float32(2.0)]})
    assert not any(x.weak_type for x in jax.tree.leaves(scaled))


def test_no_op_scales_nothing_and_is_constantly_finite():
    state = jamp.NoOpLossScale().init()
    losses = {"a": jnp.bfloat16(1.5), "b": jnp.float32(2.0)}
    assert_same(jamp.scale_loss(losses, state), {"a": jnp.float32(1.5), "b": jnp.float32(2.0)})
    grads, finite = jamp.unscale_and_check({"a": jnp.float16([jnp.nan]), "b": jnp.float32([3.0])}, state)
    assert_same(grads, {"a": jnp.float32([jnp.nan]), "b": jnp.float32([3.0])})
    assert finite
    hlo = jax.jit(lambda g: jamp.unscale_and_check(g, state)).lower(jnp.ones(3)).as_text()
    assert "multiply" not in hlo
    assert "is_finite" not in hlo


@pytest.mark.parametrize("loss", [3, jnp.int32(3), True, {"a": jnp.float32(1.0), "b": jnp.uint8(1)}, jax.random.key(0)])
def test_a_loss_that_is_not_floating_is_an_error(loss):
    for state in (state_of(8.0), jamp.NoOpLossScale().init()):
        with pytest.raises(TypeError, match="loss must be floating"):
            jamp.scale_loss(loss, state)
        with pytest.raises(TypeError, match="loss must be floating"):
            jamp.value_and_grad(lambda w: (loss, w), state)(jnp.float32(1.0))


@pytest.mark.parametrize(("state", "match"), [(NO_STATE, "found no loss-scale state"), (SEVERAL_STATES, "found 2")])
def test_no_state_or_several_is_an_error(state, match):
    for call in (
        lambda: jamp.scale_loss(jnp.float32(1.0), state),
        lambda: jamp.unscale_and_check(jnp.float32(1.0), state),
        lambda: jamp.value_and_grad(jnp.sum, state),
        lambda: jamp.grad(jnp.sum, state),
    ):
        with pytest.raises(ValueError, match=match):
            call()


def warned_about_float16(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [w for w in caught if "loss is float16" in str(w.message)]


def half_loss(w):
    return jnp.sum(w).astype(jnp.float16)


@pytest.mark.parametrize(
    "call",
    [
        lambda w: jamp.scale_loss(half_loss(w), state_of(2.0)),  # the user's line
        lambda w: jamp.scale_loss([half_loss(w), half_loss(w)], state_of(2.0)),  # the user's line
        lambda w: jamp.value_and_grad(half_loss, state_of(2.0))(w),  # the user's line
        lambda w: jamp.grad(half_loss, state_of(2.0))(w),  # the user's line
        jax.jit(lambda w: jamp.grad(half_loss, state_of(2.0))(w)),  # the user's line
    ],
    ids=["scale_loss", "pytree", "value_and_grad", "grad", "jit"],
)
def test_a_float16_loss_warns_once_and_points_at_the_users_line(call):
    (warning,) = warned_about_float16(lambda: call(jnp.ones(2)))
    assert warning.filename == __file__
    assert "# the user's line" in linecache.getline(warning.filename, warning.lineno)
    assert "astype(jnp.float32)" in str(warning.message)  # the cure


def test_a_float16_loss_warns_once_per_trace():
    step = jax.jit(lambda w: jamp.value_and_grad(half_loss, state_of(2.0))(w))
    assert len(warned_about_float16(lambda: [step(jnp.ones(3)) for _ in range(3)])) == 1
    assert len(warned_about_float16(lambda: [step(jnp.ones(4)) for _ in range(3)])) == 1


def test_no_other_loss_warns():
    quiet = [
        *(lambda d=d: jamp.scale_loss(jnp.ones((), d), state_of(2.0)) for d in (jnp.bfloat16, jnp.float32)),
        lambda: jamp.scale_loss(jnp.float16(1.0), jamp.NoOpLossScale().init()),  # nothing overflows without a scale
    ]
    assert not [w for call in quiet for w in warned_about_float16(call)]


# --- value_and_grad and grad ---


def test_value_and_grad_returns_the_true_loss_where_only_the_scaled_one_overflows():
    loss, grads = jamp.value_and_grad(lambda w: w + 3e38, state_of(2.0**16))(jnp.float32(0.0))
    assert_same((loss, grads), (jnp.float32(3e38), jnp.float32(1.0)))


@pytest.mark.parametrize("scale", [TINY, 2.0**-10, 1.0, 3.0, 1000.0, 2.0**16, 2.0**24, 2.0**120])
def test_no_scaled_gradient_leaves(scale):
    fun = lambda w: jnp.sum(jnp.sin(w) * 2.0**-60)
    w = jnp.float32([0.1, 0.2, 0.3])
    rtol = 0.0 if np.frexp(scale)[0] == 0.5 and scale != TINY else 3e-7
    if scale == TINY:  # so small a scale underflows, unlike its reciprocal
        fun = lambda w: jnp.sum(jnp.sin(w) * 2.0**10)
        rtol = 3e-7
    assert_same(jamp.grad(fun, state_of(scale))(w), jax.grad(fun)(w), rtol)
    loss, grads = jamp.value_and_grad(fun, state_of(scale))(w)
    assert_same((loss, grads), jax.value_and_grad(fun)(w), rtol)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_params_give_float32_grads_that_do_not_underflow(dtype):
    fun = lambda w: jnp.sum(w).astype(jnp.float32) * 2.0**-30  # below the smallest float16
    w = jnp.ones(3, dtype)
    assert_same(jamp.grad(fun, state_of(2.0**16))(w), jnp.full(3, 2.0**-30, jnp.float32))
    assert dtype != jnp.float16 or not jax.grad(fun)(w).any()


def test_has_aux_hands_the_aux_on_as_it_is():
    aux_of = lambda w: {"half": w.astype(jnp.float16), "count": jnp.int32(3), "nothing": None, "key": jax.random.key(1)}
    fun = lambda w: (jnp.sum(w**2), aux_of(w))
    w = jnp.float32([1.0, 2.0])
    (loss, aux), grads = jamp.value_and_grad(fun, state_of(2.0**16), has_aux=True)(w)
    assert_same((loss, aux, grads), (jnp.float32(5.0), aux_of(w), 2 * w))
    assert_same(jamp.grad(fun, state_of(2.0**16), has_aux=True)(w), (2 * w, aux_of(w)))


@pytest.mark.parametrize("argnums", [0, 1, -1, (0,), (0, 1), (2, 0), [0, 2]])
def test_argnums_and_keyword_arguments_are_as_for_jax(argnums):
    fun = lambda a, b, c, *, power: jnp.sum(a**power) + jnp.sum(b["x"] * 3) + a * c
    args = jnp.float32(2.0), {"x": jnp.float32([1.0, 2.0])}, jnp.float32(5.0)
    for ours, theirs in ((jamp.value_and_grad, jax.value_and_grad), (jamp.grad, jax.grad)):
        assert_same(ours(fun, state_of(2.0**16), argnums)(*args, power=3), theirs(fun, argnums)(*args, power=3))


def test_holomorphic_is_as_for_jax():
    for args in ((jnp.complex64(1 + 2j),), (jnp.complex64(3e19j),)):  # the scaled loss of the second overflows
        ours = jamp.value_and_grad(lambda z: z * z, state_of(2.0**16), holomorphic=True)(*args)
        assert_same(ours, jax.value_and_grad(lambda z: z * z, holomorphic=True)(*args))
    with pytest.raises(TypeError, match="holomorphic"):
        jamp.grad(jnp.abs, state_of(2.0**16), holomorphic=True)(jnp.complex64(1.0))


def test_allow_int_is_as_for_jax():
    params = {"w": jnp.float32([1.0, 2.0]), "n": jnp.int32([3, 4])}
    fun = lambda p: jnp.sum(p["w"] * p["n"].astype(jnp.float32))
    ours = jamp.grad(fun, state_of(2.0**16), allow_int=True)(params)
    assert_same(ours, jax.grad(fun, allow_int=True)(params))
    assert ours["n"].dtype == jax.dtypes.float0
    with pytest.raises(TypeError, match="int32"):
        jamp.grad(fun, state_of(2.0**16))(params)


def test_a_loss_that_is_no_scalar_is_the_error_of_jax():
    with pytest.raises(TypeError, match="scalar-output"):
        jamp.value_and_grad(lambda w: w, state_of(2.0**16))(jnp.ones(2))


def test_float64_gradients_stay_float64(x64):
    w = jnp.array([1e-300, 2.0], jnp.float64)
    fun = lambda w: jnp.sum(w**2)
    assert_same(jamp.value_and_grad(fun, state_of(2.0**16))(w), jax.value_and_grad(fun)(w))


PARAMS = {
    "w1": jax.random.normal(jax.random.key(0), (4, 8)) * 0.5,
    "w2": jax.random.normal(jax.random.key(1), (8, 1)) * 0.5,
}
X = jax.random.normal(jax.random.key(2), (12, 16, 4))  # 12 batches
Y = jnp.sin(X.sum(-1))


def mlp_loss(params, x, y, dtype=jnp.float16):
    params, x = jamp.cast_floating((params, x), dtype)
    prediction = jnp.tanh(x @ params["w1"]) @ params["w2"]
    return jnp.mean((prediction[:, 0].astype(jnp.float32) - y) ** 2)


def test_grad_of_grad_equals_the_float32_control():
    state = state_of(2.0**10)
    float32_loss = lambda p, x, y: mlp_loss(p, x, y, jnp.float32)

    def penalised(loss, grad):
        norm = lambda p, x, y: sum(jnp.sum(g**2) for g in jax.tree.leaves(grad(loss)(p, x, y)))
        return lambda p, x, y: loss(p, x, y) + norm(p, x, y)

    ours = lambda loss: jax.jit(jamp.value_and_grad(penalised(loss, lambda f: jamp.grad(f, state)), state))
    control = jax.jit(jax.value_and_grad(penalised(float32_loss, jax.grad)))(PARAMS, X[0], Y[0])
    assert_same(ours(float32_loss)(PARAMS, X[0], Y[0]), control, rtol=1e-6)
    assert_same(ours(mlp_loss)(PARAMS, X[0], Y[0]), control, rtol=1e-2)


def one_row(fun):
    return lambda over: lambda *args: jax.tree.map(lambda x: x[0], over(fun, jax.tree.map(lambda x: x[None], args)))


TRANSFORMATIONS = {
    "jit": jax.jit,
    "remat": lambda f: jax.jit(jax.checkpoint(f)),
    "vmap, one scaler per replica": lambda f: one_row(f)(lambda f, rows: jax.vmap(f)(*rows)),
    "scan": lambda f: one_row(f)(lambda f, rows: jax.lax.scan(lambda c, args: (c, f(*args)), 0, rows)[1]),
    "AOT lowering": lambda f: lambda *args: jax.jit(f).lower(*args).compile()(*args),
    "AOT lowering from shapes": lambda f: (
        lambda *args: jax.jit(f).lower(*jax.eval_shape(lambda *a: a, *args)).compile()(*args)
    ),
    "donation": lambda f: (
        lambda state, params, x, y: jax.jit(f, donate_argnums=1)(state, jax.tree.map(jnp.copy, params), x, y)
    ),
}


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_value_and_grad_works_under(name):
    fun = lambda state, params, x, y: jamp.value_and_grad(mlp_loss, state)(params, x, y)
    args = jamp.DynamicLossScale().init(), PARAMS, X[0], Y[0]
    out = TRANSFORMATIONS[name](fun)(*args)
    assert_same(out, fun(*args), rtol=1e-3)  # float16: a fused computation rounds elsewhere
    assert jax.eval_shape(fun, *args) == jax.eval_shape(lambda: out)  # shapes, dtypes, no weak types


def test_value_and_grad_of_a_rematerialised_loss():
    ours = jax.jit(jamp.value_and_grad(jax.checkpoint(mlp_loss), state_of(2.0**10)))(PARAMS, X[0], Y[0])
    assert_same(ours, jamp.value_and_grad(mlp_loss, state_of(2.0**10))(PARAMS, X[0], Y[0]), rtol=1e-3)


def test_one_scaler_per_replica_under_vmap():
    scales = jnp.float32([1.0, 2.0**16, 2.0**24])
    cotangents = lambda state: jamp.unscale_and_check({"w": jnp.float16([6.0])}, state)
    grads, finite = jax.vmap(cotangents)(jamp.StaticLossScaleState(scales))
    assert_same(grads["w"][:, 0], 6.0 / scales)
    assert finite.tolist() == [True] * 3


@jax.tree_util.register_dataclass
@dataclass
class TrainState:
    params: dict
    opt_state: tuple


STATES = {
    "loss-scale state": lambda: state_of(2.0**16),
    "optimizer state": lambda: jamp.loss_scaled(optax.adam(1e-3)).init(PARAMS),
    "chain": lambda: optax.chain(optax.identity(), jamp.loss_scaled(optax.adam(1e-3))).init(PARAMS),
    "dict": lambda: {"step": 3, "scaler": jamp.DynamicLossScale().init(), "name": "run 1"},
    "dataclass": lambda: TrainState(PARAMS, jamp.loss_scaled(optax.sgd(0.1)).init(PARAMS)),
    "list": lambda: [None, {"a": (jamp.DynamicLossScale().init(), object())}],
}


@pytest.mark.parametrize("name", STATES)
def test_state_is_any_pytree_that_holds_exactly_one(name):
    state, w = STATES[name](), jnp.float32([1.0, 2.0])
    assert_same(jamp.scale_loss(jnp.float32(0.5), state), jnp.float32(2.0**15))
    assert_same(jamp.unscale_and_check({"w": w * 2.0**16}, state), ({"w": w}, jnp.bool_(True)))
    assert_same(jamp.value_and_grad(jnp.sum, state)(w), (jnp.float32(3.0), jnp.ones(2)))


# --- unscale_and_check ---


def in_context(context, fun):
    """`fun` called in one of the places that it may be called from."""
    over = {
        "eager": lambda f, rows: f,
        "vmap": lambda f, rows: jax.vmap(f)(*rows),
        "scan": lambda f, rows: jax.lax.scan(lambda carry, args: (carry, f(*args)), 0, rows)[1],
    }
    if context in ("eager", "jit"):
        return fun if context == "eager" else jax.jit(fun)
    return one_row(fun)(over[context])


CONTEXTS = ["eager", "jit", "vmap", "scan"]
unscale = lambda grads, state: jamp.unscale_and_check(grads, state)


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize(
    ("dtype", "out"),
    [
        (jnp.float16, jnp.float32),
        (jnp.bfloat16, jnp.float32),
        (jnp.float32, jnp.float32),
        (jnp.float8_e4m3fn, jnp.float32),
        (jnp.float8_e5m2, jnp.float32),
        (jnp.complex64, jnp.complex64),
        (jnp.float64, jnp.float64),
        (jnp.complex128, jnp.complex128),
    ],
)
def test_gradients_of_every_dtype(x64, context, dtype, out):
    grads = {"w": jnp.array([8, -4, 0], dtype), "scalar": jnp.array(6, dtype), "empty": jnp.zeros((0, 3), dtype)}
    true = {"w": jnp.array([2, -1, 0], out), "scalar": jnp.array(1.5, out), "empty": jnp.zeros((0, 3), out)}
    call = in_context(context, unscale)
    assert_same(call(grads, state_of(4.0)), (true, jnp.bool_(True)))
    grads["w"] = grads["w"].at[1].set(jnp.nan)
    unscaled, finite = call(grads, state_of(4.0))
    assert unscaled["w"][0] == 2.0  # finite neighbours are unscaled too
    assert not jnp.isfinite(unscaled["w"][1])
    assert not finite


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize("context", CONTEXTS)
def test_ints_bools_keys_float0_none_and_masked_nodes_pass_untouched(context):
    grads = {
        "int": jnp.int32([3]),
        "uint8": jnp.uint8([200]),
        "bool": jnp.array([True]),
        "key": jax.random.key(7),
        "float0": np.zeros(2, jax.dtypes.float0),
        "none": None,
        "masked": optax.MaskedNode(),
    }
    if context == "scan":
        del grads["float0"]  # lax.scan takes none
    assert_same(in_context(context, unscale)(grads, state_of(4.0)), (grads, jnp.bool_(True)))
    if context == "eager":
        grads |= {"object": object(), "string": "inf", "int32": 3}
        out, finite = unscale(grads, state_of(4.0))
        assert jax.tree.leaves(out) == jax.tree.leaves(grads)
        assert finite


@pytest.mark.parametrize("tree", [None, {}, [], (), optax.EmptyState(), {"a": {}, "b": [None]}])
def test_an_empty_tree_is_finite(tree):
    for call in (unscale, jax.jit(unscale)):
        assert_same(call(tree, state_of(4.0)), (tree, jnp.bool_(True)))


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("place", [lambda tree: tree, lambda tree: {"model": [tree]}], ids=["top", "nested"])
def test_leaves_under_overwrite_with_gradient_are_never_unscaled_nor_checked(context, place):
    kept = {"scale": jnp.float32([8.0]), "half": jnp.float16([jnp.inf]), "nan": jnp.float32(jnp.nan), "n": jnp.int32(3)}
    grads = {"params": {"w": jnp.float32([8.0])}, "_overwrite_with_gradient": {"layer": kept}}
    out, finite = in_context(context, unscale)(place(grads), state_of(4.0))
    assert_same(out, place(grads | {"params": {"w": jnp.float32([2.0])}}))
    assert finite
    assert jamp.all_finite(place(grads))
    assert not jamp.all_finite(place(grads | {"params": {"w": jnp.float32([jnp.nan])}}))


def test_value_and_grad_hands_on_what_overwrites():
    """As Flax's fp8 does: the cotangent of a statistic is its new value."""

    @jax.custom_vjp
    def dense(w, history):
        del history
        return w

    dense.defvjp(lambda w, history: (w, history), lambda history, g: (g, history + 1.0))
    params = {"params": {"w": jnp.float32(3.0)}, "_overwrite_with_gradient": {"history": jnp.float32([5.0, 6.0])}}
    fun = lambda p: dense(p["params"]["w"], p["_overwrite_with_gradient"]["history"]) ** 2
    grads = jamp.grad(fun, state_of(2.0**16))(params)
    assert_same(
        grads, {"params": {"w": jnp.float32(6.0)}, "_overwrite_with_gradient": {"history": jnp.float32([6, 7])}}
    )


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64])
def test_the_dtype_argument_is_what_gradients_of_at_most_32_bits_come_out_as(x64, dtype):
    grads = {d.__name__: jnp.array([24.0], d) for d in (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float8_e5m2)}
    kept = {d.__name__: jnp.array([24.0], d) for d in (jnp.float64, jnp.complex64)}
    out, finite = jamp.unscale_and_check(grads | kept, state_of(4.0), dtype=dtype)
    assert_same(out, {k: jnp.array([6.0], dtype) for k in grads} | {k: v / 4 for k, v in kept.items()})
    assert finite
    without_scale, _ = jamp.unscale_and_check(grads, jamp.NoOpLossScale().init(), dtype=dtype)
    assert_same(without_scale, {k: jnp.array([24.0], dtype) for k in grads})


def test_the_arithmetic_is_float32_at_least_whatever_the_dtype():
    # In float16 the reciprocal of 2**16 is subnormal and that of 2**30 is 0.
    for scale in (2.0**16, 2.0**30):
        out, _ = jamp.unscale_and_check(jnp.float32([scale * 1.5]), state_of(scale), dtype=jnp.float16)
        assert_same(out, jnp.float16([1.5]))


def test_a_gradient_that_overflows_in_the_dtype_it_comes_out_as_is_not_finite():
    grads = {"w": jnp.float32([1e6, 4.0])}
    for dtype, finite in ((jnp.float16, False), (jnp.bfloat16, True), (jnp.float32, True)):
        out, ok = jamp.unscale_and_check(grads, state_of(4.0), dtype=dtype)
        assert jnp.isfinite(out["w"]).all() == ok == finite


@pytest.mark.parametrize("record", TORCH["unscale_kernel"][:24], ids=lambda r: f"{r['dtype']}-{r['in']}")
def test_unscales_as_torchs_kernel_to_the_bit(x64, record):
    grads = jnp.array([float(x) for x in record["in"]], record["dtype"])
    want = jnp.array([float(x) for x in record["out"]], jnp.promote_types(record["dtype"], jnp.float32))
    out, finite = jamp.unscale_and_check(grads, state_of(1.0 / record["inv_scale_f32"]))
    assert_same(out, want)
    assert bool(finite) == (record["found_inf"] == 0.0)


def test_unscales_the_largest_float32_as_torchs_kernel():
    record = TORCH["unscale_kernel"][24]  # its other entries are subnormal, or become so, which XLA flushes to 0
    out, finite = jamp.unscale_and_check(jnp.float32(record["in"]), state_of(1.0 / record["inv_scale_f32"]))
    assert_same(out[0], jnp.float32(record["out"][0]))
    assert finite


def test_what_overflows_only_when_unscaled_is_not_finite_unlike_torch():
    record = TORCH["unscale_kernel"][27]
    assert record["found_inf"] == 0.0
    out, finite = jamp.unscale_and_check(jnp.float32(record["in"]), state_of(1.0 / record["inv_scale_f32"]))
    assert_same(out, jnp.float32([float(x) for x in record["out"]]))
    assert not finite


def test_what_overflows_only_in_torchs_float16_is_a_finite_float32():
    record = TORCH["unscale_kernel"][28]
    out, finite = jamp.unscale_and_check(jnp.float16(record["in"]), state_of(1.0 / record["inv_scale_f32"]))
    assert_same(out, jnp.float16(record["in"]).astype(jnp.float32) * 4.0)
    assert finite


@pytest.mark.parametrize("record", TORCH["inv_scale"], ids=lambda r: str(r["scale_f32"]))
def test_multiplies_by_torchs_float32_reciprocal(record):
    scale, reciprocal = record["scale_f32"], float(record["inv_via_f64"])
    grads = np.float32([1.0, -3.0, 1e20 if reciprocal < 1.0 else 1e-20])
    out, finite = jamp.unscale_and_check(jnp.asarray(grads), state_of(scale))
    if scale < TINY:  # no jamp loss scale: it is 0 to XLA, and its reciprocal inf, here as there
        assert not finite
    elif reciprocal < TINY:  # a subnormal float32, which XLA flushes to 0: multiplied twice instead
        np.testing.assert_allclose(out[2], grads[2].astype(np.float64) / scale, rtol=3e-7)
        assert finite
    else:
        assert_same(out, jnp.asarray(grads * np.float32(reciprocal)))


@given(st.floats(TINY, 2.0**126, width=32), st.floats(-(2.0**60), 2.0**60, width=32))
@quick
@no_warning_for_numpy_overflow
def test_multiplies_by_the_float32_reciprocal_to_the_bit(scale, g):
    want = np.float32(g) * (np.float32(1.0) / np.float32(scale))
    if all(x == 0.0 or abs(x) >= TINY for x in (g, want)):  # XLA flushes the subnormal ones
        assert_same(jamp.unscale_and_check(jnp.float32(g), state_of(scale))[0], jnp.asarray(want))


HUGE = [2.0**126, float(np.nextafter(np.float32(2.0**126), np.float32(MAX))), 2.0**127, MAX]
CALLS = {
    "eagerly": jamp.unscale_and_check,
    "as an argument of jit": jax.jit(unscale),
    "as a constant of jit": lambda grads, state: jax.jit(lambda g: unscale(g, state))(grads),
    "as a NumPy constant of jit": lambda grads, state: jax.jit(lambda g: unscale(g, jax.tree.map(np.asarray, state)))(
        grads
    ),
    "made inside jit": lambda grads, state: jax.jit(
        lambda g: unscale(g, jamp.StaticLossScale(float(state.loss_scale)).init())
    )(grads),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("scale", [TINY, *HUGE])
def test_scales_up_to_the_largest_float32(call, scale):
    grads = np.float32([3e38, -1e38, 2.0**100, 12.0 * scale if scale == TINY else 12.0, np.inf, 0.0])
    with np.errstate(over="ignore"):
        want = (grads.astype(np.float64) / scale).astype(np.float32)
    out, finite = CALLS[call](jnp.asarray(grads[[0, 1, 2, 5]]), state_of(scale))
    np.testing.assert_allclose(out, want[[0, 1, 2, 5]], rtol=3e-7)
    assert bool(finite) == (scale != TINY)
    out, finite = CALLS[call](jnp.asarray(grads), state_of(scale))
    assert np.isinf(out[4])
    assert not finite
    if scale == TINY:
        assert out[3] == 12.0


@pytest.mark.parametrize("scale", [0.5, 2.0**-20, 2.0**-100, TINY])
def test_a_scale_below_1_whose_unscaled_gradient_overflows_is_not_finite(scale):
    largest = MAX * scale
    out, finite = jax.jit(unscale)(jnp.float32([largest, 0.0]), state_of(scale))
    assert_same(out, jnp.float32([MAX, 0.0]))
    assert finite
    out, finite = jax.jit(unscale)(jnp.float32([largest * 1.0001, 0.0]), state_of(scale))
    assert_same(out, jnp.float32([jnp.inf, 0.0]))
    assert not finite


def test_a_subnormal_scale_is_never_finite():
    """With scale 2**-140 torch's check passes and the params become -inf."""
    state = state_of(2.0**-140)
    _, grads = jamp.value_and_grad(jnp.sum, state)(jnp.ones(3))
    assert not jamp.all_finite(grads)
    assert not jamp.unscale_and_check(jnp.ones(3), state)[1]


def test_subnormal_gradients_are_finite_and_at_most_flushed_to_zero():
    grads = jnp.float32([1e-40, -1e-45, TINY])
    for scale in (2.0**-10, 1.0, 2.0**10, MAX):
        out, finite = jamp.unscale_and_check(grads, state_of(scale))
        assert finite
        np.testing.assert_allclose(out, np.asarray(grads, np.float64) / scale, rtol=0, atol=TINY / min(scale, 1.0))


def test_the_state_that_scaled_unscales_whatever_its_kind():
    for config in (jamp.StaticLossScale(8.0), jamp.DynamicLossScale(init_scale=8.0)):
        assert_same(jamp.unscale_and_check(jnp.float32(24.0), config.init())[0], jnp.float32(3.0))


def test_axes_named_by_axis_name_agree_on_the_check():
    grads = jnp.float32([[8.0, 4.0], [jnp.inf, 4.0]])
    check = jax.vmap(lambda g: jamp.unscale_and_check(g, state_of(4.0), axis_name="i"), axis_name="i")
    assert_same(check(grads), (jnp.float32([[2.0, 1.0], [jnp.inf, 1.0]]), jnp.array([False, False])))


# --- Compiled outside jit, dissolved inside it ---


def compilations(call):
    """How many computations are traced and compiled by `call`."""
    events = []
    listener = lambda event, duration, **kwargs: events.append(event)
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        call()
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    return events.count("/jax/core/compile/backend_compile_duration")


PURE = {
    "scale_loss": lambda loss, grads, state: jamp.scale_loss(loss, state),
    "unscale_and_check": lambda loss, grads, state: jamp.unscale_and_check(grads, state),
    "all_finite": lambda loss, grads, state: jamp.all_finite(grads),
}
GRADS = {"a": jnp.ones((2, 5)), "b": jnp.ones((2, 5)), "c": jnp.ones(3, jnp.float16), "n": jnp.int32(3)}


@pytest.mark.parametrize("name", PURE)
def test_one_dispatch_each_outside_jit(name):
    call, loss, state = PURE[name], {"a": jnp.float32(1.0), "b": jnp.bfloat16(1.0)}, state_of(4.0)
    jax.clear_caches()  # so that every operation that is dispatched on its own must be compiled
    assert compilations(lambda: call(loss, GRADS, state)) == 1
    other = state_of(8.0)
    assert compilations(lambda: call(loss, GRADS, other)) == 0


@pytest.mark.parametrize("name", PURE)
def test_only_the_scale_goes_in_and_not_the_tree_that_holds_it(name):
    inner = jnp.ones(1000)
    donated = jax.jit(lambda x: x + 1, donate_argnums=0)
    tree = {"opt_state": (jamp.DynamicLossScale().init(), inner), "config": object(), "name": "adam", "fn": len}
    want = PURE[name](jnp.float32(1.0), GRADS, tree)
    donated(inner)
    assert inner.is_deleted()
    assert_same(PURE[name](jnp.float32(1.0), GRADS, tree), want)
    bigger = tree | {"more": [jnp.ones(7), jnp.ones(8)]}
    assert compilations(lambda: PURE[name](jnp.float32(1.0), GRADS, bigger)) == 0


@pytest.mark.parametrize("name", PURE)
def test_dissolves_into_the_callers_computation_inside_jit(name):
    lowered = jax.jit(PURE[name]).lower(jnp.float32(1.0), GRADS, state_of(4.0)).as_text()
    assert not re.findall(r"func\.func private @(?!_where)\w+", lowered)  # jnp.where itself is always a call


# --- Whole train steps ---


def fit(differentiate, tx, params, x, y):
    """One compiled step for each batch; the params, the optimizer state and the losses at the end."""
    traces = []

    @jax.jit
    def step(params, opt_state, x, y):
        traces.append(1)
        loss, grads = differentiate(opt_state)(params, x, y)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state, losses = tx.init(params), []
    for batch in zip(x, y, strict=True):
        params, opt_state, loss = step(params, opt_state, *batch)
        losses.append(loss)
    assert len(traces) == 1
    return params, opt_state, jnp.stack(losses)


TINY_LOSS = 2.0**-22  # makes the gradients too small for float16, and a learning rate makes up for it


def test_a_float16_loop_equals_the_float32_control_and_ends_at_init_growth_backoff():
    inner = optax.sgd(0.2 / TINY_LOSS, momentum=0.9)
    loss = lambda dtype: lambda p, x, y: mlp_loss(p, x, y, dtype) * TINY_LOSS
    config = jamp.DynamicLossScale(init_scale=2.0**18, growth_factor=2.0, backoff_factor=0.25, growth_interval=1)
    bad = [3, 7]
    good = jnp.array([i for i in range(len(X)) if i not in bad])
    x = X.at[jnp.array(bad), 0, 0].set(jnp.inf)
    tx = jamp.loss_scaled(inner, config)
    params, opt_state, losses = fit(lambda s: jamp.value_and_grad(loss(jnp.float16), s), tx, PARAMS, x, Y)
    control = fit(lambda s: jax.value_and_grad(loss(jnp.float32)), inner, PARAMS, X[good], Y[good])
    assert_same(params, control[0], rtol=1e-2)
    assert_same(losses[good] / TINY_LOSS, control[2] / TINY_LOSS, rtol=1e-2)
    assert jamp.get_loss_scale(opt_state) == 2.0**18 * 2.0**10 * 0.25**2
    # Without loss scaling the same loop stands still.
    unscaled = fit(lambda s: jax.value_and_grad(loss(jnp.float16)), inner, PARAMS, X[good], Y[good])
    assert max(float(jnp.abs(unscaled[0][k] - control[0][k]).max()) for k in PARAMS) > 0.1


def test_the_step_that_grows_the_scale_unscales_with_the_old_scale():
    record = optax.GradientTransformation(jnp.zeros_like, lambda grads, state, params=None: (grads, grads))
    tx = jamp.loss_scaled(record, jamp.DynamicLossScale(init_scale=4.0, growth_interval=2))

    @jax.jit
    def step(w, opt_state, c):
        loss, grads = jamp.value_and_grad(lambda w: w * c, opt_state)(w)
        _, opt_state = tx.update(grads, opt_state, w)
        return loss, opt_state

    w, opt_state, scales = jnp.float32(2.0), tx.init(jnp.float32(2.0)), []
    for c in (1.0, 3.0, 5.0, 7.0, 9.0):
        loss, opt_state = step(w, opt_state, jnp.float32(c))
        scales.append(float(jamp.get_loss_scale(opt_state)))
        assert opt_state.inner_state == c  # the gradient that reached the optimizer
        assert loss == 2.0 * c
    assert scales == [4.0, 8.0, 8.0, 16.0, 16.0]


def test_accumulation_with_one_check_and_one_update_per_effective_batch():
    inner = optax.sgd(0.1, momentum=0.9)
    tx = jamp.loss_scaled(inner, jamp.DynamicLossScale(init_scale=2.0**10, growth_interval=2))

    def accumulated(opt_state):
        """Three micro-batches of true gradients, in a scan."""

        def differentiate(params, xs, ys):
            def micro(total, batch):
                return jax.tree.map(jnp.add, total, jamp.value_and_grad(mlp_loss, opt_state)(params, *batch)), None

            zero = (jnp.float32(0.0), jax.tree.map(jnp.zeros_like, params))
            return jax.tree.map(lambda t: t / 3, jax.lax.scan(micro, zero, (xs, ys))[0])

        return differentiate

    x, y = X.reshape(4, 3, 16, 4), Y.reshape(4, 3, 16)
    bad = x.at[2, 1, 0, 0].set(jnp.inf)  # one micro-batch of the third effective batch
    params, opt_state, losses = fit(accumulated, tx, PARAMS, bad, y)
    good = jnp.array([0, 1, 3])
    float32_loss = lambda p, x, y: mlp_loss(p, x.reshape(48, 4), y.reshape(48), jnp.float32)
    control = fit(lambda s: jax.value_and_grad(float32_loss), inner, PARAMS, x[good], y[good])
    assert_same(params, control[0], rtol=1e-2)
    assert_same(losses[good], control[2], rtol=1e-2)
    stats = jamp.get_stats(opt_state)
    assert (stats.finite_steps, stats.overflow_steps) == (3, 1)
    assert jamp.get_loss_scale(opt_state) == 2.0**10 * 2.0 * 0.5


def test_two_models_losses_and_optimizers_under_separate_scalers_with_inf_in_one():
    txs = [jamp.loss_scaled(inner, jamp.DynamicLossScale(2.0**10)) for inner in (optax.adam(1e-2), optax.sgd(0.1))]
    losses = [mlp_loss, lambda p, x, y: mlp_loss(p, x, y) + jnp.sum(p["w1"] ** 2)]

    @jax.jit
    def step(models, states, x, y):
        out = []
        for i, (params, state) in enumerate(zip(models, states, strict=True)):
            grads = jamp.grad(losses[i], state)(params, x[i], y)
            updates, state = txs[i].update(grads, state, params)
            out.append((optax.apply_updates(params, updates), state))
        return tuple(zip(*out, strict=True))

    models, states = (PARAMS, PARAMS), tuple(tx.init(PARAMS) for tx in txs)
    x = jnp.stack([X[0], X[0].at[0, 0].set(jnp.nan)])
    new_models, new_states = step(models, states, x, Y[0])
    alone, _ = step(models, states, jnp.stack([X[0], X[0]]), Y[0])
    assert_same(new_models[0], alone[0])
    assert_same(new_models[1], PARAMS)
    assert [bool(jamp.get_grads_finite(s)) for s in new_states] == [True, False]
    assert [float(jamp.get_loss_scale(s)) for s in new_states] == [2.0**10, 2.0**9]
    with pytest.raises(ValueError, match="found 2"):
        jamp.value_and_grad(losses[0], new_states)


def test_float16_duplicates_that_overflow_when_summed_are_found():
    table = jnp.ones((4, 2), jnp.float16)
    fun = lambda table, i: jnp.sum(table[i].astype(jnp.float32))
    fits, overflows = state_of(2.0**14), state_of(2.0**15)  # each cotangent is the scale; 2**16 is no float16
    for state, i, finite in (
        (overflows, jnp.array([0, 1, 2]), True),
        (fits, jnp.array([0, 1, 1]), True),
        (overflows, jnp.array([0, 1, 1]), False),
    ):
        grads = jamp.grad(fun, state)(table, i)
        assert bool(jamp.all_finite(grads)) == finite
        assert not finite or grads[1].tolist() == [float((i == 1).sum())] * 2


def test_clipping_after_unscaling_equals_the_control():
    clipped = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1.0))
    float32_loss = lambda p, x, y: mlp_loss(p, x, y, jnp.float32)
    want = fit(lambda s: jax.value_and_grad(float32_loss), clipped, PARAMS, X[:3], Y[:3])[0]
    config = jamp.StaticLossScale(2.0**10)
    inside = jamp.loss_scaled(clipped, config)
    before = optax.chain(optax.clip_by_global_norm(0.1), jamp.loss_scaled(optax.sgd(1.0), config))
    for tx, loss, rtol in ((inside, float32_loss, 1e-5), (before, float32_loss, 1e-5), (inside, mlp_loss, 2e-2)):
        params, _, _ = fit(lambda s, loss=loss: jamp.value_and_grad(loss, s), tx, PARAMS, X[:3], Y[:3])
        assert_same(params, want, rtol)


def test_the_manual_path_equals_the_wrapper():
    config, inner = jamp.DynamicLossScale(init_scale=2.0**10, growth_interval=2), optax.adam(1e-2)
    x = X.at[1, 0, 0].set(jnp.inf)

    @jax.jit
    def step(params, opt_state, state, x, y):
        scaled = lambda p: jamp.scale_loss(mlp_loss(p, x, y), state)
        grads, finite = jamp.unscale_and_check(jax.grad(scaled)(params), state)
        updates, new = inner.update(grads, opt_state, params)
        keep = lambda a, b: jax.tree.map(lambda a, b: jnp.where(finite, a, b), a, b)
        return *keep((optax.apply_updates(params, updates), new), (params, opt_state)), config.update(state, finite)

    params, opt_state, state = PARAMS, inner.init(PARAMS), config.init()
    for batch in zip(x[:4], Y[:4], strict=True):
        params, opt_state, state = step(params, opt_state, state, *batch)
    tx = jamp.loss_scaled(inner, config)
    wrapped, wrapped_state, _ = fit(lambda s: jamp.value_and_grad(mlp_loss, s), tx, PARAMS, x[:4], Y[:4])
    assert_same((params, opt_state), (wrapped, wrapped_state.inner_state), rtol=1e-3)
    assert_same(state, wrapped_state.loss_scale_state)


def test_a_train_loop_in_scan_with_donation_and_ahead_of_time():
    tx = jamp.loss_scaled(optax.adamw(1e-2))

    def step(carry, batch):
        params, opt_state = carry
        loss, grads = jamp.value_and_grad(mlp_loss, opt_state)(params, *batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    def train(params, opt_state, x, y):
        return jax.lax.scan(step, (params, opt_state), (x, y))

    args = jax.tree.map(jnp.copy, PARAMS), tx.init(PARAMS), X, Y
    compiled = jax.jit(train, donate_argnums=(0, 1)).lower(*jax.eval_shape(lambda *a: a, *args)).compile()
    (params, opt_state), losses = compiled(*args)
    assert all(x.is_deleted() for x in jax.tree.leaves(args[:2]))
    want, want_state, want_losses = fit(lambda s: jamp.value_and_grad(mlp_loss, s), tx, PARAMS, X, Y)
    assert_same((params, losses), (want, want_losses), rtol=1e-2)
    assert_same(jamp.get_stats(opt_state), jamp.get_stats(want_state))
    compiled(params, opt_state, X, Y)  # the state that came out goes in again
