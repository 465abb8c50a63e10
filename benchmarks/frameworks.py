"""Loss scaling where the optimizers are not Optax's, each beside its own plain step: Keras 3 on JAX, and PyTorch."""

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np

from benchmarks.timing import Case, Result, compare, paired, ratio

SCALE = 2.0**15  # Keras's initial scale
Compared = Callable[[str, dict[str, jax.Array], int], list[Any]]


def available() -> dict[str, Compared]:
    """The comparison of each framework that is installed; of the others a line is printed."""
    os.environ.setdefault("KERAS_BACKEND", "jax")
    found: dict[str, Compared] = {}
    for name, compared in (("keras", keras_on_jax), ("torch", torch_on_cpu)):
        try:
            __import__(name)
            found[name] = compared
        except ImportError as error:
            print(f"left out: {name} ({error})")
    return found


def keras_on_jax(optimizer: str, params: dict[str, jax.Array], rounds: int) -> list[Result]:
    cases = [keras_case(optimizer, params, scaled) for scaled in (False, True)]
    return compare(cases, rounds)


def keras_case(optimizer: str, params: dict[str, jax.Array], scaled: bool) -> Case:
    """A step as Keras's trainer jits it: `stateless_apply`, everything donated."""
    import keras

    optimizers = {
        "adamw": lambda: keras.optimizers.AdamW(1e-3),
        "sgd momentum": lambda: keras.optimizers.SGD(1e-3, momentum=0.9),
        "clip + adamw": lambda: keras.optimizers.AdamW(1e-3, global_clipnorm=1.0),
    }
    tx = optimizers[optimizer]()
    if scaled:
        tx = keras.mixed_precision.LossScaleOptimizer(tx, initial_scale=SCALE)
    variables = [keras.Variable(p.copy()) for p in params.values()]
    tx.build(variables)

    def step(carry: Any, grads: Any) -> Any:
        params, state = carry
        return tx.stateless_apply(state, grads, params)

    grads = [jax.numpy.full(p.shape, 1e-3 * (SCALE if scaled else 1.0)) for p in params.values()]
    carry = [v.value for v in variables], [v.value for v in tx.variables]
    return Case("keras LossScaleOptimizer" if scaled else "keras", step, carry, (grads,))


@dataclass(frozen=True)
class Timed:
    """A result of what is not compiled."""

    name: str
    milliseconds: float
    ratio: float
    ratio_low: float
    ratio_high: float

    def row(self) -> str:
        return (
            f"{self.name:32s} {self.milliseconds:9.2f} ms   x {self.ratio:5.3f}"
            f" ({self.ratio_low:.3f}-{self.ratio_high:.3f})"
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def torch_on_cpu(optimizer: str, params: dict[str, jax.Array], rounds: int) -> list[Timed]:
    import torch

    torch.set_num_threads(os.cpu_count() or 1)  # as XLA:CPU
    calls = {name: torch_step(optimizer, params, "GradScaler" in name) for name in ("torch", "torch.amp.GradScaler")}
    times = paired(calls, rounds)
    return [Timed(name, float(np.median(found) * 1e3), *ratio(found, times["torch"])) for name, found in times.items()]


def torch_step(optimizer: str, params: dict[str, jax.Array], scaled: bool) -> Callable[[], float]:
    """A step in place, fused, torch's fastest; with `scaled` as in its "Automatic Mixed Precision examples"."""
    import torch

    weights = [torch.from_numpy(np.array(p)).requires_grad_() for p in params.values()]
    sgd = optimizer == "sgd momentum"
    make = torch.optim.SGD if sgd else torch.optim.AdamW
    tx = make(weights, lr=1e-3, fused=True, **({"momentum": 0.9} if sgd else {}))
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    scaler.scale(torch.ones(()))  # of the loss; it makes the scaler's tensors
    for w in weights:
        w.grad = torch.empty_like(w)

    def run() -> float:
        for w in weights:  # what the backward pass does; unscaling is in place
            w.grad.fill_(1e-3 * scaler.get_scale())
        start = time.perf_counter()
        if optimizer == "clip + adamw":
            scaler.unscale_(tx)
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
        scaler.step(tx)
        scaler.update()
        return time.perf_counter() - start

    return run
