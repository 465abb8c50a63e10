"""Loss scaling where the optimizers are not Optax's, each beside its own plain step: Keras 3 on JAX, and PyTorch."""

import os
import time
from collections.abc import Callable

import jax
import numpy as np

from benchmarks.record import Rows
from benchmarks.timing import Case, compare, paired

os.environ.setdefault("KERAS_BACKEND", "jax")  # before keras is imported


def keras_on_jax(optimizer: str, params: dict[str, jax.Array], rounds: int) -> Rows:
    """A step as Keras's trainer jits it: `stateless_apply`, everything donated."""
    import keras

    def case(name: str, scale: float) -> Case:
        momentum, clip = {"momentum": 0.9}, {"global_clipnorm": 1.0} if optimizer == "clip + adamw" else {}
        adamw, sgd = keras.optimizers.AdamW, keras.optimizers.SGD
        tx = sgd(1e-3, **momentum) if optimizer == "sgd momentum" else adamw(1e-3, **clip)
        if scale != 1.0:
            tx = keras.mixed_precision.LossScaleOptimizer(tx, initial_scale=scale)
        variables = [keras.Variable(p.copy()) for p in params.values()]
        tx.build(variables)
        grads = [jax.numpy.full(p.shape, 1e-3 * scale) for p in params.values()]
        carry = [v.value for v in variables], [v.value for v in tx.variables]
        return Case(name, lambda carry, grads: tx.stateless_apply(carry[1], grads, carry[0]), carry, (grads,))

    scales = {"keras": 1.0, "keras, again": 1.0, "keras LossScaleOptimizer": 2.0**15}  # Keras's initial scale
    return compare([case(name, scale) for name, scale in scales.items()], rounds)


def torch_on_cpu(optimizer: str, params: dict[str, jax.Array], rounds: int) -> Rows:
    import torch

    torch.set_num_threads(os.cpu_count() or 1)  # as XLA:CPU
    names = {"torch": False, "torch, again": False, "torch.amp.GradScaler": True}
    times = paired({name: torch_step(optimizer, params, scaled) for name, scaled in names.items()}, rounds)
    median = lambda x: float(np.median(x))
    ratios = {name: (1e3 * median(t), median(t / times["torch"])) for name, t in times.items()}
    return [{"name": name, "milliseconds": t, "ratio": ratio} for name, (t, ratio) in ratios.items()]


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
