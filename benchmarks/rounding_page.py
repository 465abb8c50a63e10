"""The tables of docs/bfloat16-parameters.md from the results of `benchmarks.rounding` and `benchmarks.rounding_step`.

python -m benchmarks.rounding_page
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.markdown import fill, table
from benchmarks.processes import cell

DOCS = Path(__file__).resolve().parents[1] / "docs"


def rows(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((DOCS / "benchmarks" / f"{name}.json").read_text())["rows"]
    return found


def training() -> str:
    found = rows("rounding")
    tasks, ways = (list(dict.fromkeys(row[key] for row in found)) for key in ("task", "way"))

    def losses(task: str, way: str) -> str:
        values = [row["loss"] for row in found if (row["task"], row["way"]) == (task, way)]
        return f"{np.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"

    return table(["", *tasks], [[way, *(losses(task, way) for task in tasks)] for way in ways])


def optimizers() -> str:
    found = rows("rounding_optimizers")
    names, ways = (list(dict.fromkeys(row[key] for row in found)) for key in ("optimizer", "way"))
    loss = {(row["optimizer"], row["way"]): f"{row['loss']:.3f}" for row in found}
    return table(["", *ways], [[name, *(loss[name, way] for way in ways)] for name in names])


def step() -> str:
    found = rows("rounding_step")
    sizes, names = (list(dict.fromkeys(row[key] for row in found)) for key in ("millions", "name"))
    cells = {(row["millions"], row["name"]): cell(row) for row in found}
    return table(
        ["", *(f"{size:.0f} M parameters" for size in sizes)],
        [[name, *(cells[size, name] for size in sizes)] for name in names],
    )


if __name__ == "__main__":
    path = DOCS / "bfloat16-parameters.md"
    page = path.read_text()
    for name, make in {"training": training, "optimizers": optimizers, "step": step}.items():
        if (DOCS / "benchmarks" / f"rounding{'' if name == 'training' else f'_{name}'}.json").exists():
            page = fill(page, name, make())
    path.write_text(page)
