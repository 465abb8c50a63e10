"""How what jamp adds to a step grows: with parameters and leaves (fitted to measured steps), and with devices.

    python -m benchmarks.growth --json growth.json     collectives of a training step on 1 to 8 devices
    python -m benchmarks.growth --fit step.json        slopes of the steps that `--only step` has measured

The devices are faked on one CPU, where they share its cores: times would say nothing, what they send does. Parameters
and optimizer state are sharded over all of them (FSDP), the batch is one sequence for each.
"""

import argparse
import json
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jamp
from benchmarks import transformer
from benchmarks.devices import collectives
from benchmarks.record import record, write

Rows = list[dict[str, Any]]
COUNTS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Growth:
    """Steps of one optimizer along `millions` of parameters or along `leaves`: f64[n] each."""

    optimizer: str
    along: str
    sizes: np.ndarray
    plain: np.ndarray  # ms
    added: np.ndarray  # ms that jamp adds
    limit: np.ndarray  # ms of what has to be read once more, at the speed at which the plain step reads and writes
    plain_seconds: np.ndarray  # of trace and compilation
    added_seconds: np.ndarray

    def line(self, what: str) -> np.ndarray:
        """Slope and intercept by least squares, each residual a share of the plain step."""
        weights = 1 / (self.plain_seconds if what.endswith("seconds") else self.plain)
        return np.polyfit(self.sizes, getattr(self, what), 1, w=weights)


def grown(rows: Rows, optimizer: str, along: str) -> Growth | None:
    """At 40 leaves along the parameters, at about 5 M parameters along the leaves; None with fewer than three sizes."""
    pairs = []
    for row in rows:
        same = row["leaves"] == 40 if along == "millions" else 4 < row["millions"] < 6
        if (row["optimizer"], row["grads"]) == (optimizer, "float32") and "framework" not in row and same:
            pairs.append(row)
    plain = {row[along]: row for row in pairs if row["name"] == "optax"}
    ours = {row[along]: row for row in pairs if row["name"] == "jamp"}
    sizes = sorted(plain.keys() & ours.keys())
    if len(sizes) < 3:
        return None
    seconds = lambda row: row["trace_seconds"] + row["compile_seconds"]
    found = [
        (
            (p := plain[size])["milliseconds"],
            p["milliseconds"] * (ours[size]["ratio"] - 1),  # the ratio is taken round by round
            p["milliseconds"] * (ours[size]["limit_ratio"] - 1),
            seconds(p),
            seconds(ours[size]) - seconds(p),
        )
        for size in sizes
    ]
    return Growth(optimizer, along, np.array(sizes, float), *np.array(found).T)


def growths(rows: Rows) -> list[Growth]:
    optimizers = dict.fromkeys(row["optimizer"] for row in rows if row.get("limit_ratio"))
    return [g for along in ("millions", "leaves") for name in optimizers if (g := grown(rows, name, along))]


def fsdp(mesh: jax.sharding.Mesh, tree: Any) -> Any:
    """Shapes, each sharded along its first dimension that the devices divide."""

    def place(x: Any) -> jax.ShapeDtypeStruct:
        whole = [i for i, n in enumerate(x.shape) if n % mesh.size == 0][:1]
        spec = PartitionSpec(*("data" if i in whole else None for i in range(x.ndim)))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(place, tree)


def compile_step(devices: int, layers: int, scaled: bool) -> Any:
    mesh = jax.make_mesh((devices,), ("data",), (AxisType.Auto,), devices=jax.devices()[:devices])
    tx = jamp.loss_scaled(optax.adamw(1e-3)) if scaled else optax.adamw(1e-3)
    loss = partial(transformer.loss_fn, heads=4)

    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        grads = (jamp.grad(loss, state) if scaled else jax.grad(loss))(params, tokens)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = jax.eval_shape(lambda: transformer.init(jax.random.key(0), layers, 64, 256, 64))
    tokens = jax.ShapeDtypeStruct((devices, 64), jnp.int32)
    shapes = fsdp(mesh, (params, jax.eval_shape(tx.init, params), tokens))
    return jax.jit(step, donate_argnums=(0, 1)).lower(*shapes).compile()


def devices(quick: bool) -> Rows:
    """Collectives and bytes of the plain step, and what jamp adds to them."""
    rows = []
    for count in COUNTS[1:2] if quick else COUNTS:
        compiled = [compile_step(count, 1 if quick else 4, scaled) for scaled in (False, True)]
        plain, ours = (collectives(c.as_text()) for c in compiled)
        size = lambda found: sum(bytes_ * n for (_, bytes_), n in found.items())
        temporary = [c.memory_analysis().temp_size_in_bytes for c in compiled]
        rows.append(
            {
                "devices": count,
                "collectives": plain.total(),
                "bytes": size(plain),
                "added_collectives": ours.total() - plain.total(),
                "added_bytes": size(ours) - size(plain),
                "temporary_megabytes": temporary[0] / 1e6,
                "added_temporary_megabytes": (temporary[1] - temporary[0]) / 1e6,
            }
        )
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.growth", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two devices, one layer")
    parser.add_argument("--fit", metavar="FILE", help="print the slopes of these results, and compile nothing")
    parser.add_argument("--json", metavar="FILE", help="write the results here too")
    options = parser.parse_args()
    if options.fit:
        with open(options.fit) as file:
            for g in growths(json.load(file)["step"]):
                slopes = {
                    what: g.line(what)[0] for what in ("plain", "added", "limit", "plain_seconds", "added_seconds")
                }
                print(g.optimizer, "along", g.along, {what: float(f"{x:.3g}") for what, x in slopes.items()})
    else:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", COUNTS[-1])
        found = {"devices": devices(options.quick)}
        write(options.json, record("benchmarks.growth", options.quick, "faked CPU devices") | found)


if __name__ == "__main__":
    main()
