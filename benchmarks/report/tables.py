"""Tables of what the compilers count, and of what was timed."""

from collections.abc import Callable
from typing import Any, TypeGuard

import numpy as np

from benchmarks.accuracy.intervals import interval
from benchmarks.record import Rows
from benchmarks.report.markdown import TITLES, names, number, select, table
from benchmarks.step.peers import AGAIN
from benchmarks.step.update import SAME, SKIPPED
from benchmarks.timing import cell, is_again

CUDNN = ", cuDNN's attention"
Found = dict[tuple[str, Any], dict[str, Any]]


def at(rows: Rows) -> Found:
    """The rows by their name and their optimizer."""
    return {(row["name"], row["optimizer"]): row for row in rows}


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
    body.append(["one more read of the gradients, by bytes", *(f"{limit:.2f}" if limit else "" for limit in limits)])
    for name in names(shown):
        if name not in ("optax", "jamp, NoOpLossScale", SKIPPED, *SAME):
            cells = (cell(found.get((name, column))) for column in columns)
            body.append(["plain Optax again (A/A)" if name == AGAIN else name, *cells])
    return table(["", *map(TITLES.get, columns)], body)


def is_timed(row: dict[str, Any] | None) -> TypeGuard[dict[str, Any]]:
    """False where a program was not measured, or did not compile."""
    return row is not None and "milliseconds" in row


def gigabytes(row: dict[str, Any]) -> str:
    return f"{number(row['temporary_gigabytes'])} GB"


def time_and_memory(row: dict[str, Any] | None) -> str:
    return f"{row['milliseconds']:.1f}&nbsp;ms, {row['temporary_gigabytes']:.1f}&nbsp;GB" if is_timed(row) else ""


WAYS = {
    "float32": "float32",
    "by hand": "bfloat16 by hand",
    "by hand, dots_saveable": "by hand, `dots_saveable` policy",
    "by hand, each block again": "by hand, a checkpoint around each block",
    "autocast, budget 1.0": "autocast (budget 1.0)",
    "autocast, budget 0.5": "with `memory_budget=0.5`",
    "autocast, budget 0.1": "with `memory_budget=0.1`",
}


def models(rows: Rows) -> str:
    """Time and temporary memory of a gradient and an update on a GPU, by the way, the model and the attention."""
    found = {(row["model"], row["name"]): row for row in rows if not is_again(row)}
    columns = [
        (model, end) for model in names(rows, "model") for end in ("", CUDNN) if (model, "by hand" + end) in found
    ]
    head = ["", *(model.rpartition(", ")[0] + end for model, end in columns)]
    body = [
        [title, *(time_and_memory(found.get((model, way + end))) for model, end in columns)]
        for way, title in WAYS.items()
    ]
    return table(head, body)


def by_card(head: str, ways: dict[str, str], cards: dict[str, Rows], cell_of: Callable[..., str]) -> str:
    """A row for each way that was measured, a column for each card. The first way is the baseline of all.

    A cell is made of a row and its ratio to the baseline in medians, because the rows may be of several processes.
    """
    columns = []
    for rows in cards.values():
        found = {row["name"]: row for row in rows}
        base = found.get(next(iter(ways)))

        def cell(way: str, found: dict[str, Any] = found, base: dict[str, Any] | None = base) -> str:
            row = found.get(way)
            if not is_timed(row):
                return row["outcome"] if row else ""
            return cell_of(row, f" ({row['milliseconds'] / base['milliseconds']:.2f})" if is_timed(base) else "")

        columns.append([cell(way) for way in ways])
    body = zip(ways.values(), zip(*columns, strict=True), strict=True)
    return table([head, *cards], [[title, *cells] for title, cells in body if any(cells)])


OPTIMIZERS = {
    "float32": "float32",
    "float32, again": "float32 again (A/A)",
    "loss_scaled": "`loss_scaled`",
    "clip": "behind a clip",
    "loss_scaled(clip)": "`loss_scaled`, behind a clip",
    "masters": "`master_params`",
    "split masters": "`master_params`, split",
    "stochastic": "`stochastic_rounding`",
    "loss_scaled(stochastic)": "`loss_scaled(stochastic_rounding)`",
    "stochastic, bfloat16 state": "`stochastic_rounding`, bfloat16 state",
    "bfloat16 to nearest": "parameters and state in bfloat16, rounded to nearest",
    "float32, 8-bit state": "`quantized_state`, float32 parameters",
    "split masters, 8-bit state": "`master_params`, split, of `quantized_state`",
    "loss_scaled(split masters, 8-bit state)": "`loss_scaled` of it",
    "stochastic, 8-bit state": "`stochastic_rounding(quantized_state)`",
}


def optimizers(cards: dict[str, Rows]) -> str:
    """The time of AdamW's step in several ways, and its ratio to float32's."""
    cell_of = lambda row, ratio: f"{row['milliseconds']:.2f} ms{ratio}"
    return by_card("AdamW, 537 M parameters", OPTIMIZERS, cards, cell_of)


def gradient(row: dict[str, Any], ratio: str) -> str:
    """The time and the temporary memory."""
    return f"{row['milliseconds']:.1f} ms{ratio}, {gigabytes(row)}"


