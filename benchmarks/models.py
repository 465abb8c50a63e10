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
SMALL = {"ViT-B/16": Shape(1, 32, 2, 10, 4, 4), "GPT-2 124 M": Shape(1, 32, 2, 128, 16)}

Attend = Callable[..., jax.Array]


def cast(x: Any, dtype: Any) -> Any:
    return x if dtype is None else x.astype(dtype)


def dense(layers: Any, name: str, x: Any, dtype: Any) -> jax.Array:
    """The layer of a name, in a name scope, as a layer of Flax is."""
    p = layers[name]
    with jax.named_scope(name):
        return cast(x, dtype) @ cast(p["w"], dtype) + cast(p["b"], dtype)


def layer_norm(p: Any, x: jax.Array, dtype: Any, axes: Any = -1, epsilon: float = 1e-6) -> jax.Array:
    x = x.astype(jnp.float32)
    normal = (x - x.mean(axes, keepdims=True)) * jax.lax.rsqrt(x.var(axes, keepdims=True) + epsilon)
    return cast(normal * p["scale"] + p["bias"], dtype)


batch_norm = partial(layer_norm, axes=(0, 1, 2), epsilon=1e-5)


def wide(x: jax.Array) -> jax.Array:
    """In float32, as are norms, softmax and the loss, or in the float64 of a reference."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    full = wide(x)
    return (full * jax.lax.rsqrt(jnp.mean(full**2, -1, keepdims=True) + 1e-6)).astype(x.dtype) * scale


def conv(w: Any, x: Any, stride: int, dtype: Any = None) -> jax.Array:
    numbers = ("NHWC", "HWIO", "NHWC")
    x, w = cast(x, dtype), cast(w, dtype)
    return jax.lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=numbers)


def cross_entropy(logits: jax.Array, labels: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def init(key: jax.Array, shape: Shape) -> Any:
    """Random float32 parameters."""
    keys, width = iter(jax.random.split(key, 4 * shape.layers + 4)), shape.width
    weight = lambda *size: 0.02 * jax.random.normal(next(keys), size)
    linear = lambda *size: {"w": weight(*size), "b": jnp.zeros(size[-1])}
    norm = lambda: {"scale": jnp.ones(width), "bias": jnp.zeros(width)}

    def block() -> dict[str, Any]:
        layers = {"qkv": linear(width, 3 * width), "out": linear(width, width)}
        mlp = {"up": linear(width, 4 * width), "down": linear(4 * width, width)}
        return layers | mlp | {"norm1": norm(), "norm2": norm()}

    params = {"blocks": of_layers([block() for _ in range(shape.layers)], shape), "norm": norm()}
    if not shape.patch:
        return params | {"embed": weight(shape.classes, width), "positions": weight(shape.tokens, width)}
    params |= {"patches": linear(shape.patch, shape.patch, 3, width), "class": weight(1, 1, width)}
    return params | {"positions": weight(1 + shape.tokens, width), "head": linear(width, shape.classes)}


def of_layers(blocks: list[Any], shape: Shape) -> Any:
    """The parameters of all blocks: stacked for a loop, or in a list."""
    return jax.tree.map(lambda *x: jnp.stack(x), *blocks) if shape.scanned else blocks


def data(key: jax.Array, shape: Shape, batch: int) -> tuple[jax.Array, jax.Array]:
    """Random inputs and targets: the speed of a step does not depend on what they mean."""
    inputs, targets = jax.random.split(key)
    classes = lambda key, *size: jax.random.randint(key, size, 0, shape.classes)
    if shape.patch:
        side = shape.patch * round(shape.tokens**0.5)
        return jax.random.normal(inputs, (batch, side, side, 3)), classes(targets, batch)
    return classes(inputs, batch, shape.tokens), classes(targets, batch, shape.tokens)


def made(shape: Shape, batch: int) -> tuple[Any, Any]:
    """Parameters and a batch."""
    return init(jax.random.key(0), shape), data(jax.random.key(1), shape, batch)


def attend_written_out(q: jax.Array, k: jax.Array, v: jax.Array, causal: bool) -> jax.Array:
    """Attention of arrays [batch, tokens, heads, width of a head], with softmax in float32.

    On a CPU, `jax.nn.dot_product_attention` does not compile in float16.
    """
    with jax.named_scope("scores"):
        scores = wide(jnp.einsum("bthd,bshd->bhts", q * q.shape[-1] ** -0.5, k))
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores).astype(v.dtype), v)


def attention(p: Any, x: jax.Array, shape: Shape, dtype: Any, attend: Attend = attend_written_out) -> jax.Array:
    heads = (*x.shape[:2], shape.heads, shape.width // shape.heads)
    q, k, v = (y.reshape(heads) for y in jnp.split(dense(p, "qkv", x, dtype), 3, -1))
    return dense(p, "out", attend(q, k, v, causal=not shape.patch).reshape(x.shape), dtype)


def loss_fn(params: Any, batch: tuple[jax.Array, jax.Array], **options: Any) -> jax.Array:
    """Mean cross entropy."""
    return cross_entropy(logits(params, batch[0], **options), batch[1])


def logits(
    params: Any,
    inputs: jax.Array,
    shape: Shape,
    dtype: Any = None,
    policy: Any = None,
    attend: Attend = attend_written_out,
    stream: Any = None,
) -> jax.Array:
    """With a dtype, written by hand to compute in it, but for norms and softmax.

    With a policy, each block is in a `jax.checkpoint`. With a dtype of the residual stream, each sum is cast to it.
    """
    if shape.patch:
        x = conv(params["patches"]["w"], inputs, shape.patch, dtype) + cast(params["patches"]["b"], dtype)
        x = x.reshape(len(x), -1, shape.width)
        x = jnp.concatenate([jnp.broadcast_to(cast(params["class"], dtype), (len(x), 1, shape.width)), x], 1)
        x = x + cast(params["positions"], dtype)
    else:
        x = cast(params["embed"][inputs] + params["positions"], stream or dtype)

    def block(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        x = cast(x + attention(p, layer_norm(p["norm1"], x, dtype), shape, dtype, attend), stream)
        y = jax.nn.gelu(dense(p, "up", layer_norm(p["norm2"], x, dtype), dtype))
        return cast(x + dense(p, "down", y, dtype), stream), None

    x = layer_norm(params["norm"], stacked(block, x, params["blocks"], shape, policy), dtype)
    if shape.patch:
        return dense(params, "head", x[:, 0], dtype)
    with jax.named_scope("head"):
        return x @ cast(params["embed"], dtype).T


def stacked(block: Any, x: jax.Array, blocks: Any, shape: Shape, policy: Any) -> jax.Array:
    """All blocks, in a loop or one after the other; with a policy, each in a `jax.checkpoint`.

    Of a tuple of policies, which may be None, blocks that are not in a loop take turns.
    """
    wrapped = [
        jax.checkpoint(block, policy=p) if p else block for p in (policy if type(policy) is tuple else (policy,))
    ]
    if shape.scanned:
        return jax.lax.scan(wrapped[0], x, blocks)[0]
    for i, p in enumerate(blocks):
        with jax.named_scope(f"block_{i}"):
            x, _ = wrapped[i % len(wrapped)](x, p)
    return x


def problem(module: Any, shape: Shape, batch: int, scanned: bool) -> tuple[Any, Any, Any]:
    """A module's loss with its keywords `dtype` and `policy`, and the shapes of its parameters and its batch."""
    shape = replace(shape, scanned=scanned)
    params = jax.eval_shape(lambda: module.init(jax.random.key(0), shape))
    return partial(module.loss_fn, shape=shape), params, jax.eval_shape(lambda: data(jax.random.key(1), shape, batch))


