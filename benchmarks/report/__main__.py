"""Tables and pictures of the documentation, made of results: `python -m benchmarks.report docs/benchmarks/*.json`.

A table stands between `<!-- name -->` and `<!-- /name -->` in README.md or in any page below docs, and under it when,
where and by which command its results were measured. It is made again if all of its results are given. A table of GPUs
is made if a `gpu_<card>.json` has its first part, and may have a column for each of these cards. Results of `--quick`
are refused.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.record import Rows
from benchmarks.report import pictures, tables
from benchmarks.report.markdown import fill, is_marked, origin

GPU = "gpu_h200"
# By its mark: the files of results and the key of their rows, and what makes the table of them.
TABLES: dict[str, tuple[dict[str, str], Callable[..., str]]] = {
    "budgets": ({"budget_h200": "rows", "budget_tpu": "rows"}, tables.budgets),
    "residuals": ({"residuals_h200": "rows"}, tables.residuals),
    "formats": ({"formats": "ways"}, tables.formats),
    "residual_gradients": ({"residuals": "gradients"}, tables.residual_gradients),
}
# The same of files of `benchmarks.gpu`: the parts, and what makes the table of the parts' rows.
# "llama_1024" and "steps" are finished studies, whose code has the commit that stands beside their rows.
ONE_GPU: dict[str, tuple[tuple[str, ...], Callable[..., str]]] = {
    "gpu_steps": (("steps",), tables.step),
    "gpu_models": (("gpt2", "llama_1024"), tables.models),
}
# The same, of the rows of each card, by the name of its device.
GPUS: dict[str, tuple[tuple[str, ...], Callable[..., str]]] = {
    "gpu_optimizers": (("optimizers",), tables.optimizers),
    "gpu_llama": (("llama", "llama_float8", "llama_float8_default_flags"), tables.llama_float8),
    "gpu_linen": (("linen",), tables.linen),
}
# By its file in docs/images: the file of results and the key of their rows, or the part if it is of `benchmarks.gpu`,
# and what draws them.
PICTURES: dict[str, tuple[str, str, Callable[[Any], Figure]]] = {
    "benchmark_step": ("step", "step", pictures.steps),
    "text_model": ("text_model", "rows", pictures.text_model),
    "budgets": ("budget_h200", "rows", pictures.budgets),
    "gpt2": (GPU, "gpt2", pictures.gpt2),
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
    for mark, (files, make) in TABLES.items():
        if files.keys() <= found.keys():
            table = make(*(found[name][key] for name, key in files.items()))
            put(root, mark, table, [found[name] for name in files])
    cards = {name: results for name, results in found.items() if "parts" in results}
    for mark, (parts, make) in ONE_GPU.items():
        if GPU in cards and parts[0] in cards[GPU]["parts"]:
            put(root, mark, make(rows_of(cards[GPU], parts)), measured(cards[GPU], parts))
    for mark, (parts, make) in GPUS.items():
        if having := [results for results in cards.values() if parts[0] in results["parts"]]:
            table = make({results["machine"]["device"]: rows_of(results, parts) for results in having})
            put(root, mark, table, [about for results in having for about in measured(results, parts)])


def rows_of(results: dict[str, Any], parts: tuple[str, ...]) -> Rows:
    """The rows of those parts of a file that were measured."""
    return [row for part in parts if part in results["parts"] for row in results["parts"][part]["rows"]]


def measured(results: dict[str, Any], parts: tuple[str, ...]) -> list[dict[str, Any]]:
    """When, where and how each of these parts was measured."""
    return [results | results["parts"][part] for part in parts if part in results["parts"]]


def put(root: Path, mark: str, table: str, results: list[dict[str, Any]]) -> None:
    """Fill a table on the pages that have its marks, with a line for each run that its results are of."""
    pages = [page for page in (root / "README.md", *sorted((root / "docs").rglob("*.md"))) if page.exists()]
    marked = [page for page in pages if is_marked(page.read_text(), mark)]
    if not marked:
        raise ValueError(f"No page has the marks <!-- {mark} --> and <!-- /{mark} -->: add both, each on its line.")
    text = "\n\n".join([table, *dict.fromkeys(map(origin, results))])
    for page in marked:
        page.write_text(fill(page.read_text(), mark, text))


if __name__ == "__main__":
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__, formatter_class=form)
    parser.add_argument("files", nargs="+", type=Path, help="results; those without a table are passed over")
    parser.add_argument("--root", type=Path, default=Path(), help="where README.md and docs are")
    options = parser.parse_args()
    found = read(options.files)
    write(options.root, found)
    for picture, (name, key, draw) in PICTURES.items():
        results = found.get(name, {})
        rows = rows_of(results, (key,)) if "parts" in results else results.get(key)
        if rows:  # opaque, because pictures stand on light and on dark pages
            file = options.root / "docs/images" / f"{picture}.png"
            draw(rows).savefig(file, dpi=100, facecolor="white")