def llama_float8(cards: dict[str, Rows]) -> str:
    """Gradients of two layers of a Llama in 16 and in 8 bit."""
    ways = {
        "by hand": "bfloat16 by hand",
        "by hand, dots_saveable": "by hand, `dots_saveable`",
        "by hand, each block again": "by hand, a checkpoint around each block",
        "autocast, budget 1.0": "autocast in bfloat16",
        "autocast, budget 0.5": "with `memory_budget=0.5`",
        "autocast, with the flag": "autocast in bfloat16, with the flag",
        "Float8": "`Float8()`, with the flag",
        "Float8, all products": "`Float8()`, the head too, with the flag",
        "Float8, default flags": "`Float8()`, XLA's default flags",
    }
    return by_card("Llama, 2 layers of 4096, vocabulary 32768", ways, cards, gradient)


def linen(cards: dict[str, Rows]) -> str:
    """Gradients of Linen MLPs by each library for float8."""
    ways = {
        "bfloat16 by hand": "`dtype=bfloat16`",
        "bfloat16 by hand, default flags": "`dtype=bfloat16`, XLA's default flags",
        "autocast": "autocast in bfloat16",
        "Float8, float32 model": "`Float8()`, a float32 model",
        "Float8, bfloat16 model": "`Float8()`, `dtype=bfloat16`",
        "Flax fp8_ops": "Flax `fp8_ops`",
        "Qwix": "Qwix, one scale for each tensor",
    }
    head = "four Linen MLPs, 4096 and 14336, 8192 tokens"
    return by_card(head, ways, cards, gradient)


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
            form = [f"{device}: {title_of(model)}"]
            rows = {row["variant"]: row for row in select(found, model=model)}
            body.append([*form, *memory(rows, *BY_HAND, *(f"autocast, {x}" for x in BUDGETS))])
            for way in ("float32", "bfloat16 by hand"):
                if any(cells := memory(rows, *(f"{way}, {x}" for x in BUDGETS))):
                    body.append([", ".join([*form, f"`recompute` in {way}"]), *[""] * len(BY_HAND), *cells])
    return table(["", *BY_HAND.values(), *BUDGETS], body)


def residuals(h200: Rows) -> str:
    """Temporary memory with residuals in 8 bits, beside the ways by hand, with the FLOPs and the traffic of memory."""
    base = "autocast, budget 1.0"
    ways = {
        "by hand, `dots_saveable`": "dots saveable",
        "by hand, each block again": "each block again",
        base: "autocast",
        "autocast, budget 0.1": "budget 0.1",
        "int8, budget 1.0": "int8",
        "int8, budget 0.25": "int8, budget 0.25",
        "int8, budget 0.1": "int8, budget 0.1",
        "by hand, under `recompute` in int8": "by hand in int8",
    }
    body = []
    for model in names(h200, "model"):
        rows = {row["variant"]: row for row in select(h200, model=model)}
        least = min(row["gigaflops"] for row in rows.values())
        cells = []
        for row in (rows[way] for way in ways):
            more = row["gigaflops"] / least - 1
            again = f" (+{100 * more:.0f} %)" if more > 0.005 else ""
            cells.append(number(row["temporary_megabytes"] / 1e3) + again)
        moved = {way: row["gigabytes_moved"] for way, row in rows.items()}
        ratios = [f"{moved['int8, budget 1.0'] / moved[way]:.2f}" for way in (base, "by hand, each block again")]
        body.append([model, *cells, ", ".join(ratios)])
    return table(["", *ways.values(), "bytes moved, int8 / autocast, each block again"], body)


def residual_gradients(rows: Rows) -> str:
    """The largest error of a parameter's gradient without and with residuals in 8 bits, and the ratios of errors."""
    body = []
    for row in rows:
        made = "" if row["weights"] == "as made" else f", {row['weights']}"
        errors = [number(row[way]) for way in ("bfloat16", "int8")]
        body.append([row["model"] + made, *errors, f"{row['ratio']:.2f}, {row['median_ratio']:.2f}"])
    return table(["", "bfloat16", "with int8 residuals", "ratio of a parameter, largest and median"], body)


def formats(ways: Rows) -> str:
    """The share of FLOPs in 8 bits, the error of the gradients, and the final losses of each way, with an interval."""
    losses = {row["name"]: np.array(row["losses"]) for row in ways}
    base, body = "first and last", []
    for row in ways:
        of_way = losses[row["name"]]
        low, high = interval(of_way - losses[base])
        apart = "" if row["name"] == base else f"{low:+.4f} to {high:+.4f}"
        cells = [f"{100 * row['share']:.0f} %", f"{row['gradient_error']:.3f}", ", ".join(f"{x:.4f}" for x in of_way)]
        body.append([row["name"], *cells, apart])
    minus = f'minus "{base}", 90 % interval'
    return table(["", "FLOPs in 8 bits", "error of the gradients", "held-out loss by seed, nats a byte", minus], body)


def title_of(model: str) -> str:
    name, *rest = model.split(", ")
    return ", ".join([name, *(part for part in rest if part in ("unrolled", "cuDNN's attention"))])


def memory(rows: dict[str, Any], *variants: str) -> list[str]:
    """The temporary memory of variants in GB. In brackets, how many more FLOPs they take than by hand."""
    cells = []
    for row in map(rows.get, variants):
        flops = row["gigaflops"] / rows["by hand"]["gigaflops"] if row else 1
        again = f" (+{100 * (flops - 1):.0f}&nbsp;%)" if flops > 1.005 else ""
        cells.append(number(row["temporary_megabytes"] / 1e3) + again if row else "")
    return cells
