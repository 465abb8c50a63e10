"""Tables and pictures of the documentation, made of results: `python -m benchmarks.report docs/benchmarks/*.json`.

A table stands between `<!-- name -->` and `<!-- /name -->`, and under it when, where and by which command its results
were measured. It is made again if all of its results are given. Results of `--quick` are refused.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.report import pictures, tables
from benchmarks.report.markdown import fill, origin

PAGE, FIT = "docs/benchmarks/index.md", "docs/a-model-that-does-not-fit.md"
# By its mark: the page of a table, the files of results and the key of their rows, and what makes the table of them.
TABLES: dict[str, tuple[str, dict[str, str], Callable[..., str]]] = {
    "facts": ("README.md", {"gpu": "gpu_models"}, tables.facts),
    "counted": (PAGE, {"tpu_v5e": "tpu", "h200": "h200"}, tables.counted),
    "gpu_steps": (PAGE, {"gpu": "gpu_steps"}, tables.step),
    "gpu_models": (PAGE, {"gpu": "gpu_models"}, tables.models),
    "step": (PAGE, {"step": "step"}, tables.step),
    "budgets": (FIT, {"budget_h200": "rows", "budget_tpu": "rows"}, tables.budgets),
}
# By its file in docs/images: the file of results and the key of their rows, and what draws them.
PICTURES: dict[str, tuple[str, str, Callable[[Any], Figure]]] = {
    "benchmark_step": ("step", "step", pictures.steps),
    "text_model": ("text_model", "rows", pictures.text_model),
    "budgets": ("budget_h200", "rows", pictures.budgets),
}


def read(files: list[Path]) -> dict[str, dict[str, Any]]:
    """The results by the names of their files."""
    found = {file.stem: json.loads(file.read_text()) for file in files}
    for name, results in found.items():
        if results["quick"]:
            raise SystemExit(f"{name} is of --quick: its numbers mean nothing. Measure without it.")
    return found


def write(root: Path, found: dict[str, dict[str, Any]]) -> None:
    """Fill the tables of all pages below `root`."""
    for mark, (page, files, make) in TABLES.items():
        if files.keys() <= found.keys():
            table = make(*(found[name][key] for name, key in files.items()))
            text = "\n\n".join([table, *(origin(found[name]) for name in files)])
            (root / page).write_text(fill((root / page).read_text(), mark, text))


if __name__ == "__main__":
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__, formatter_class=form)
    parser.add_argument("files", nargs="+", type=Path, help="results; those without a table are passed over")
    parser.add_argument("--root", type=Path, default=Path(), help="where README.md and docs are")
    options = parser.parse_args()
    found = read(options.files)
    write(options.root, found)
    for picture, (name, key, draw) in PICTURES.items():
        if name in found:  # opaque, because pictures stand on light and on dark pages
            file = options.root / "docs/images" / f"{picture}.png"
            draw(found[name][key]).savefig(file, dpi=100, facecolor="white")
