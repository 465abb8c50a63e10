"""Time and temporary memory of float32 gradients at several memory budgets, on this machine.

    python -m benchmarks.memory.on_cpu --json docs/benchmarks/budget_cpu.json      five processes a model

Beside them are the plain gradient, twice (A/A), and `jax.checkpoint` around each block. Layers are in a loop: of layers
that are not, XLA:CPU takes out the barriers of what is computed again, by hand and by jamp. Temporary memory is the one
buffer that XLA:CPU allocates for a call.
"""

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

# The module, the shape and the batch of each model.
MODELS: dict[str, tuple[Any, Shape, int]] = {
    "GPT, 6 layers of 256, 4 x 256": (models, Shape(6, 256, 8, 1024, 256), 4),
    "Llama, 6 layers of 256, 4 x 256": (llama, Shape(6, 256, 8, 1024, 256), 4),
    "ViT, 6 layers of 256, 8 x 196": (models, Shape(6, 256, 8, 1000, 196, 16), 8),
}
BUDGETS = (1.0, 0.5, 0.1, 0)


def gradients(model: str, quick: bool) -> Rows:
    """A case for each way to keep less. Its parameters are constant: neither time nor memory depends on them."""
    module, shape, batch = MODELS[model]
    loss, shapes, data = models.problem(module, shape, 1 if quick else batch, True)
    params, args = jax.tree.map(lambda x: jnp.full(x.shape, 0.01).astype(x.dtype), (shapes, data))
    ways = {"gradient": loss, "gradient, again": loss}
    ways["jax.checkpoint around each block"] = partial(loss, policy=jax.checkpoint_policies.nothing_saveable)
    ways |= {f"recompute, budget {budget}": jamp.recompute(loss, budget) for budget in BUDGETS}
    return compare([Case(name, partial(_step, fun), params, (args,)) for name, fun in ways.items()], 1 if quick else 7)


def _step(fun: Any, params: Any, batch: Any) -> Any:
    return jax.tree.map(lambda x, g: x - 1e-6 * g, params, jax.grad(fun)(params, batch))


if __name__ == "__main__":
    arguments = parser("benchmarks.memory.on_cpu", __doc__)
    arguments.add_argument("--only", nargs="*", default=list(MODELS), choices=MODELS)
    options = arguments.parse_args()
    about = record("benchmarks.memory.on_cpu", options.quick, "cpu")
    rows: Rows = []
    for name in options.only:
        rows += across({"model": name}, gradients, name, options.quick, quick=options.quick)
    write(options.json, about | {"rows": rows})
