"""Loss scaling where the optimizers are not Optax's, each beside its own plain step: Keras 3 on JAX, and PyTorch."""

import os
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import jax
import numpy as np

from benchmarks.record import Rows
from benchmarks.timing import Case, compare, paired

os.environ.setdefault("KERAS_BACKEND", "jax")  # before keras is imported
SCALE = 2.0**15  # Keras's initial scale


def keras_on_jax(optimizer: str, params: dict[str, jax.Array], rounds: int) -> Rows:
    names = {"keras": False, "keras, again": False, "keras LossScaleOptimizer": True}
    cases = [keras_case(name, optimizer, params, scaled) for name, scaled in names.items()]
    return compare(cases, rounds)


def keras_case(name: str, optimizer: str, params: dict[str, jax.Array], scaled: bool) -> Case:
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
    return Case(name, step, carry, (grads,))


def torch_on_cpu(optimizer: str, params: dict[str, jax.Array], rounds: int) -> Rows:
    import torch

    torch.set_num_threads(os.cpu_count() or 1)  # as XLA:CPU
    names = {"torch": False, "torch, again": False, "torch.amp.GradScaler": True}
    calls = {name: torch_step(optimizer, params, scaled) for name, scaled in names.items()}
    times = paired(calls, rounds)
    return [
        {"name": name, "milliseconds": float(np.median(t) * 1e3), "ratio": float(np.median(t / times["torch"]))}
        for name, t in times.items()
    ]


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


FRAMEWORKS: dict[str, Callable[[str, dict[str, jax.Array], int], Rows]] = {"keras": keras_on_jax, "torch": torch_on_cpu}


def installed() -> list[str]:
    """Those of `FRAMEWORKS` that are there."""
    return [name for name in FRAMEWORKS if find_spec(name)]
