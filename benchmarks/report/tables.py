"""Tables of what the compilers count, and of what was timed."""

import itertools
from collections.abc import Iterable
from typing import Any

from benchmarks.record import Rows
from benchmarks.report.markdown import TITLES, names, number, select, table
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
GPT, CUDNN = "GPT-2 124 M, 8 x 1024", ", cuDNN's attention"
Found = dict[tuple[str, Any], dict[str, Any]]


def at(rows: Rows) -> Found:
    """The rows by their name and their optimizer."""
    return {(row["name"], row["optimizer"]): row for row in rows}


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
    # Older results have rows of other frameworks, beside their own baselines.
    rows = [row for row in select(rows, leaves=40, grads="float32") if "framework" not in row]
    sizes = [(row["optimizer"], row["millions"]) for row in rows]
    best = {name: max((s for s in sizes if s[0] == name), key=lambda s: (sizes.count(s), s)) for name, _ in sizes}
    return [row for row in rows if (row["optimizer"], row["millions"]) == best[row["optimizer"]]]


def step(rows: Rows) -> str:
    """Every library and optimizer, at the largest size at which all were timed."""
    shown = largest(rows)
    columns, found = [name for name in TITLES if name in names(shown, "optimizer")], at(shown)
    plain = lambda key: [number(found["optax", column][key]) for column in columns]
    limits = (found["jamp", column]["limit_ratio"] for column in columns)  # None where it is not known
    body = [["parameters, millions", *plain("millions")], ["plain Optax, ms", *plain("milliseconds")]]
    body.append(["**one extra read**", *(f"{limit:.2f}" if limit else "" for limit in limits)])
    for name in names(shown):
        if name not in ("optax", "jamp, NoOpLossScale", SKIPPED, *SAME):
            cells = (cell(found.get((name, column))) for column in columns)
            body.append(["plain Optax again (A/A)" if name == AGAIN else name, *cells])
    return table(["", *map(TITLES.get, columns)], body)


def models(rows: Rows) -> str:
    """Time of gradients on a GPU beside the model by hand, and their temporary memory, by model and attention."""
    found = {(row["model"], row["name"]): row for row in rows if not is_again(row)}
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


def facts(rows: Rows) -> str:
    """The time and the temporary memory of a step of GPT-2 on a GPU, by the way and by the attention."""
    found = {row["name"]: row for row in select(rows, model=GPT)}
    ways = {
        "float32": "float32",
        "bfloat16 by hand": "by hand",
        "by hand, `dots_saveable` policy": "by hand, dots_saveable",
        "by hand, a checkpoint around each block": "by hand, each block again",
        "autocast (budget 1.0)": "autocast, budget 1.0",
        "with `memory_budget=0.5`": "autocast, budget 0.5",
        "with `memory_budget=0.1`": "autocast, budget 0.1",
    }

    def cell_of(name: str) -> str:
        row = found.get(name)
        return f"{row['milliseconds']:.1f} ms, {row['temporary_megabytes'] / 1e3:.1f} GB" if row else ""

    head = [
        "Time and temporary memory of a gradient and SGD update of GPT-2 (124 M, 8 x 1024 tokens)",
        "attention written out",
        "cuDNN's attention, in bfloat16",
    ]
    return table(head, [[way, cell_of(name), cell_of(name + CUDNN)] for way, name in ways.items()])


BY_HAND = {
    "by hand": "by hand",
    "by hand, dots_saveable": "dots saveable",
    "by hand, dots_with_no_batch_dims": "dots, no batch dims",
    "by hand, each block again": "each block again",
}
BUDGETS = tuple(f"budget {budget}" for budget in ("1.0", "0.5", "0.25", "0.1", "0"))


def budgets(h200: Rows, tpu: Rows) -> str:
    """Temporary memory in GB by hand and at several memory budgets, with the FLOPs where they are more."""
    body = []
    for device, found in (("H200", h200), ("v5e", tpu)):
        for model in names(found, "model"):
            name, *rest = model.split(", ")
            form = [f"{device}: {name}", *(part for part in rest if part in ("unrolled", "cuDNN's attention"))]
            rows = {row["variant"]: row for row in select(found, model=model)}
            body.append([", ".join(form), *memory(rows, *BY_HAND, *(f"autocast, {x}" for x in BUDGETS))])
            for way in ("float32", "bfloat16 by hand"):
                if any(cells := memory(rows, *(f"{way}, {x}" for x in BUDGETS))):
                    body.append([", ".join([*form, f"`recompute` in {way}"]), *[""] * len(BY_HAND), *cells])
    return table(["", *BY_HAND.values(), *BUDGETS], body)


def memory(rows: dict[str, Any], *variants: str) -> list[str]:
    """The temporary memory of variants in GB, with the FLOPs, divided by those of the model by hand, if more."""
    cells = []
    for row in map(rows.get, variants):
        flops = row["gigaflops"] / rows["by hand"]["gigaflops"] if row else 1
        again = f" ({flops:.2f})" if flops > 1.005 else ""
        cells.append(number(row["temporary_megabytes"] / 1e3) + again if row else "")
    return cells
