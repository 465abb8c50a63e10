"""Tables of the optimizer step and of whole training steps: what the compilers count, and what was timed."""

import itertools
from collections.abc import Iterable
from typing import Any

from benchmarks.record import Rows
from benchmarks.report.markdown import TITLES, names, number, origin, select, table
from benchmarks.step.peers import AGAIN
from benchmarks.step.update import SAME, SKIPPED
from benchmarks.timing import cell, is_again

FIRST = (
    "optax",
    "jamp",
    "jamp.GradScaler, unscales too",
    "lax.cond by hand",
    "where by hand",
    "flax DynamicScale recipe",
    "optax.apply_if_finite",
)
Found = dict[tuple[str, Any], dict[str, Any]]


def optimizers_in(rows: Rows) -> list[str]:
    return [name for name in TITLES if name in names(rows, "optimizer")]


def at(rows: Rows, label: str = "optimizer") -> Found:
    """The rows by their name and another label."""
    return {(row["name"], row[label]): row for row in rows}


def cells(found: Found, name: str, columns: list[Any]) -> list[str]:
    return [cell(found.get((name, column))) for column in columns]


def plain(found: Found, columns: list[Any], key: str = "milliseconds") -> list[str]:
    """A measure of plain Optax."""
    return [number(found["optax", column][key]) for column in columns]


def limits(found: Found, columns: list[str]) -> list[str]:
    """The least that a step which may be skipped can take, where it is known."""
    return [f"{limit:.2f}" if (limit := found["jamp", column]["limit_ratio"]) else "" for column in columns]


def pair(texts: Iterable[str]) -> str:
    return "&nbsp;/&nbsp;".join(texts)


def counted(tpu: Rows, h200: Rows) -> str:
    """What a step moves, of plain Optax's bytes, and its kernels, TPU v5e / H200."""
    columns, on = list(TITLES)[:3], (at(tpu), at(h200))
    header = [f"{TITLES[column]}, {what}" for column in columns for what in ("bytes", "kernels")]
    body = []
    for name in FIRST:
        rows = [[found[name, column] for found in on] for column in columns]
        moved = [pair(f"{row['bytes_ratio']:.2f}" for row in both) for both in rows]
        kernels = [pair(str(row["kernels"]) for row in both) for both in rows]
        body.append([name, *itertools.chain(*zip(moved, kernels, strict=True))])
    return table(["TPU v5e / H200", *header], body)


def largest(rows: Rows) -> Rows:
    """At 40 leaves, of each optimizer the size at which most libraries were timed; float32 gradients."""
    rows = select(rows, leaves=40, grads="float32")
    sizes = [(row["optimizer"], row["millions"]) for row in rows if "framework" not in row]
    best = {name: max((s for s in sizes if s[0] == name), key=lambda s: (sizes.count(s), s)) for name, _ in sizes}
    return [row for row in rows if (row["optimizer"], row["millions"]) == best[row["optimizer"]]]


def step(rows: Rows) -> str:
    """Every library and optimizer, at the largest size at which all were timed."""
    shown = largest(rows)
    columns, found = optimizers_in(shown), at(shown)
    body = [["parameters, millions", *plain(found, columns, "millions")], ["plain Optax, ms", *plain(found, columns)]]
    body.append(["**one extra read**", *limits(found, columns)])
    for name in names(shown):
        own = next((row["framework"] for row in shown if row["name"] == name and "framework" in row), "")
        if name not in ("optax", own, f"{own}, again", "jamp, NoOpLossScale", SKIPPED, *SAME):
            label = "plain Optax again (A/A)" if name == AGAIN else f"{name} (beside plain {own})" if own else name
            body.append([label, *cells(found, name, columns)])
    return table(["", *map(TITLES.get, columns)], body)


def train(rows: Rows) -> str:
    """How many training steps were timed. The picture shows them."""
    return f"{len(rows)} rows with their ranges are in [train.json](train.json)."


CUDNN = ", cuDNN's attention"


