"""ResNet-50 and a U-Net for diffusion, as they are trained, in float32 or by hand in 16 bit."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.models import batch_norm, cast, conv, cross_entropy, dense, layer_norm

STAGES = (3, 4, 6, 3)
WIDTHS = (128, 256, 512)  # of the U-Net, at 64, 32 and 16 pixels

Block = Callable[..., jax.Array]


def checkpointed(block: Block, policy: Any) -> Block:
    return jax.checkpoint(block, policy=policy, static_argnums=(2, 3)) if policy else block


def weights(size: int, n: int, m: int) -> jax.Array:
    return jnp.full((size, size, n, m), (size * size * n) ** -0.5)


def norm(n: int) -> dict[str, jax.Array]:
    return {"scale": jnp.ones(n), "bias": jnp.zeros(n)}


def bottleneck(p: Any, x: jax.Array, stride: int, dtype: Any) -> jax.Array:
    y = jax.nn.relu(batch_norm(p["norm1"], conv(p["conv1"], x, 1, dtype), dtype))
    y = jax.nn.relu(batch_norm(p["norm2"], conv(p["conv2"], y, stride, dtype), dtype))
    y = batch_norm(p["norm3"], conv(p["conv3"], y, 1, dtype), dtype)
    return jax.nn.relu(y + (batch_norm(p["norm4"], conv(p["conv4"], x, stride, dtype), dtype) if "conv4" in p else x))


def resnet_params() -> Any:
    blocks, n = [], 64
    for stage, layers in enumerate(STAGES):
        width = 64 * 2**stage
        for layer in range(layers):
            sizes = {"1": (1, n, width), "2": (3, width, width), "3": (1, width, 4 * width)}
            sizes |= {} if layer else {"4": (1, n, 4 * width)}
            block = {f"conv{i}": weights(*size) for i, size in sizes.items()}
            blocks.append(block | {f"norm{i}": norm(size[-1]) for i, size in sizes.items()})
            n = 4 * width
    head = {"w": jnp.full((n, 1000), 0.01), "b": jnp.zeros(1000)}
    return {"stem": weights(7, 3, 64), "norm": norm(64), "blocks": blocks, "head": head}


def resnet_loss(params: Any, batch: Any, *, dtype: Any = None, policy: Any = None) -> jax.Array:
    """Mean cross entropy of ResNet-50. With a policy, each block is in a `jax.checkpoint`."""
    x = jax.nn.relu(batch_norm(params["norm"], conv(params["stem"], batch[0], 2, dtype), dtype))
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    block, first = checkpointed(bottleneck, policy), {sum(STAGES[:i]) for i in range(1, len(STAGES))}
    for i, p in enumerate(params["blocks"]):
        x = block(p, x, 2 if i in first else 1, dtype)
    return cross_entropy(dense(params, "head", x.mean((1, 2)), dtype), batch[1])


def residual(p: Any, x: jax.Array, groups: int, dtype: Any) -> jax.Array:
    """A block of the U-Net: norm, silu and convolution, twice."""

    def activated(p: Any, x: jax.Array) -> jax.Array:
        grouped = x.reshape(*x.shape[:-1], groups, -1)
        one = {"scale": jnp.ones(()), "bias": jnp.zeros(())}
        normal = layer_norm(one, grouped, None, axes=(1, 2, 4)).reshape(x.shape)
        return cast(jax.nn.silu(normal * p["scale"] + p["bias"]), dtype)

    y = conv(p["conv1"], activated(p["norm1"], x), 1, dtype)
    y = conv(p["conv2"], activated(p["norm2"], y), 1, dtype)
    return y + (conv(p["project"], x, 1, dtype) if "project" in p else x)


def unet_params() -> Any:
    def block(n: int, m: int) -> dict[str, Any]:
        p = {"norm1": norm(n), "conv1": weights(3, n, m), "norm2": norm(m), "conv2": weights(3, m, m)}
        return p | ({"project": weights(1, n, m)} if n != m else {})

    down = [[block(max(n, WIDTHS[0]), m), block(m, m)] for n, m in zip((0, *WIDTHS), WIDTHS, strict=False)]
    above = (*WIDTHS[1:], WIDTHS[-1])
    up = [[block(n + m, m), block(2 * m, m)] for n, m in zip(above, WIDTHS, strict=True)]
    ends = {"stem": weights(3, 3, WIDTHS[0]), "head": weights(3, WIDTHS[0], 3)}
    return ends | {"down": down, "middle": block(WIDTHS[-1], WIDTHS[-1]), "up": up[::-1]}


def unet_loss(params: Any, batch: Any, *, dtype: Any = None, policy: Any = None) -> jax.Array:
    """Mean squared error of the noise that a U-Net finds (Ho et al. 2020), without the embedding of time."""
    block = checkpointed(residual, policy)
    x, skips = conv(params["stem"], batch[0], 1, dtype), []
    for i, level in enumerate(params["down"]):
        for p in level:
            x = block(p, x, 32, dtype)
            skips.append(x)
        if i < len(WIDTHS) - 1:
            x = x[:, ::2, ::2]
    x = block(params["middle"], x, 32, dtype)
    for i, level in enumerate(params["up"]):
        for p in level:
            x = block(p, jnp.concatenate([x, skips.pop()], -1), 32, dtype)
        if i < len(WIDTHS) - 1:
            x = x.repeat(2, 1).repeat(2, 2)
    return jnp.mean((conv(params["head"], x, 1, dtype).astype(jnp.float32) - batch[1]) ** 2)
