"""The accuracy study: the dtypes and loss scales that it compares, and a run with what becomes of the gradients."""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

import jamp
import jamp.debug
from benchmarks.accuracy.tasks import Loss, Task, cross_entropy
from benchmarks.models import updated
from benchmarks.record import Rows, show

NONE, _DYNAMIC = jamp.NoOpLossScale(), jamp.DynamicLossScale()
FULL = {"body": jnp.float32, "head": jnp.float32}


@dataclass(frozen=True)
class Setup:
    """How a task is computed: the dtypes of the layers before the last and of the last one, and the loss scale."""

    name: str
    body: DTypeLike = jnp.float16
    head: DTypeLike = jnp.float16
    loss_scale: jamp.LossScale = _DYNAMIC
    autocast: bool = False
    full_loss: bool = False  # whether autocast leaves the cross entropy alone
    rules: tuple[tuple[str, str], ...] = ()  # of autocast
    micro_batches: int | None = None  # None: the task's
    starts: tuple[str, ...] = ("default",)  # of the loss scale, from STARTS

    def make_loss(self, task: Task) -> Loss:
        of_logits = jamp.full_precision(cross_entropy) if self.full_loss else cross_entropy
        loss = task.make_loss(self.body, self.head, of_logits)
        return jamp.autocast(loss, jnp.float16, rules=dict(self.rules)) if self.autocast else loss


FLOAT32 = Setup("float32", **FULL, loss_scale=NONE)
SETUPS = [
    FLOAT32,
    Setup("bfloat16", jnp.bfloat16, jnp.bfloat16, NONE),
    Setup("float16, unscaled", loss_scale=NONE),
    Setup("float16, static", loss_scale=jamp.StaticLossScale()),
    Setup("float16, dynamic"),
    Setup("float16, adaptive", loss_scale=jamp.AdaptiveLossScale()),
    Setup("autocast float16, dynamic", **FULL, autocast=True),
    Setup("autocast, loss in full_precision", **FULL, autocast=True, full_loss=True),
    Setup("by layer: last float32, dynamic", head=jnp.float32),
]
SMALLER_BATCHES = [Setup(f"float16, unscaled, {n} micro-batches", loss_scale=NONE, micro_batches=n) for n in (1, 32)]
# On the tasks of `tasks.overflowing`, the loss scale grows until it overflows, again and again: its interval is 50.
OFTEN = Setup("float16, dynamic", loss_scale=jamp.DynamicLossScale(growth_interval=50, max_scale=math.inf))
OVERFLOWING = [FLOAT32, *SETUPS[2:4], OFTEN, SETUPS[5]]
STARTS = {"default": None, "too high": 2.0**40, "too low": 1.0}
BAD = tuple(STARTS)[1:]
BAD_STARTS = [
    Setup("dynamic, interval 2000", loss_scale=jamp.DynamicLossScale(max_scale=math.inf), starts=BAD),
    Setup("dynamic, interval 20", loss_scale=jamp.DynamicLossScale(growth_interval=20, max_scale=math.inf), starts=BAD),
    Setup("adaptive, 20 to 1000", loss_scale=jamp.AdaptiveLossScale(), starts=BAD),
]
SEEDS = 5
# Or XLA may leave out a rounding to 16 bit that is followed by a cast back.
COMPILER_OPTIONS = {"xla_allow_excess_precision": False}


