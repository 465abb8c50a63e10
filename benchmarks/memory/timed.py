"""Time and temporary memory of gradients at several memory budgets on a CPU: five processes a model.

    python -m benchmarks.memory.timed --json docs/benchmarks/budget_cpu.json

A step is the gradient and an update of the parameters in place. Models are in float32, beside the plain gradient and
`jax.checkpoint` around each block. The baseline is timed twice (A/A). Layers are in a loop: of layers that are not,
XLA:CPU takes out the barriers of what is computed again, by hand and by jamp. Temporary memory is the one buffer that
XLA allocates for a call. `python -m benchmarks.gpu` times such gradients on a GPU.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import jamp
from benchmarks import models
from benchmarks.memory import llama
from benchmarks.models import Shape
from benchmarks.record import Rows, parser, record, write
from benchmarks.timing import Case, across, compare

Model = tuple[Any, Shape, int]  # its module, its shape and its batch
MODELS: dict[str, Model] = {
    "GPT, 6 layers of 256, 4 x 256": (models, Shape(6, 256, 8, 1024, 256), 4),
    "Llama, 6 layers of 256, 4 x 256": (llama, Shape(6, 256, 8, 1024, 256), 4),
    "ViT, 6 layers of 256, 8 x 196": (models, Shape(6, 256, 8, 1000, 196, 16), 8),
}


def ways_of(loss: Any) -> dict[str, Any]:
    ways = {"gradient": loss, "gradient, again": loss}
    ways["jax.checkpoint around each block"] = partial(loss, policy=jax.checkpoint_policies.nothing_saveable)
    ways |= {f"recompute, budget {budget}": jamp.recompute(loss, budget) for budget in (1.0, 0.5, 0.1, 0)}
    in_8_bits = {b: jamp.recompute(loss, b, residuals=jnp.int8) for b in (1.0, 0.25)}
    return ways | {f"recompute in int8, budget {budget}": fun for budget, fun in in_8_bits.items()}


def gradients(model: str, quick: bool) -> Rows:
    """A row for each way to compute the gradient of a model, its first the baseline."""
    module, shape, batch = MODELS[model]
    if quick:
        shape, batch = replace(shape, layers=2, width=64, heads=4, classes=128), 1
    shape = replace(shape, scanned=True)
    loss = partial(module.loss_fn, shape=shape)
    params = jax.jit(partial(module.init, shape=shape))(jax.random.key(0))
    args = models.data(jax.random.key(1), shape, batch)
    cases = [Case(name, partial(models.sgd_step, fun), params, (args,)) for name, fun in ways_of(loss).items()]
    return compare(cases, 1 if quick else 7)


def timed(names: list[str], quick: bool) -> Rows:
    """The rows of some models, each model in processes of its own."""
    rows: Rows = []
    for name in names:
        rows += across({"model": name}, gradients, name, quick, quick=quick)
    return rows


if __name__ == "__main__":
    arguments = parser("benchmarks.memory.timed", __doc__)
    arguments.add_argument("--only", nargs="*", default=list(MODELS), choices=MODELS)
    options = arguments.parse_args()
    about = record("benchmarks.memory.timed", options.quick, jax.devices()[0].device_kind)
    write(options.json, about | {"rows": timed(options.only, options.quick)})
