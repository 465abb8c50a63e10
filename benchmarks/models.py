"""ViT-B/16, transformers of GPT-2's layers and ResNet-18, as they are trained, in float32 or by hand in 16 bit."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jamp


@dataclass(frozen=True)
class Shape:
    """A transformer over tokens, or over the patches of an image where it has a patch size."""

    layers: int
    width: int
    heads: int
    classes: int  # or the vocabulary
    tokens: int  # a sequence; of an image, its patches
    patch: int = 0
    scanned: bool = False  # the layers in one loop: a program of a twelfth the size, for the compilers


# 86 M and 124 M parameters. GPT-2's vocabulary of 50257 is padded to a multiple of 128, its head is its embedding.
SHAPES = {"ViT-B/16": Shape(12, 768, 12, 1000, 196, 16), "GPT-2 124 M": Shape(12, 768, 12, 50304, 1024)}
LARGE = {"GPT 0.9 B": Shape(16, 2048, 16, 32768, 2048, scanned=True)}  # 876 M: where float8 should pay
SMALL = {"ViT-B/16": Shape(1, 32, 2, 10, 4, 4), "GPT-2 124 M": Shape(1, 32, 2, 128, 16)}
SMALL |= {"GPT 0.9 B": Shape(2, 128, 2, 128, 128, scanned=True)}

Attend = Callable[..., jax.Array]

TF32 = "float32, TF32"
# TF32 on GPUs that have it, one pass in bfloat16 on a TPU.
DEFAULT = "float32, JAX's default precision"


def cast(x: Any, dtype: Any) -> Any:
    return x if dtype is None else x.astype(dtype)


def dense(p: Any, x: Any, dtype: Any) -> jax.Array:
    return cast(x, dtype) @ cast(p["w"], dtype) + cast(p["b"], dtype)


def layer_norm(p: Any, x: jax.Array, dtype: Any) -> jax.Array:
    x = x.astype(jnp.float32)
    normal = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)
    return cast(normal * p["scale"] + p["bias"], dtype)


def conv(w: Any, x: Any, stride: int, dtype: Any = None) -> jax.Array:
    numbers = ("NHWC", "HWIO", "NHWC")
    x, w = cast(x, dtype), cast(w, dtype)
    return jax.lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=numbers)


def cross_entropy(logits: jax.Array, labels: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def init(key: jax.Array, shape: Shape) -> Any:
    """Random float32 parameters."""
    keys = iter(jax.random.split(key, 4 * shape.layers + 4))

    def weight(*size: int) -> jax.Array:
        return 0.02 * jax.random.normal(next(keys), size)

    def linear(rows: int, columns: int) -> dict[str, jax.Array]:
        return {"w": weight(rows, columns), "b": jnp.zeros(columns)}

    def norm() -> dict[str, jax.Array]:
        return {"scale": jnp.ones(shape.width), "bias": jnp.zeros(shape.width)}

    def block() -> dict[str, Any]:
        width = shape.width
        layers = {"qkv": linear(width, 3 * width), "out": linear(width, width)}
        mlp = {"up": linear(width, 4 * width), "down": linear(4 * width, width)}
        return layers | mlp | {"norm1": norm(), "norm2": norm()}

    blocks = [block() for _ in range(shape.layers)]
    params = {"blocks": jax.tree.map(lambda *x: jnp.stack(x), *blocks) if shape.scanned else blocks, "norm": norm()}
    if not shape.patch:
        return params | {"embed": weight(shape.classes, shape.width), "positions": weight(shape.tokens, shape.width)}
    return params | {
        "patches": {"w": weight(shape.patch, shape.patch, 3, shape.width), "b": jnp.zeros(shape.width)},
        "class": weight(1, 1, shape.width),
        "positions": weight(1 + shape.tokens, shape.width),
        "head": linear(shape.width, shape.classes),
    }


def data(key: jax.Array, shape: Shape, batch: int) -> tuple[jax.Array, jax.Array]:
    """Random inputs and targets: the speed of a step does not depend on what they mean."""
    inputs, targets = jax.random.split(key)
    if shape.patch:
        side = shape.patch * round(shape.tokens**0.5)
        return jax.random.normal(inputs, (batch, side, side, 3)), jax.random.randint(
            targets, (batch,), 0, shape.classes
        )
    size = (batch, shape.tokens)
    return jax.random.randint(inputs, size, 0, shape.classes), jax.random.randint(targets, size, 0, shape.classes)


def made(shape: Shape, batch: int) -> tuple[Any, Any]:
    """Parameters and a batch."""
    return init(jax.random.key(0), shape), data(jax.random.key(1), shape, batch)


def loss_fn(
    params: Any,
    batch: tuple[jax.Array, jax.Array],
    shape: Shape,
    dtype: Any = None,
    policy: Any = None,
    attend: Attend | None = None,
) -> jax.Array:
    """Mean cross entropy; with a dtype, written by hand to compute in it, but for norms, softmax and loss.

    With a policy, each block is in a `jax.checkpoint`. `attend(q, k, v, causal=...)` takes and gives arrays
    [batch, tokens, heads, width of a head]; None writes attention out.
    """
    inputs, targets = batch
    if shape.patch:
        x = conv(params["patches"]["w"], inputs, shape.patch, dtype) + cast(params["patches"]["b"], dtype)
        x = x.reshape(len(x), -1, shape.width)
        x = jnp.concatenate([jnp.broadcast_to(cast(params["class"], dtype), (len(x), 1, shape.width)), x], 1)
        x = x + cast(params["positions"], dtype)
    else:
        x = cast(params["embed"][inputs] + params["positions"], dtype)

    def block(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        x = x + attention(p, layer_norm(p["norm1"], x, dtype), shape, dtype, attend)
        return x + dense(p["down"], jax.nn.gelu(dense(p["up"], layer_norm(p["norm2"], x, dtype), dtype)), dtype), None

    x = stacked(jax.checkpoint(block, policy=policy) if policy else block, x, params["blocks"], shape)
    x = layer_norm(params["norm"], x, dtype)
    logits = dense(params["head"], x[:, 0], dtype) if shape.patch else x @ cast(params["embed"], dtype).T
    return cross_entropy(logits, targets)


def stacked(block: Any, x: jax.Array, blocks: Any, shape: Shape) -> jax.Array:
    """All blocks, in a loop or one after the other."""
    if shape.scanned:
        return jax.lax.scan(block, x, blocks)[0]
    for p in blocks:
        x, _ = block(x, p)
    return x


def problem(module: Any, shape: Shape, batch: int, scanned: bool) -> tuple[Any, Any, Any]:
    """A module's loss with its keywords `dtype` and `policy`, and the shapes of its parameters and its batch."""
    shape = replace(shape, scanned=scanned)
    params = jax.eval_shape(lambda: module.init(jax.random.key(0), shape))
    return partial(module.loss_fn, shape=shape), params, jax.eval_shape(lambda: data(jax.random.key(1), shape, batch))