def make_programs(task: Task, setup: Setup) -> tuple[Any, Callable[..., Any], Callable[..., Any]]:
    """The optimizer; a function that takes a step for each of some keys; and one that measures where this led."""
    tx = jamp.loss_scaled(task.optimizer(), setup.loss_scale)
    divisor = task.micro_batches if setup.micro_batches is None else setup.micro_batches

    def of_micro_batch(setup: Setup) -> Loss:
        loss_fn = setup.make_loss(task)

        def divided(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
            loss, _ = loss_fn(params, batch)
            return loss / divisor, loss

        return divided

    own, exact = of_micro_batch(setup), of_micro_batch(FLOAT32)

    def step(carry: Any, key: jax.Array, data: Any) -> tuple[Any, Any]:
        params, opt_state = carry
        scale = jamp.get_loss_scale(opt_state)
        (_, loss), grads = jamp.value_and_grad(own, opt_state, has_aux=True)(params, task.get_batch(data, key))
        # One micro-batch stands for all of them: their sum, in float32, is as large as the undivided gradient.
        params, opt_state = updated(tx, jax.tree.map(lambda g: g * divisor, grads), params, opt_state)
        return (params, opt_state), (loss, jnp.log2(scale), jamp.get_grads_finite(opt_state))

    def train(params: Any, opt_state: Any, data: Any, keys: jax.Array) -> tuple[Any, Any]:
        return jax.lax.scan(lambda carry, key: step(carry, key, data), (params, opt_state), keys)

    def evaluate(params: Any, opt_state: Any, data: Any, judged: Any, held_out: Any, key: jax.Array) -> dict[str, Any]:
        loss_fn, batch = setup.make_loss(task), task.get_batch(data, key)
        held_out_loss, accuracy = loss_fn(params, held_out)
        loss = held_out_loss if judged is None else loss_fn(params, judged)[0]
        found = {"loss": loss, "held_out_loss": held_out_loss, "accuracy": accuracy}
        true, _ = jax.grad(exact, has_aux=True)(params, batch)
        for name, state in (("unscaled", NONE.init()), ("scaled", opt_state)):
            grads, _ = jamp.grad(own, state, has_aux=True)(params, batch)
            found |= {f"{key}_{name}": x for key, x in _compare(grads, true).items()}
        return found | _report(true, opt_state)

    return tx, *(jax.jit(fun, compiler_options=COMPILER_OPTIONS) for fun in (train, evaluate))


def _compare(grads: Any, true: Any) -> dict[str, jax.Array]:
    """The share of gradients that are 0 and should not be, and the relative error of all together."""
    total = sum(jnp.sum(t != 0) for t in jax.tree.leaves(true))
    lost = sum(jnp.sum((g == 0) & (t != 0)) for g, t in zip(*map(jax.tree.leaves, (grads, true)), strict=True))
    error = optax.global_norm(jax.tree.map(jnp.subtract, grads, true)) / optax.global_norm(true)
    return {"lost": lost / total, "error": error}


def _report(true: Any, state: Any) -> dict[str, jax.Array]:
    """Shares of the parameters' float32 gradients that float16 would round to 0 or to a subnormal."""
    report = jamp.debug.underflow_report(true, state)
    weights = jnp.stack([jnp.sum(t != 0) for t in jax.tree.leaves(true)]).astype(jnp.float32)
    names = ("zero_unscaled", "subnormal_unscaled", "zero_scaled", "subnormal_scaled")
    return {name: jnp.vdot(getattr(report, name), weights) / weights.sum() for name in names}


def run(task: Task, setup: Setup, seeds: Iterable[int]) -> Rows:
    """Train from every start and seed; the seed decides the initial parameters and the batches."""
    tx, train, evaluate = make_programs(task, setup)
    rows = []
    for start, seed in product(setup.starts, seeds):
        init_key, key = jax.random.split(jax.random.key(seed))
        params = task.init(init_key)
        opt_state = tx.init(params)
        if STARTS[start]:
            opt_state = jamp.set_loss_scale(opt_state, STARTS[start])
        about = {"task": task.name, "setup": setup.name, "start": start, "seed": seed}
        rows.append(about | _train(task, train, evaluate, (params, opt_state), key))
        at_end = ("loss", "held_out_loss", "accuracy", "lost_scaled", "error_scaled")
        show(about | {name: rows[-1][name][-1] for name in at_end})
    return rows


def _train(task: Task, train: Any, evaluate: Any, carry: Any, key: jax.Array) -> dict[str, Any]:
    history, curve, seconds = [], [], []
    for i, keys in enumerate(jax.random.split(key, task.steps).reshape(-1, task.every)):
        start = time.process_time()  # of this process alone: others may run on the machine
        carry, out = jax.block_until_ready(train(*carry, task.data, keys))
        seconds.append((time.process_time() - start) / task.every)
        history.append(out)
        probe = jax.random.fold_in(key, i)
        curve.append(jax.device_get(evaluate(*carry, task.data, task.judged, task.held_out, probe)))
    _losses, scales, finite = (np.concatenate(x) for x in zip(*history, strict=True))
    return {
        "steps": list(range(task.every, task.steps + 1, task.every)),
        **{name: [_digits(point[name]) for point in curve] for name in curve[0]},
        "skipped": np.flatnonzero(~finite).tolist(),
        "log2_scale": [_digits(x) for x in scales[task.every - 1 :: task.every]],
        "final_log2_scale": math.log2(jamp.get_loss_scale(carry)),
        "seconds_per_step": _digits(np.median(seconds[1:])),  # the first compiles
    }


def _digits(x: Any) -> float | None:
    """Five significant digits; None for what is not finite."""
    return float(f"{x:.5g}") if math.isfinite(x) else None
