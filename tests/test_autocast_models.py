"""Whole models under autocast against float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jaxprs import PRODUCTS, operand_dtypes
from norms import under_autocast

import jamp

F16, BF16, F32 = jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
# What must be float32 wherever it is, in the backward pass too.
SENSITIVE = ("exp", "log", "log1p", "pow", "rsqrt", "sqrt", "tan", "sinh", "erf_inv", "cumsum", "reduce_sum", "square")


def glorot(*shape):
    return (np.random.default_rng(shape).normal(size=shape) * np.prod(shape[:-1]) ** -0.5).astype(np.float32)


def dense(n, m):
    return {"w": glorot(n, m), "b": np.zeros(m, np.float32)}


def norm(n):
    return {"scale": np.ones(n, np.float32), "bias": np.zeros(n, np.float32)}


def linear(p, x):
    return x @ p["w"] + p["b"]


def mlp():
    """Parameters looked up by name in a context, as Haiku's transform does it."""
    frame = {}

    def forward(x):
        return linear(
            frame["linear_2"], jax.nn.relu(linear(frame["linear_1"], jax.nn.relu(linear(frame["linear"], x))))
        )

    def apply(params, x):
        frame.update(params)
        return forward(x)

    return apply, {"linear": dense(12, 16), "linear_1": dense(16, 16), "linear_2": dense(16, 12)}, glorot(12, 12)


def cnn_with_batch_norm():
    params = {"c1": glorot(3, 3, 3, 10), "c2": glorot(3, 3, 10, 10), "norm": norm(10), "head": glorot(10, 12)}

    def batch_norm(p, x):
        mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
        assert mean.dtype == F32
        return (x - mean) * lax.rsqrt(var + 1e-5) * p["scale"] + p["bias"]

    def apply(p, x):
        conv = lambda w, x: lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = jax.nn.relu(batch_norm(p["norm"], conv(p["c1"], x)))
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return jax.nn.relu(batch_norm(p["norm"], conv(p["c2"], x))).mean((1, 2)) @ p["head"]

    return apply, params, glorot(4, 4, 4, 3)


def lstm():
    def apply(p, xs):
        def step(carry, x):
            h, c = carry
            i, f, g, o = jnp.split(linear(p["x"], x) + h @ p["h"], 4, -1)
            c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

        zeros = jnp.zeros((xs.shape[1], 12))
        return lax.scan(step, (zeros, zeros), xs)[0][0] @ p["head"]

    return apply, {"x": dense(12, 48), "h": glorot(12, 48), "head": glorot(12, 12)}, glorot(6, 2, 12)


def transformer(layers=1):
    block = {"n1": norm(24), "qkv": dense(24, 72), "out": dense(24, 24)}
    block |= {"n2": norm(24), "up": dense(24, 48), "down": dense(48, 24)}
    params = {"embed": glorot(11, 24) * 4, "blocks": [block] * layers, "norm": norm(24), "head": dense(24, 11)}

    def layer_norm(p, x):
        return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-6) * p["scale"] + p["bias"]

    def apply(params, tokens):
        x = params["embed"][tokens]
        for p in params["blocks"]:
            q, k, v = jnp.split(linear(p["qkv"], layer_norm(p["n1"], x)).reshape(*x.shape[:2], 6, 12), 3, 2)
            a = jax.nn.dot_product_attention(q, k, v, is_causal=True)
            x = x + linear(p["out"], a.reshape(x.shape))
            x = x + linear(p["down"], jax.nn.gelu(linear(p["up"], layer_norm(p["n2"], x))))
        return linear(params["head"], layer_norm(params["norm"], x))

    return apply, params, jnp.arange(24).reshape(2, 12) % 11


@pytest.mark.parametrize("make", [mlp, cnn_with_batch_norm, lstm, transformer])
def test_a_model_agrees_with_float32_and_what_is_sensitive_in_it_is_float32(make):
    apply, params, x = make()
    shape = jax.eval_shape(apply, params, x).shape
    target = np.cos(np.arange(np.prod(shape), dtype=np.float32)).reshape(shape)
    errors = lambda params, x: jnp.square(apply(params, x) - target)
    loss = lambda params, x: jnp.mean(errors(params, x))
    for dtype in (F16, BF16):
        low = jamp.autocast(loss, dtype)
        for fun in (low, jax.value_and_grad(low), jamp.autocast(jax.grad(loss), dtype)):
            jaxpr = jax.make_jaxpr(fun)(params, x)
            assert operand_dtypes(jaxpr, PRODUCTS) == {dtype}
            assert operand_dtypes(jaxpr, SENSITIVE) <= {F32}
            assert {x.dtype for x in jax.tree.leaves(jaxpr.out_avals)} == {F32}
    for dtype in [F16, BF16] if make is cnn_with_batch_norm else [F16]:
        results, grads = under_autocast(errors, params, x, dtype=dtype)
        assert results < 2 * jnp.finfo(dtype).eps
        assert grads < 4 * jnp.finfo(dtype).eps
