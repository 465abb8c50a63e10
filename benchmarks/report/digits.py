"""Tables of what `rounding_report` finds."""

from typing import Any

from benchmarks.record import Rows
from benchmarks.report.markdown import names, origin, select, table


def models(found: dict[str, Any]) -> str:
    """Public models: their errors, the first row, and what rules gain."""
    head = ["bfloat16", "error of the loss", "of the gradients", "first row: its error, measured alone"]
    head += ["FLOPs in float32 by `.rules`", "gradients with them"]
    body = []
    for row in select(found["rows"], kind="model"):
        first = f"{row['first'].partition('Module/')[2] or row['first']}: {row['measured']:.1e}"
        rules = (
            [f"{row['float32']:.2%} ({len(row['rules'])})", f"{row['with_rules']:.1e}"] if "rules" in row else ["", ""]
        )
        body.append([row["model"], f"{row['value']:.1e}", f"{row['gradients']:.1e}", first, *rules])
    return f"{table(head, body)}\n\n{origin(found)}"


def mismatch(found: dict[str, Any]) -> str:
    """Sampler and trainer of REINFORCE, by line: the mean absolute errors of log-probabilities."""
    rows = select(found["rows"], kind="mismatch")
    dtypes = names(rows, "dtype")
    head = [
        "what rounds",
        *(f"{dtype}: {kind}" for dtype in dtypes for kind in ("sampler", "trainer", "mismatch without it")),
    ]
    body = []
    for line in names(rows, "line"):
        cells = [cell(select(rows, dtype=dtype, line=line)) for dtype in dtypes]
        body.append(["everything" if line == "all" else f"`{line}`", *(x for of_dtype in cells for x in of_dtype)])
    return f"{table(head, body)}\n\n{origin(found)}"


def cell(rows: Rows) -> list[str]:
    return [f"{row[key]:.1e}" for row in rows for key in ("sampler", "trainer", "left")] or [""] * 3


def cost(found: dict[str, Any]) -> str:
    """Seconds of a report and of its parts."""
    head = [
        "transformer, unrolled",
        "gradient under autocast",
        "one run",
        "the damage of all rows",
        "whole report, in gradients",
    ]
    head += ["with tracing and compiling"]
    body = [
        [f"{row['layers']} layers, width {row['width']}"]
        + [f"{row[key]:.2f} s" for key in ("gradient", "run", "damages")]
        + [f"{row['gradients']:.1f}", f"{row['seconds']:.0f} s"]
        for row in select(found["rows"], kind="cost")
    ]
    return table(head, body)


TABLES = {"digits_models": models, "digits_cost": cost}
