"""How the accuracy study computes: the dtypes, the loss scales, and where these start."""

import math
from dataclasses import dataclass

import jax.numpy as jnp
from jax.typing import DTypeLike

import jamp
from benchmarks.accuracy.tasks import Loss, Task, cross_entropy

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
    micro_batches: int | None = None  # None: the task's
    starts: tuple[str, ...] = ("default",)  # of the loss scale, from STARTS

    def make_loss(self, task: Task) -> Loss:
        policies = (jamp.Policy(jnp.float32, dtype, dtype) for dtype in (self.body, self.head))
        loss = task.make_loss(*policies, jamp.full_precision(cross_entropy) if self.full_loss else cross_entropy)
        return jamp.autocast(loss) if self.autocast else loss


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
STARTS = {"default": None, "too high": 2.0**40, "too low": 1.0}
BAD = tuple(STARTS)[1:]
BAD_STARTS = [
    Setup("dynamic, interval 2000", loss_scale=jamp.DynamicLossScale(max_scale=math.inf), starts=BAD),
    Setup("dynamic, interval 20", loss_scale=jamp.DynamicLossScale(growth_interval=20, max_scale=math.inf), starts=BAD),
    Setup("adaptive, 20 to 1000", loss_scale=jamp.AdaptiveLossScale(), starts=BAD),
]
