"""The optimizer step, `tx.update` and `apply_updates`, on true gradients: plain Optax, jamp and its peers."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jamp
from benchmarks.ahead_of_time import compile_for, in_shapes
from benchmarks.record import Rows
from benchmarks.step import peers
from benchmarks.timing import Case, across, compare

OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "adamw": lambda: optax.adamw(1e-3),
    "sgd momentum": lambda: optax.sgd(1e-3, momentum=0.9),
    "clip + adamw": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    "adafactor": lambda: optax.adafactor(1e-3),
    "muon": lambda: optax.contrib.muon(1e-3),
}
SCALED = ("adamw", "sgd momentum", "clip + adamw")
SKIPPED = "jamp, every step skipped"


class Table(NamedTuple):
    """What is compared at one size."""

    optimizer: str
    leaves: int
    width: int
    names: tuple[str, ...] = ()
    rounds: int = 9
    grads: str = "float32"


ALL = (*peers.JAX, SKIPPED)
SAME = ("jamp.linen", "jamp.nnx", "jmp recipe", "mpx recipe")  # compile to nearly what another does: timed for AdamW
MOST = tuple(name for name in ALL if name not in SAME)
FEW = ("optax", peers.AGAIN, "jamp", "lax.cond by hand")
HALF = ("optax", peers.AGAIN, "jamp", "jamp with masters, half parameters")
TABLES = [
    Table("adamw", 40, 1024, ALL),
    *(Table(name, 40, 1024, MOST) for name in (*SCALED[1:], "adafactor")),
    Table("muon", 40, 256, FEW, 5),  # 1.3 M: five iterations of matrix products a leaf
    *(Table(name, 40, 512, FEW) for name in SCALED),  # 5 M
    Table("adamw", 40, 2240, FEW, 5),  # 100 M
    *(Table("adamw", leaves, width, FEW) for leaves, width in ((10, 1024), (1000, 100))),  # 5 M
    *(Table("adamw", 40, 1024, HALF, 9, dtype) for dtype in ("float16", "bfloat16")),
]
QUICK = [
    Table("adamw", 4, 16, ALL, 1),
    *(Table(name, 4, 16, FEW, 1) for name in OPTIMIZERS if name != "adamw"),
    Table("adamw", 4, 16, HALF, 1, "float16"),
]


def step(quick: bool) -> Rows:
    """Every table, each in processes of its own."""
    there = [*peers.installed(peers.JAX), SKIPPED, HALF[-1]]
    rows: Rows = []
    for table in QUICK if quick else TABLES:
        table = table._replace(names=tuple(name for name in table.names if name in there))
        labels = {"optimizer": table.optimizer, **size(table.leaves, table.width), "grads": table.grads}
        rows += across(labels, measure, table, quick=quick)
    return [row | {"limit_ratio": limit_ratio(row["optimizer"], row["name"])} for row in rows]


def measure(table: Table) -> Rows:
    """A row for each name, in this process."""
    make = cases if table.grads == "float32" else half_cases
    return compare(make(table), table.rounds)


def ahead(target: str, quick: bool) -> Rows:
    """Each optimizer's step by each library at 100 M parameters, more than a chip's caches hold, in 40 leaves."""
    leaves, width = (4, 16) if quick else (40, 2240)
    names = [name for name in peers.installed(peers.JAX) if name != peers.AGAIN]
    rows = []
    for optimizer in SCALED[:1] if quick else OPTIMIZERS:
        labels = {"optimizer": optimizer, **size(leaves, width)}
        print(f"\n{optimizer}")
        for row in compile_for(target, (shapes(name, optimizer, leaves, width) for name in names)):
            rows.append(labels | row | {"limit_ratio": limit_ratio(optimizer, row["name"])})
    return rows


def size(leaves: int, width: int) -> dict[str, float]:
    return {"leaves": leaves, "millions": leaves // 2 * width * (width + 1) / 1e6}


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


def cases(table: Table) -> list[Case]:
    """One case a library; the gradients are finite, as in nearly every step, but for `SKIPPED`."""
    params = parameters(table.leaves, table.width)
    gradients = {scale: like(params, 1e-3 * scale) for scale in (1.0, peers.SCALE)}
    found = []
    for name in table.names:
        recipe = peers.JAX["jamp" if name == SKIPPED else name](OPTIMIZERS[table.optimizer](), params)
        grads = like(params, np.inf) if name == SKIPPED else gradients[recipe.scale]
        found.append(Case(name, recipe.step, recipe.carry, (grads,)))
    return found


def half_cases(table: Table) -> list[Case]:
    """Gradients of 16 bits, which the baseline makes float32 by hand as jamp does by itself."""
    params, half = (parameters(table.leaves, table.width, dtype) for dtype in ("float32", table.grads))
    grads, tx = like(half, 1e-3), OPTIMIZERS[table.optimizer]()
    plain = peers.plain(tx, params)
    base = plain._replace(step=lambda carry, grads: plain.step(carry, jamp.cast_floating(grads, jnp.float32)))
    recipes = base, base, peers.loss_scaled(tx, params), peers.plain(jamp.loss_scaled(jamp.master_params(tx)), half)
    return [Case(name, recipe.step, recipe.carry, (grads,)) for name, recipe in zip(HALF, recipes, strict=True)]


def like(params: Any, value: float) -> Any:
    return jax.tree.map(lambda p: jnp.full(p.shape, value, p.dtype), params)


def shapes(name: str, optimizer: str, leaves: int, width: int) -> Case:
    """A case of shapes instead of arrays, for a compiler."""

    def make() -> Case:
        params = parameters(leaves, width)
        recipe = peers.JAX[name](OPTIMIZERS[optimizer](), params)
        return Case(name, recipe.step, recipe.carry, (params,))

    return in_shapes(make)
