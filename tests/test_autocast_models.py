"""Whole models under autocast against float32, and random compositions of operations against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax import lax
from jaxprs import PRODUCTS, equations, operand_dtypes

import jamp

F16, BF16, F32 = jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
# What must be float32 wherever it is, in the backward pass too.
SENSITIVE = ("exp", "log", "log1p", "pow", "rsqrt", "sqrt", "tan", "sinh", "erf_inv", "cumsum", "reduce_sum", "square")


def keys(seed=0):
    return iter(jax.random.split(jax.random.key(seed), 64))


def glorot(key, *shape):
    return jax.random.normal(key, shape) * np.prod(shape[:-1]) ** -0.5


def mlp():
    k = keys()
    params = [{"w": glorot(next(k), n, m), "b": jnp.zeros(m)} for n, m in [(16, 32), (32, 32), (32, 4)]]

    def apply(params, x):
        for p in params[:-1]:
            x = jax.nn.relu(x @ p["w"] + p["b"])
        return x @ params[-1]["w"] + params[-1]["b"]

    return apply, params, jax.random.normal(next(k), (32, 16))


def cnn_with_batch_norm():
    k = keys(1)
    params = {
        "c1": glorot(next(k), 3, 3, 3, 8),
        "c2": glorot(next(k), 3, 3, 8, 8),
        "scale": jnp.ones(8),
        "bias": jnp.zeros(8),
        "head": glorot(next(k), 8, 4),
    }

    def batch_norm(p, x):
        mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
        return (x - mean) * lax.rsqrt(var + 1e-5) * p["scale"] + p["bias"], (mean, var)

    def apply(p, x):
        conv = lambda w, x: lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x, statistics = batch_norm(p, conv(p["c1"], x))
        assert statistics[0].dtype == F32
        x = lax.reduce_window(jax.nn.relu(x), -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        x, _ = batch_norm(p, conv(p["c2"], x))
        return jax.nn.relu(x).mean((1, 2)) @ p["head"]

    return apply, params, jax.random.normal(next(k), (4, 8, 8, 3))


def lstm():
    k = keys(2)
    params = {
        "x": glorot(next(k), 8, 64),
        "h": glorot(next(k), 16, 64),
        "b": jnp.zeros(64),
        "head": glorot(next(k), 16, 3),
    }

    def apply(p, xs):
        def step(carry, x):
            h, c = carry
            i, f, g, o = jnp.split(x @ p["x"] + h @ p["h"] + p["b"], 4, -1)
            c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

        zeros = jnp.zeros((xs.shape[1], 16))
        (h, _), _ = lax.scan(step, (zeros, zeros), xs)
        return h @ p["head"]

    return apply, params, jax.random.normal(next(k), (12, 4, 8))


def transformer():
    k = keys(3)
    dense = lambda n, m: {"w": glorot(next(k), n, m), "b": jnp.zeros(m)}
    norm = lambda: {"scale": jnp.ones(16), "bias": jnp.zeros(16)}
    block = lambda: {
        "n1": norm(),
        "qkv": dense(16, 48),
        "out": dense(16, 16),
        "n2": norm(),
        "up": dense(16, 64),
        "down": dense(64, 16),
    }
    params = {
        "embed": glorot(next(k), 11, 16) * 4,
        "blocks": [block() for _ in range(2)],
        "norm": norm(),
        "head": dense(16, 11),
    }
    linear = lambda p, x: x @ p["w"] + p["b"]

    def layer_norm(p, x):
        return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-6) * p["scale"] + p["bias"]

    def apply(params, tokens):
        x = params["embed"][tokens]
        for p in params["blocks"]:
            q, k, v = (
                a.reshape(*a.shape[:2], 2, 8) for a in jnp.split(linear(p["qkv"], layer_norm(p["n1"], x)), 3, -1)
            )
            a = jax.nn.dot_product_attention(q, k, v, is_causal=True)
            x = x + linear(p["out"], a.reshape(x.shape))
            x = x + linear(p["down"], jax.nn.gelu(linear(p["up"], layer_norm(p["n2"], x))))
        return linear(params["head"], layer_norm(params["norm"], x))

    return apply, params, jnp.arange(24).reshape(2, 12) % 11


def haiku_like():
    """Parameters looked up by name in a context, as haiku's transform does it."""
    frame = {}

    def get(name):
        return frame["params"][name]

    def forward(x):
        return jnp.tanh(x @ get("linear/w") + get("linear/b")) @ get("linear_1/w")

    def apply(params, x):
        frame["params"] = params
        return forward(x)

    k = keys(4)
    params = {"linear/w": glorot(next(k), 8, 16), "linear/b": jnp.zeros(16), "linear_1/w": glorot(next(k), 16, 4)}
    return apply, params, jax.random.normal(next(k), (8, 8))


MODELS = {model.__name__: model for model in (mlp, cnn_with_batch_norm, lstm, transformer, haiku_like)}


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    apply, params, x = MODELS[request.param]()
    target = jnp.cos(jnp.arange(apply(params, x).size)).reshape(apply(params, x).shape)
    return apply, lambda p, x: jnp.mean((apply(p, x) - target) ** 2), params, x


