"""The time of autocast: a training step, and tracing. The memory is in `benchmarks.memory`.

    python -m benchmarks.autocast               time a training step here (CPU or GPU), in turn
    python -m benchmarks.autocast --trace       trace time of 24 layers, against plain tracing

A step is forward, backward and AdamW on float32 parameters: in float32, under autocast, and of the same model written
with `dtype=bfloat16`.
"""

import argparse
import functools
import gc
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import jamp


def cast(x, dtype):
    return x if dtype is None else x.astype(dtype)


def dense(p, x, dtype):
    return cast(x, dtype) @ cast(p["w"], dtype) + cast(p["b"], dtype)


def layer_norm(p, x, dtype):
    x = x.astype(jnp.float32)
    normal = (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)
    return cast(normal * p["scale"] + p["bias"], dtype)


def attention(p, x, heads, dtype):
    b, t, d = x.shape
    q, k, v = (a.reshape(b, t, heads, d // heads) for a in jnp.split(dense(p["qkv"], x, dtype), 3, -1))
    logits = jnp.einsum("bthd,bshd->bhts", q * (d // heads) ** -0.5, k).astype(jnp.float32)
    logits = jnp.where(jnp.tril(jnp.ones((t, t), bool)), logits, -1e30)
    weights = cast(jax.nn.softmax(logits), dtype)
    return dense(p["out"], jnp.einsum("bhts,bshd->bthd", weights, v).reshape(b, t, d), dtype)


def transformer(params, tokens, *, heads, dtype=None):
    x = cast(params["embed"][tokens] + params["positions"], dtype)
    for p in params["blocks"]:
        x = x + attention(p, layer_norm(p["norm1"], x, dtype), heads, dtype)
        x = x + dense(p["down"], jax.nn.gelu(dense(p["up"], layer_norm(p["norm2"], x, dtype), dtype)), dtype)
    return dense(params["head"], layer_norm(params["norm"], x, dtype), dtype)


def transformer_loss(params, batch, *, heads, dtype=None):
    tokens, targets = batch
    logits = transformer(params, tokens, heads=heads, dtype=dtype).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def transformer_params(layers, width, vocabulary, length):
    def dense(n, m):
        return {"w": jnp.full((n, m), n**-0.5), "b": jnp.zeros(m)}

    def norm():
        return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}

    def block():
        return {
            "norm1": norm(),
            "qkv": dense(width, 3 * width),
            "out": dense(width, width),
            "norm2": norm(),
            "up": dense(width, 4 * width),
            "down": dense(4 * width, width),
        }

    return {
        "embed": jnp.ones((vocabulary, width)),
        "positions": jnp.ones((length, width)),
        "blocks": [block() for _ in range(layers)],
        "norm": norm(),
        "head": dense(width, vocabulary),
    }


def conv(w, x, stride, dtype):
    return lax.conv_general_dilated(
        cast(x, dtype), cast(w, dtype), (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def batch_norm(p, x, dtype):
    x = x.astype(jnp.float32)
    normal = (x - x.mean((0, 1, 2))) * lax.rsqrt(x.var((0, 1, 2)) + 1e-5)
    return cast(normal * p["scale"] + p["bias"], dtype)


def resnet(params, images, *, dtype=None):
    x = jax.nn.relu(batch_norm(params["norm"], conv(params["stem"], images, 1, dtype), dtype))
    for p in params["blocks"]:
        stride = 2 if "project" in p else 1
        y = jax.nn.relu(batch_norm(p["norm1"], conv(p["conv1"], x, stride, dtype), dtype))
        y = batch_norm(p["norm2"], conv(p["conv2"], y, 1, dtype), dtype)
        x = jax.nn.relu(y + (conv(p["project"], x, stride, dtype) if "project" in p else x))
    return dense(params["head"], x.mean((1, 2)), dtype)


def resnet_loss(params, batch, *, dtype=None):
    images, labels = batch
    logits = resnet(params, images, dtype=dtype).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def resnet_params(width):
    def conv(size, n, m):
        return jnp.full((size, size, n, m), (size * size * n) ** -0.5)

    def norm(n):
        return {"scale": jnp.ones(n), "bias": jnp.zeros(n)}

    blocks = []
    for n, m in [(1, 1), (1, 1), (1, 2), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8)]:
        n, m = n * width, m * width
        p = {"conv1": conv(3, n, m), "norm1": norm(m), "conv2": conv(3, m, m), "norm2": norm(m)}
        blocks.append(p | ({"project": conv(1, n, m)} if n != m else {}))
    head = {"w": jnp.full((8 * width, 1000), 0.01), "b": jnp.zeros(1000)}
    return {"stem": conv(3, 3, width), "norm": norm(width), "blocks": blocks, "head": head}


def problem(model, *, small):
    """A loss with a `dtype` argument, and its parameters and batch."""
    if model == "transformer":
        layers, width, vocabulary, length, batch = (2, 128, 1000, 64, 4) if small else (4, 768, 8192, 512, 8)
        loss = functools.partial(transformer_loss, heads=width // 64)
        params = lambda: transformer_params(layers, width, vocabulary, length)
        tokens = np.arange(batch * length, dtype=np.int32).reshape(batch, length) % vocabulary
        return loss, params, (tokens, tokens)
    width, size, batch = (8, 32, 8) if small else (64, 56, 64)
    images = np.linspace(-1, 1, batch * size * size * 3, dtype=np.float32).reshape(batch, size, size, 3)
    return resnet_loss, lambda: resnet_params(width), (images, np.arange(batch, dtype=np.int32))


def variants(loss):
    return {
        "float32": loss,
        "autocast float16": jamp.autocast(loss, jnp.float16),
        "autocast bfloat16": jamp.autocast(loss, jnp.bfloat16),
        "written with dtype=bfloat16": functools.partial(loss, dtype=jnp.bfloat16),
    }


def train_step(loss):
    tx = optax.adamw(1e-3)

    def step(params, opt_state, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return tx.init, jax.jit(step, donate_argnums=(0, 1))


def timed(model, runs):
    on_gpu = jax.default_backend() == "gpu"
    loss, params, batch = problem(model, small=not on_gpu)
    table, times = {}, {}
    for name, fun in variants(loss).items():
        init, step = train_step(fun)
        p = params()
        state = (p, init(p))
        table[name] = (step.lower(*state, batch).compile(), state)
        times[name] = []
    for run in range(runs + 2):
        for name, (step, state) in table.items():
            start = time.perf_counter()
            *state, _ = jax.block_until_ready(step(*state, batch))
            table[name] = (step, state)
            if run > 1:
                times[name].append(time.perf_counter() - start)
    base = np.array(times["float32"])
    for name, t in times.items():
        print(
            f"{model:12s} {name:36s} {np.median(t) * 1e3:9.2f} ms   x {np.median(np.array(t) / base):.3f}", flush=True
        )


def trace_times():
    loss = functools.partial(transformer_loss, heads=4)
    params = jax.eval_shape(lambda: transformer_params(24, 64, 256, 32))
    batch = (jax.ShapeDtypeStruct((2, 32), jnp.int32),) * 2
    for name, wrap in {"forward": lambda f: f, "gradient": jax.grad}.items():
        seconds = {}
        for _ in range(3):
            for how, fun in {"plain": loss, "autocast": jamp.autocast(loss, jnp.bfloat16)}.items():
                jax.clear_caches()
                gc.collect()
                start = time.process_time()
                jax.jit(wrap(fun)).trace(params, batch)
                seconds[how] = min(seconds.get(how, np.inf), time.process_time() - start)
        print(f"{name:10s} " + "  ".join(f"{k} {t:.2f} s" for k, t in seconds.items()), end="")
        print(f"   x {seconds['autocast'] / seconds['plain']:.2f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--model", choices=["transformer", "resnet"], nargs="*", default=["transformer", "resnet"])
    parser.add_argument("--runs", type=int, default=11)
    arguments = parser.parse_args()
    if arguments.trace:
        trace_times()
    else:
        for model in arguments.model:
            timed(model, arguments.runs)
