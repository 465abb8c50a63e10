"""The optimizer step, `tx.update` and `apply_updates`, on true gradients: plain Optax, jamp and its peers."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jamp
from benchmarks import frameworks, peers
from benchmarks.timing import Case, compare

Rows = list[dict[str, Any]]
OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "adamw": lambda: optax.adamw(1e-3),
    "sgd momentum": lambda: optax.sgd(1e-3, momentum=0.9),
    "clip + adamw": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    "adafactor": lambda: optax.adafactor(1e-3),
    "muon": lambda: optax.contrib.muon(1e-3),
}
SKIPPED = "jamp, every step skipped"


class Table(NamedTuple):
    """What is compared at one size."""

    optimizer: str
    leaves: int
    width: int
    names: tuple[str, ...]
    rounds: int = 15
    tries: int = 3  # of compiling


ALL = tuple(peers.JAX)
FEW = ("optax", "jamp", "jamp, NoOpLossScale", "optax.apply_if_finite", "flax DynamicScale recipe")
# XLA:CPU copies the predicates of flax's, jmp's and mpx's recipes into every fusion: with 1000 leaves it takes more
# than 6 minutes and 10 GB to compile them.
MANY = FEW[:3]
SCALED = ("adamw", "sgd momentum", "clip + adamw")
TABLES = [
    *(Table(name, 40, 1024, (*ALL, SKIPPED)) for name in (*SCALED, "adafactor")),
    Table("muon", 40, 256, (*ALL, SKIPPED), 7, 1),  # 1.3 M: five iterations of matrix products a leaf
    *(Table(name, 40, width, FEW, 15, 1) for width in (224, 512) for name in SCALED),  # 1 and 5 M
    *(Table(name, 40, 2240, ("optax", "jamp"), 5, 1) for name in SCALED),  # 100 M
    *(Table(name, 10, 1024, FEW, 15, 1) for name in SCALED),  # 5 M, as all that follow
    *(Table(name, 100, 320, FEW, 15, 1) for name in SCALED),
    *(Table(name, 1000, 100, MANY, 15, 1) for name in SCALED),
    *(Table(name, 4000, 50, ("optax", "jamp"), 9, 1) for name in ("adamw", "sgd momentum")),
]
QUICK = [
    Table("adamw", 4, 16, (*ALL, SKIPPED), 1, 1),
    *(Table(name, 4, 16, ("optax", "jamp"), 1, 1) for name in OPTIMIZERS if name != "adamw"),
]


def step(quick: bool) -> Rows:
    """Every table, the gradients of 16 bits, and the frameworks with optimizers of their own."""
    there = peers.installed(peers.JAX)
    rows = []
    for table in QUICK if quick else TABLES:
        names = [name for name in table.names if name in there or name == SKIPPED]
        found = cases(table.optimizer, table.leaves, table.width, names)
        labels = {"optimizer": table.optimizer, **size(table.leaves, table.width), "grads": "float32"}
        rows += report(compare(found, table.rounds, table.tries), labels)
    leaves, width = (4, 16) if quick else (40, 1024)
    for dtype in (jnp.float16,) if quick else (jnp.float16, jnp.bfloat16):
        labels = {"optimizer": "adamw", **size(leaves, width), "grads": jnp.dtype(dtype).name}
        rows += report(compare(half_cases(leaves, width, dtype), 1 if quick else 15, 1 if quick else 3), labels)
    for framework, compared in frameworks.available().items():
        for optimizer in SCALED[:1] if quick else SCALED:
            labels = {"optimizer": optimizer, **size(leaves, width), "grads": "float32", "framework": framework}
            rows += report(compared(optimizer, parameters(leaves, width), 1 if quick else 15), labels)
    return rows


def size(leaves: int, width: int) -> dict[str, float]:
    return {"leaves": leaves, "millions": leaves // 2 * width * (width + 1) / 1e6}


def report(results: Iterable[Any], labels: dict[str, Any]) -> Rows:
    print("\n{optimizer}, {millions:.3g} M parameters in {leaves} leaves, {grads} gradients".format(**labels))
    rows = []
    for result in results:
        print(result.row(), flush=True)
        limit = {"limit_ratio": limit_ratio(labels["optimizer"], result.name)}
        rows.append(labels | result.as_dict() | limit)
    return rows


def limit_ratio(optimizer: str, name: str) -> float | None:
    """Arrays moved beside plain: a step that may be skipped must have read all gradients before it writes any."""
    # Read: gradients, parameters, moments (for a clipped step the gradients twice); written: parameters and moments.
    moved = {"adamw": 7, "sgd momentum": 5, "clip + adamw": 8}
    if optimizer not in moved:
        return None
    again = name not in peers.UNCHECKED and optimizer != "clip + adamw"
    return (moved[optimizer] + again) / moved[optimizer]


def parameters(leaves: int, width: int, dtype: Any = jnp.float32) -> dict[str, jax.Array]:
    """Half the leaves are square matrices, half are biases, as in a stack of dense layers."""
    matrices = {f"w{i}": jnp.full((width, width), 0.01, dtype) for i in range(leaves // 2)}
    return matrices | {f"b{i}": jnp.zeros((width,), dtype) for i in range(leaves // 2)}


def cases(optimizer: str, leaves: int, width: int, names: Iterable[str] = ALL) -> list[Case]:
    """One case a library; the gradients are finite, as in nearly every step, but for `SKIPPED`."""
    params = parameters(leaves, width)
    gradients = {scale: like(params, 1e-3 * scale) for scale in (1.0, peers.SCALE)}
    found = []
    for name in names:
        recipe = peers.JAX["jamp" if name == SKIPPED else name](OPTIMIZERS[optimizer](), params)
        grads = like(params, np.inf) if name == SKIPPED else gradients[recipe.scale]
        found.append(Case(name, recipe.step, recipe.carry, (grads,)))
    return found


def half_cases(leaves: int, width: int, dtype: Any) -> list[Case]:
    """AdamW on gradients of 16 bits, which the baseline makes float32 by hand as jamp does by itself."""
    params, half = parameters(leaves, width), parameters(leaves, width, dtype)
    grads = like(half, 1e-3)
    tx = optax.adamw(1e-3)
    base = peers.plain(tx, params)
    found = {"jamp": peers.loss_scaled(tx, params)}
    found["jamp.mixed_precision, half parameters"] = peers.plain(jamp.mixed_precision(tx), half)
    widened = lambda carry, grads: base.step(carry, jamp.cast_floating(grads, jnp.float32))
    return [
        Case("optax", widened, base.carry, (grads,)),
        *(Case(name, recipe.step, recipe.carry, (grads,)) for name, recipe in found.items()),
    ]


def like(params: Any, value: float) -> Any:
    return jax.tree.map(lambda p: jnp.full(p.shape, value, p.dtype), params)