def train_step(loss: Any, tx: optax.GradientTransformation, is_scaled: bool, carry: Any, batch: Any) -> Any:
    """Forward, backward and optimizer: `step((params, opt_state), batch)`, with its first arguments bound."""
    params, state = carry
    grads = (jamp.grad(loss, state) if is_scaled else jax.grad(loss))(params, batch)
    return updated(tx, grads, params, state)


def sgd_step(loss: Any, params: Any, batch: Any) -> Any:
    """The gradient, and an update in place."""
    return jax.tree.map(lambda x, g: x - 1e-6 * g, params, jax.grad(loss)(params, batch))


def updated(tx: optax.GradientTransformation, grads: Any, params: Any, state: Any) -> tuple[Any, Any]:
    """The parameters and the optimizer state after a step."""
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def resnet_loss(params: Any, batch: Any, *, dtype: Any = None) -> jax.Array:
    """ResNet-18, with a stem for small images."""
    x = jax.nn.relu(batch_norm(params["norm"], conv(params["stem"], batch[0], 1, dtype), dtype))
    for p in params["blocks"]:
        stride = 2 if "project" in p else 1
        y = jax.nn.relu(batch_norm(p["norm1"], conv(p["conv1"], x, stride, dtype), dtype))
        y = batch_norm(p["norm2"], conv(p["conv2"], y, 1, dtype), dtype)
        x = jax.nn.relu(y + (conv(p["project"], x, stride, dtype) if "project" in p else x))
    return cross_entropy(dense(params, "head", x.mean((1, 2)), dtype), batch[1])


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
