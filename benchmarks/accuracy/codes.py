"""Eight bits for Adam's moments: the error of its update for several codes, beside float32 on the same gradients.

    python -m benchmarks.accuracy.codes --json docs/benchmarks/codes.json      ten minutes on one core

A float32 run gives the gradients. Each code keeps moments of its own, rounded after every step, in blocks of 128 with
the largest magnitude as their scale. An error is that of the whole update, relative, the mean over the second half of
the run.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

from benchmarks.accuracy import tasks
from benchmarks.accuracy.tasks import Task
from benchmarks.record import Rows, parser, record, show, write
from jamp._optimizer_state.codes import BlockCodes, decode

Levels = Any  # f32[n], what the codes stand for, as shares of the scale: ascending, from 0 to 1
BLOCK = 128


def power(codes: int, exponent: float) -> Levels:
    return (np.arange(codes) / (codes - 1)) ** exponent


def dynamic_tree(bits: int) -> Levels:
    """The map of Dettmers et al., 2022: powers of ten, with fewer digits the smaller the power."""
    found = [0.0, 1.0]
    for i in range(bits):
        edges = np.linspace(0.1, 1, 2**i + 1)
        found += list(10.0 ** (i - bits + 1) * (edges[:-1] + edges[1:]) / 2)
    return np.sort(found)


def floats(codes: int, digits: int) -> Levels:
    """Binary floating-point numbers with so many digits after the first, and as many exponents as there is room for."""
    k = np.arange(codes - 1)
    return np.concatenate([[0], (2.0 ** -(1 + k // 2**digits) * (2 - (k % 2**digits) / 2**digits))[::-1]])


def lines(dtype: Any) -> Levels:
    """The codes of jamp: powers 2 and 4, with straight lines between powers of two."""
    codes = jnp.arange(jnp.iinfo(dtype).max + 1).astype(dtype)[None]
    units = lax.bitcast_convert_type(jnp.ones((1, 1)), jnp.uint32)
    found = np.asarray(decode(BlockCodes(codes, units))[0])
    return found / found[-1]


def softsign(codes: int) -> Levels:
    share = np.arange(codes) / (codes - 1)
    return share / (2 - share)


Way = tuple[Levels, Levels, bool]  # of the first moment, of the second (None: float32), and whether rounding is random
FIRST, SECOND = power(128, 2), power(256, 4)
WAYS: dict[str, Way] = {
    "powers 2 and 4, in lines, stochastic": (lines(jnp.int8), lines(jnp.uint8), True),
    "powers 2 and 4, stochastic": (FIRST, SECOND, True),
    "powers 2 and 4, to nearest": (FIRST, SECOND, False),
    "dynamic tree, to nearest": (dynamic_tree(7), dynamic_tree(8), False),
    "dynamic tree, stochastic": (dynamic_tree(7), dynamic_tree(8), True),
    "softsign and square, to nearest": (softsign(128), power(256, 2), False),
    "softsign and square, stochastic": (softsign(128), power(256, 2), True),
    "E4M3 and E5M3, stochastic": (floats(128, 3), floats(256, 3), True),
    "E3M4 and E4M4, stochastic": (floats(128, 4), floats(256, 4), True),
    "linear, stochastic": (power(128, 1), power(256, 1), True),
}
WAYS |= {f"first moment, power {p:g}": (power(128, p), None, True) for p in (1.5, 2, 3)}
WAYS |= {f"second moment, power {p}": (None, power(256, p), True) for p in (2, 3, 4, 5, 6)}


def rounded(x: Array, levels: Levels, is_random: bool, key: Array) -> Array:
    """What an array is after it was stored. A positive second moment is not stored as 0."""
    if levels is None or x.ndim == 0:
        return x
    table, size = jnp.asarray(levels, jnp.float32), min(BLOCK, x.shape[-1])
    blocks = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % size)]).reshape(*x.shape[:-1], -1, size)
    scale = jnp.abs(blocks).max(-1, keepdims=True)
    share = jnp.abs(blocks) / jnp.where(scale > 0, scale, 1)
    i = jnp.clip(jnp.searchsorted(table, share, side="right") - 1, 0, len(levels) - 2)
    low, high = table[i], table[i + 1]
    threshold = jax.random.uniform(key, share.shape) if is_random else 0.5
    found = jnp.where((share - low) / (high - low) > threshold, high, low)
    if len(levels) > 200:
        found = jnp.where((share > 0) & (found == 0), table[1], found)
    return (jnp.sign(blocks) * scale * found).reshape(*x.shape[:-1], -1)[..., : x.shape[-1]]


def run(task: Task, b2: float, steps: int, chosen: dict[str, Way], key: Array) -> dict[str, Array]:
    """The error of each step's update, f32[steps] for each way."""
    loss, clip = task.loss, optax.clip_by_global_norm(1.0)
    schedule = optax.warmup_cosine_decay_schedule(0, task.learning_rate, steps // 20, steps)
    ways = {"float32": (None, None, False)} | chosen
    norm = lambda tree: jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(tree)))

    def step(carry: Any, i: Array) -> Any:
        params, moments = carry
        of_step = jax.random.fold_in(key, i)
        grads = jax.grad(lambda p: loss(p, task.get_batch(task.data, of_step))[0])(params)
        grads, t = clip.update(grads, optax.EmptyState())[0], (i + 1).astype(jnp.float32)
        update, new = {}, {}
        for name, (first, second, is_random) in ways.items():
            mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[name][0], grads)
            nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, moments[name][1], grads)
            adam = lambda m, v: m / (1 - 0.9**t) / (jnp.sqrt(v / (1 - b2**t)) + 1e-8)
            update[name] = jax.tree.map(adam, mu, nu)
            store = lambda levels, j, is_random=is_random: partial(
                rounded, levels=levels, is_random=is_random, key=jax.random.fold_in(of_step, j)
            )
            new[name] = jax.tree.map(store(first, 0), mu), jax.tree.map(store(second, 1), nu)
        exact = update.pop("float32")
        errors = {name: norm(jax.tree.map(jnp.subtract, x, exact)) / norm(exact) for name, x in update.items()}
        params = jax.tree.map(lambda p, u: p - schedule(i) * (u + 1e-4 * p), params, exact)
        return (params, new), errors

    params = task.init(key)
    zeros = jax.tree.map(jnp.zeros_like, params)
    return jax.lax.scan(step, (params, dict.fromkeys(ways, (zeros, zeros))), jnp.arange(steps))[1]


TASKS: dict[str, tuple[Callable[[bool], Task], float]] = {
    "language model, b2 0.999": (tasks.language_model, 0.999),
    "language model, b2 0.95": (tasks.language_model, 0.95),
    "digits": (tasks.digits, 0.999),
    "convolutional net": (tasks.convolutional, 0.999),
}


def measure(quick: bool) -> Rows:
    rows: Rows = []
    steps, seeds = (4, 1) if quick else (600, 2)
    names, ways = (["digits"], dict(list(WAYS.items())[::8])) if quick else (list(TASKS), WAYS)
    for name in names:
        make, b2 = TASKS[name]
        compiled = jax.jit(partial(run, make(quick), b2, steps, ways))
        errors = [compiled(jax.random.key(seed)) for seed in range(seeds)]
        for way in ways:
            rows.append({"task": name, "way": way, "errors": [float(e[way][steps // 2 :].mean()) for e in errors]})
            show(rows[-1] | {"mean": float(np.mean(rows[-1]["errors"]))})
    return rows


if __name__ == "__main__":
    options = parser("benchmarks.accuracy.codes", __doc__).parse_args()
    found = record("benchmarks.accuracy.codes", options.quick, "cpu")
    write(options.json, found | {"rows": measure(options.quick)})