def models(rows: Rows) -> str:
    """Time of gradients on a GPU beside the model by hand, and their temporary memory, by model and attention."""
    found = {
        (row["model"], row["name"]): row for row in rows if not row["name"].startswith("casts") and not is_again(row)
    }
    kernels = [
        (model, end) for model in names(rows, "model") for end in ("", CUDNN) if (model, "by hand" + end) in found
    ]

    def cells_of(way: str) -> list[str]:
        of = [found.get((model, way + end)) for model, end in kernels]
        return [f"{row['ratio']:.2f}, {number(row['temporary_megabytes'] / 1e3)} GB" if row else "" for row in of]

    base = [number(found[model, "by hand"]["milliseconds"]) for model, _ in kernels]
    ways = dict.fromkeys(name.removesuffix(CUDNN) for _, name in found)
    head = ["", *(model.rpartition(", ")[0] + end for model, end in kernels)]
    return table(head, [["by hand, ms", *base], *([way, *cells_of(way)] for way in ways)])


def imports(rows: Rows) -> str:
    all_of_it, extend = (round(rows[0][name]) for name in ("milliseconds", "jax_extend_milliseconds"))
    return f"`import jamp` after `import optax` takes {all_of_it} ms, of which {extend} ms load `jax.extend`."


def fit(found: dict[str, Any]) -> str:
    """What a training step holds on the device and on the host, in GB."""
    head = ["", "state, GB", "temporary, GB", "together, GB", "on the host, GB"]
    body = []
    for row in found["rows"]:
        sizes = row["state_gigabytes"], row["temporary_gigabytes"]
        body.append([row["name"], *(f"{x:.2f}" for x in (*sizes, sum(sizes), row["host_gigabytes"]))])
    return f"{table(head, body)}\n\n{origin(found)}"


BY_HAND = {
    "by hand": "by hand",
    "by hand, dots_saveable": "dots saveable",
    "by hand, dots_with_no_batch_dims": "dots, no batch dims",
    "by hand, each block again": "each block again",
}
BUDGETS = tuple(f"budget {budget}" for budget in ("1.0", "0.5", "0.25", "0.1", "0"))


def budgets(h200: dict[str, Any], tpu: dict[str, Any]) -> str:
    """Temporary memory in GB by hand and at several memory budgets, with the FLOPs where they are more."""
    body = []
    for device, found in (("H200", h200), ("v5e", tpu)):
        for model in names(found["rows"], "model"):
            name, *rest = model.split(", ")
            form = [f"{device}: {name}", *(part for part in rest if part in ("unrolled", "cuDNN's attention"))]
            rows = {row["variant"]: row for row in select(found["rows"], model=model)}
            body.append([", ".join(form), *memory(rows, *BY_HAND, *(f"autocast, {x}" for x in BUDGETS))])
            for way in ("float32", "bfloat16 by hand"):
                if any(cells := memory(rows, *(f"{way}, {x}" for x in BUDGETS))):
                    body.append([", ".join([*form, f"`recompute` in {way}"]), *[""] * len(BY_HAND), *cells])
    return "\n\n".join([table(["", *BY_HAND.values(), *BUDGETS], body), origin(h200), origin(tpu)])


def memory(rows: dict[str, Any], *variants: str) -> list[str]:
    """The temporary memory of variants in GB, with the FLOPs, divided by those of the model by hand, if more."""
    cells = []
    for row in map(rows.get, variants):
        flops = row["gigaflops"] / rows["by hand"]["gigaflops"] if row else 1
        again = f" ({flops:.2f})" if flops > 1.005 else ""
        cells.append(number(row["temporary_megabytes"] / 1e3) + again if row else "")
    return cells


def budgets_timed(found: dict[str, Any]) -> str:
    """Time and temporary memory of gradients at several memory budgets on a CPU, beside those of the plain gradient."""
    rows = {(row["model"], row["name"]): row for row in found["rows"]}
    models, (plain, *ways) = names(found["rows"], "model"), names(found["rows"], "name")
    memory = lambda model, way: rows[model, way]["temporary_megabytes"] / rows[model, plain]["temporary_megabytes"]
    body = [[way, *(f"{cell(rows[model, way])}, {memory(model, way):.2f}" for model in models)] for way in ways]
    head = [
        "time and temporary memory, divided by the plain gradient's",
        *(model.partition(",")[0] for model in models),
    ]
    return f"{table(head, body)}\n\n{origin(found)}"
