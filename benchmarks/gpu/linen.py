"""Four Linen MLPs of 4096 and 14336, all products in float8: jamp, Flax's fp8_ops and Qwix; with SGD in place."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import jamp
from benchmarks.gpu.gradients import BF16, WITHOUT_TRITON
from benchmarks.gpu.measure import Send, Way, measure

FLOAT8: dict[str, Any] = {"compute_dtype": jamp.Float8(), "rules": {"dot_general": "compute"}}


def mlps(width: int, hidden: int, dtype: Any = None, dot_general_cls: Any = None) -> Any:
    from flax import linen as nn

    class MLPs(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            dense = partial(nn.Dense, use_bias=False, dtype=dtype, dot_general_cls=dot_general_cls)
            for _ in range(4):
                x = x + dense(width)(nn.silu(dense(hidden)(nn.RMSNorm(dtype=dtype)(x))))
            return x

    return MLPs()


def flax_fp8(*sizes: int) -> Any:
    from flax.linen import Fp8DirectDotGeneralOp

    return mlps(*sizes, BF16, Fp8DirectDotGeneralOp)


def qwix_fp8(*sizes: int) -> Any:
    import qwix

    dtypes = {"weight_qtype": jnp.float8_e4m3fn, "act_qtype": jnp.float8_e4m3fn, "bwd_qtype": jnp.float8_e5m2}
    rule = qwix.QtRule(module_path=".*", disable_channelwise_axes=True, **dtypes)
    return qwix.quantize_model(mlps(*sizes, BF16), qwix.QtProvider([rule]))


def bfloat16(*sizes: int) -> Any:
    return mlps(*sizes, BF16)


DEFAULT_FLAGS = "bfloat16 by hand, default flags"  # 16-bit products can be faster with Triton's kernels
# The model, the dtype of its input, and the options of autocast where it is used.
WAYS: dict[str, tuple[Callable[..., Any], Any, dict[str, Any]]] = {
    "bfloat16 by hand": (bfloat16, BF16, {}),
    "bfloat16 by hand, again": (bfloat16, BF16, {}),
    DEFAULT_FLAGS: (bfloat16, BF16, {}),
    "autocast": (mlps, jnp.float32, {"compute_dtype": BF16}),
    "Float8, float32 model": (mlps, jnp.float32, FLOAT8),
    "Float8, bfloat16 model": (bfloat16, BF16, FLOAT8),
    "Flax fp8_ops": (flax_fp8, BF16, {}),
    "Qwix": (qwix_fp8, BF16, {}),
}


def linen(quick: bool, send: Send) -> None:
    tokens, *sizes = (128, 128, 256) if quick else (8192, 4096, 14336)
    ways = []
    for name, (make_model, dtype, options) in WAYS.items():
        try:
            ways.append(way(name, make_model(*sizes), dtype, options, tokens, sizes[0]))
        except ImportError as error:
            print(f"left out: {name} ({error})")
    measure({"model": "four Linen MLPs of 4096 and 14336, 8192 tokens"}, ways, quick, send)


def way(name: str, model: Any, dtype: Any, options: dict[str, Any], tokens: int, width: int) -> Way:
    def loss(variables: Any, x: jax.Array, target: jax.Array) -> jax.Array:
        return jnp.mean((model.apply(variables, x).astype(jnp.float32) - target) ** 2)

    if options:
        loss = jamp.autocast(loss, **options)

    def step(variables: Any, x: jax.Array, target: jax.Array) -> Any:
        grads = jax.grad(loss, allow_int=True)(variables, x, target)
        is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)  # peers keep counters beside the parameters
        return jax.tree.map(lambda x, g: x - 1e-4 * g if is_float(x) else x, variables, grads)

    def make() -> Any:
        data, target, params = jax.random.split(jax.random.key(0), 3)
        x = jax.random.normal(data, (tokens, width), dtype)
        return model.init(params, x), (x, jax.random.normal(target, (tokens, width)))

    return Way(name, step, make, None if name == DEFAULT_FLAGS else WITHOUT_TRITON)