def distance(a, b):
    a, b = (jnp.concatenate([x.ravel() for x in jax.tree.leaves(tree)]) for tree in (a, b))
    return jnp.linalg.norm(a - b) / jnp.linalg.norm(b)


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_a_model_agrees_with_float32_forward_and_backward(model, dtype):
    apply, loss, params, x = model
    eps = float(jnp.finfo(dtype).eps)
    plain, mine = jax.jit(apply)(params, x), jax.jit(jamp.autocast(apply, dtype))(params, x)
    assert mine.dtype == F32
    assert distance(mine, plain) < 4 * eps
    grads, plain = jax.jit(jax.grad(jamp.autocast(loss, dtype)))(params, x), jax.jit(jax.grad(loss))(params, x)
    assert {g.dtype for g in jax.tree.leaves(grads)} == {F32}
    assert distance(grads, plain) < 8 * eps


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_every_product_of_a_model_is_16_bit_and_the_sensitive_operations_float32(model, dtype):
    _, loss, params, x = model
    for fun in (
        jamp.autocast(loss, dtype),
        jax.value_and_grad(jamp.autocast(loss, dtype)),
        jamp.autocast(jax.grad(loss), dtype),
    ):
        jaxpr = jax.make_jaxpr(fun)(params, x)
        assert operand_dtypes(jaxpr, PRODUCTS) == {dtype}
        assert operand_dtypes(jaxpr, SENSITIVE) <= {F32}


def test_autocast_adds_few_operations_to_a_model_of_24_layers():
    """Trace time is what it takes to trace the operations: at most a third more of them."""
    apply, params, tokens = transformer()
    params = params | {"blocks": params["blocks"][:1] * 24}
    counts = [len(list(equations(jax.make_jaxpr(f)(params, tokens)))) for f in (apply, jamp.autocast(apply))]
    assert counts[1] < 1.35 * counts[0]


# Random compositions of the table's operations. Each takes and gives a 4 x 4 array.

FLOAT32_ONLY = {
    "exp": lambda x, w: jnp.exp(jnp.minimum(x, 20.0)),
    "log1p": lambda x, w: jnp.log1p(jnp.abs(x)),
    "sqrt": lambda x, w: jnp.sqrt(jnp.abs(x) + 1e-3),
    "square": lambda x, w: jnp.square(jnp.clip(x, -1e4, 1e4)),
    "sum": lambda x, w: x + jnp.sum(x, 0, keepdims=True),
    "cumsum": lambda x, w: jnp.cumsum(x, 1),
    "softmax": lambda x, w: jax.nn.softmax(x),
    "logsumexp": lambda x, w: x - jax.nn.logsumexp(x, -1, keepdims=True),
    "norm": lambda x, w: (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-3),
    "divide": lambda x, w: x / (jnp.abs(x) + 1),
}
OTHERS = {
    "product": lambda x, w: x @ w,
    "bias": lambda x, w: x + w[0],
    "residual": lambda x, w: x + w,
    "scale": lambda x, w: x * 0.5,
    "large": lambda x, w: x + 70000.0,
    "tanh": lambda x, w: jnp.tanh(x),
    "relu": lambda x, w: jax.nn.relu(x),
    "transpose": lambda x, w: x.T,
    "where": lambda x, w: jnp.where(x > 0, x, 0.1),
    "scan": lambda x, w: lax.scan(lambda c, row: (c + row, c * 0.5), x[0], x)[1],
    "cond": lambda x, w: lax.cond(x[0, 0] > 0, lambda x: x @ w, lambda x: x - 1, x),
    "remat": lambda x, w: jax.checkpoint(lambda x: jnp.tanh(x @ w))(x),
}


def compose(names):
    table = FLOAT32_ONLY | OTHERS

    def fun(x, w):
        for name in names:
            x = table[name](x, w)
        return x

    return fun


@settings(max_examples=25, deadline=None, derandomize=True)
@given(names=st.lists(st.sampled_from(sorted(FLOAT32_ONLY | OTHERS)), min_size=2, max_size=6), seed=st.integers(0, 3))
def test_a_random_composition_is_no_worse_than_a_whole_model_cast(names, seed):
    rng = np.random.default_rng(seed)
    x, w = rng.normal(size=(2, 4, 4)).astype(np.float32)
    fun = compose(names)
    with jax.enable_x64(True):
        exact = np.asarray(fun(jnp.float64(x), jnp.float64(w)))
    mine = np.asarray(jamp.autocast(fun)(x, w), np.float64)
    naive = np.asarray(fun(jnp.float16(x), jnp.float16(w)), np.float64)
    with np.errstate(all="ignore"):
        worse = np.linalg.norm(mine - exact) - np.linalg.norm(naive - exact)
    scale = max(np.linalg.norm(exact), 1.0)
    assert not np.isfinite(naive).all() or worse <= 4 * float(jnp.finfo(F16).eps) * scale


@settings(max_examples=25, deadline=None, derandomize=True)
@given(names=st.lists(st.sampled_from(sorted(FLOAT32_ONLY)), min_size=1, max_size=5), big=st.booleans())
def test_float32_operations_are_never_inf_where_float32_is_finite(names, big):
    x = np.linspace(-3, 3, 16, dtype=np.float32).reshape(4, 4) * (200 if big else 1)
    fun = compose(["product", *names])
    plain = np.asarray(fun(x, np.eye(4, dtype=np.float32)))
    mine = np.asarray(jamp.autocast(fun)(x, np.eye(4, dtype=np.float32)))
    assert np.isfinite(mine[np.isfinite(plain)]).all()
