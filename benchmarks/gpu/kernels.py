"""The optimizer step, and float8 products, on one GPU: `benchmarks.gpu` runs each in its own process."""

import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jamp
from benchmarks.gpu.pipelined import carried, peak_gigabytes, timed, utilization
from benchmarks.record import Rows
from benchmarks.step import peers, update
from benchmarks.timing import paired

NAMES = ("optax", peers.AGAIN, "jamp", "lax.cond by hand", "where by hand", "flax DynamicScale recipe")
WIDTHS = (1120, 2240, 4480, 7072)  # 25 M, 100 M, 400 M and 1 B parameters in 40 leaves
PROCESSES = 3


def step_units(quick: bool) -> list[dict[str, Any]]:
    """Every table once, and then again in other processes."""
    if quick:
        return [{"optimizer": "adamw", "width": 16, "grads": grads, "process": 0} for grads in ("float32", "float16")]
    return [
        {"optimizer": optimizer, "width": width, "grads": grads, "process": process}
        for process in range(PROCESSES)
        for width in WIDTHS
        for optimizer in update.SCALED
        for grads in ("float32", "float16")
    ]


def steps(unit: dict[str, Any], quick: bool) -> Rows:
    """A row for each library; the ratio is to plain Optax, block by block of pipelined steps in random order."""
    params = update.parameters(40, unit["width"])
    args = gradients(params, unit["grads"])
    advance = {}
    for name in random.sample(there := peers.installed(NAMES), len(there)):
        step, carry = stepping(name, unit, params)
        advance[name] = carried(jax.jit(step, donate_argnums=0), jax.tree.map(jnp.copy, carry), args)
        del carry  # at 1 B parameters there is no room for a second one of each
        advance[name](2)  # compiles
    count = 2 if quick else int(np.clip(0.2 / seconds(advance["optax"], 3), 3, 200))
    times = paired({name: partial(seconds, advance[name], count) for name in there}, 1 if quick else 7)
    median = lambda t: float(np.median(t))
    rows = [{"name": x, "milliseconds": 1e3 * median(t), "ratio": median(t / times["optax"])} for x, t in times.items()]
    return [update.size(40, unit["width"]) | row for row in rows]


def stepping(name: str, unit: dict[str, Any], params: Any) -> tuple[Callable[..., Any], Any]:
    """A library's step and its carry. float16 gradients are cast and unscaled in the same program."""
    recipe = peers.JAX[name](update.OPTIMIZERS[unit["optimizer"]](), params)
    if unit["grads"] == "float32":
        return recipe.step, recipe.carry

    def step(carry: Any, grads: Any, scale: Any) -> Any:
        return recipe.step(carry, jax.tree.map(lambda g: g.astype(jnp.float32) * (1 / scale), grads))

    return step, recipe.carry


def gradients(params: Any, dtype: str) -> tuple[Any, ...]:
    """True gradients in float32; in float16 those of a scaled loss, and the scale."""
    if dtype == "float32":
        return (update.like(params, 1e-3),)
    return jax.tree.map(lambda p: jnp.full(p.shape, 1e-3 * peers.SCALE, dtype), params), jnp.float32(peers.SCALE)


def seconds(advance: Callable[[int], Any], count: int) -> float:
    """Of one step, of so many that are waited for together."""
    start = time.perf_counter()
    advance(count)
    return (time.perf_counter() - start) / count


# Rows of the batch, and the two sizes of the weights: squares, and the layers of models of 1 B parameters and more.
SIZES = [*((n, n, n) for n in (1024, 2048, 4096, 8192)), (8192, 2048, 8192), (16384, 2048, 8192), (16384, 4096, 16384)]
WAYS: dict[str, Any] = {
    "bfloat16": jnp.bfloat16,
    "float8": jamp.Float8(),
    "float8, per row": jamp.Float8(granularity="row"),
}


def product_units(quick: bool) -> list[dict[str, Any]]:
    return [{"size": size} for size in ([[128, 128, 128]] if quick else map(list, SIZES))]


def products(unit: dict[str, Any], quick: bool) -> Rows:
    """A layer `x @ w` with its cast from float32 weights: forward, and forward and backward, bfloat16 and float8."""
    m, k, n = unit["size"]
    keys = jax.random.split(jax.random.key(0), 3)
    x, w, dy = (jax.random.normal(key, shape) for key, shape in zip(keys, ((m, k), (k, n), (m, n)), strict=True))
    x, dy = x.astype(jnp.bfloat16), dy.astype(jnp.bfloat16)
    found = []
    for name, dtype in WAYS.items():
        forward = jamp.autocast(lambda x, w: x @ w, dtype)

        def both(x: Any, w: Any, dy: Any, forward: Any = forward) -> Any:
            y, pull = jax.vjp(forward, x, w)
            return y, pull(dy.astype(y.dtype))

        for what, count, fun, args in (("forward", 1, forward, (x, w)), ("forward and backward", 3, both, (x, w, dy))):
            measured = timed(carried(jax.jit(lambda _, *args, fun=fun: fun(*args)), None, args), quick)
            flops = 2.0 * count * m * k * n
            found.append(
                {"name": name, "what": what, **measured}
                | {"teraflops": flops / measured["milliseconds"] / 1e9, "peak_gigabytes": peak_gigabytes()}
                | {"utilization": utilization(flops, measured["milliseconds"], jax.devices()[0].device_kind)}
            )
    return found