def attention(p: Any, x: jax.Array, shape: Shape, dtype: Any, attend: Attend | None = None) -> jax.Array:
    """Written out, and softmax in float32: on a CPU, `jax.nn.dot_product_attention` does not compile in float16."""
    heads = (*x.shape[:2], shape.heads, shape.width // shape.heads)
    q, k, v = (y.reshape(heads) for y in jnp.split(dense(p["qkv"], x, dtype), 3, -1))
    if attend:
        return dense(p["out"], attend(q, k, v, causal=not shape.patch).reshape(x.shape), dtype)
    scores = jnp.einsum("bthd,bshd->bhts", q * heads[-1] ** -0.5, k).astype(jnp.float32)
    if not shape.patch:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    weights = cast(jax.nn.softmax(scores), dtype)
    return dense(p["out"], jnp.einsum("bhts,bshd->bthd", weights, v).reshape(x.shape), dtype)


def fused_attention(dtype: Any) -> Attend:
    """The kernel of cuDNN, which computes in 16 bit alone. Float32 takes XLA's fusions."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, causal: bool) -> jax.Array:
        q, k, v = (cast(y, dtype) for y in (q, k, v))
        if not dtype:
            return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="xla")
        # For training, cuDNN takes an even number of tokens. Of the one that is added, nothing is read.
        tokens = q.shape[1]
        q, k, v = (jnp.pad(y, ((0, 0), (0, tokens % 2), (0, 0), (0, 0))) for y in (q, k, v))
        lengths = jnp.full(len(q), tokens, jnp.int32) if tokens % 2 else None
        options = {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths, "is_causal": causal}
        return jax.nn.dot_product_attention(q, k, v, implementation="cudnn", **options)[:, :tokens]

    return attend


def flops(shape: Shape, batch: int) -> float:
    """Of the matrix products of a training step: three times those of the forward pass (PaLM, appendix B)."""
    tokens = shape.tokens + bool(shape.patch)
    weights = 12 * shape.layers * shape.width**2 + (0 if shape.patch else shape.classes * shape.width)
    return 3.0 * batch * tokens * (2 * weights + 4 * shape.layers * shape.width * tokens)


def steps(shape: Shape, fused: bool = False) -> dict[str, tuple[Callable[..., Any], optax.GradientTransformation]]:
    """`step((params, opt_state), batch)` and its optimizer: forward, backward and AdamW on float32 parameters.

    `fused`: attention by a kernel of the GPU's library where the step is in 16 bit.
    """

    def loss(kind: Any = None, dtype: Any = None) -> Any:
        return partial(loss_fn, shape=shape, dtype=dtype, attend=fused_attention(kind) if fused else None)

    tx, scaled = optax.adamw(1e-4), jamp.loss_scaled(optax.adamw(1e-4))
    f16, bf16 = jnp.float16, jnp.bfloat16
    unscaled = lambda loss, precision=None: (partial(train_step, loss, tx, precision), tx)
    return {
        "float32": unscaled(loss(), "float32"),
        TF32: unscaled(loss(), "tensorfloat32"),
        DEFAULT: unscaled(loss()),
        "jamp.autocast float16, loss_scaled": (partial(scaled_step, jamp.autocast(loss(f16), f16), scaled), scaled),
        "jamp.autocast float16, unscaled": unscaled(jamp.autocast(loss(f16), f16)),
        "jamp.autocast bfloat16": unscaled(jamp.autocast(loss(bf16), bf16)),
        "jamp.autocast float8": unscaled(jamp.autocast(loss(bf16), jamp.Float8())),
        "dtype=float16, loss_scaled": (partial(scaled_step, loss(f16, f16), scaled), scaled),
        "dtype=float16, unscaled": unscaled(loss(f16, f16)),
        "dtype=bfloat16": unscaled(loss(bf16, bf16)),
    }


def train_step(loss: Any, tx: optax.GradientTransformation, precision: str | None, carry: Any, batch: Any) -> Any:
    params, state = carry
    with jax.default_matmul_precision(precision):
        grads = jax.grad(loss)(params, batch)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def scaled_step(loss: Any, tx: optax.GradientTransformation, carry: Any, batch: Any) -> Any:
    params, state = carry
    grads = jamp.grad(loss, state)(params, batch)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def batch_norm(p: Any, x: jax.Array, dtype: Any) -> jax.Array:
    x = x.astype(jnp.float32)
    normal = (x - x.mean((0, 1, 2))) * jax.lax.rsqrt(x.var((0, 1, 2)) + 1e-5)
    return cast(normal * p["scale"] + p["bias"], dtype)


def resnet_loss(params: Any, batch: Any, *, dtype: Any = None) -> jax.Array:
    """ResNet-18, with a stem for small images."""
    x = jax.nn.relu(batch_norm(params["norm"], conv(params["stem"], batch[0], 1, dtype), dtype))
    for p in params["blocks"]:
        stride = 2 if "project" in p else 1
        y = jax.nn.relu(batch_norm(p["norm1"], conv(p["conv1"], x, stride, dtype), dtype))
        y = batch_norm(p["norm2"], conv(p["conv2"], y, 1, dtype), dtype)
        x = jax.nn.relu(y + (conv(p["project"], x, stride, dtype) if "project" in p else x))
    return cross_entropy(dense(params["head"], x.mean((1, 2)), dtype), batch[1])


def resnet_params(width: int) -> Any:
    conv = lambda size, n, m: jnp.full((size, size, n, m), (size * size * n) ** -0.5)
    norm = lambda n: {"scale": jnp.ones(n), "bias": jnp.zeros(n)}
    blocks = []
    for n, m in [(1, 1), (1, 1), (1, 2), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8)]:
        n, m = n * width, m * width
        p = {"conv1": conv(3, n, m), "norm1": norm(m), "conv2": conv(3, m, m), "norm2": norm(m)}
        blocks.append(p | ({"project": conv(1, n, m)} if n != m else {}))
    head = {"w": jnp.full((8 * width, 1000), 0.01), "b": jnp.zeros(1000)}
    return {"stem": conv(3, 3, width), "norm": norm(width), "blocks": blocks, "head": head}
