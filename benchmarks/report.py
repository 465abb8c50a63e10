"""Tables and pictures of the documentation, made of results: `python -m benchmarks.report docs/benchmarks/*.json`.

Each table stands between `<!-- name -->` and `<!-- /name -->`. The first of some results on the benchmarks' page says
when, where and by which command they were made. A table is filled when all results that it needs are given, and else
stays as it is. Results of `--quick` are refused.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import plots, report_gpu, report_step
from benchmarks.markdown import fill, number, origin, table
from benchmarks.processes import cell, is_again

Rows = list[dict[str, Any]]
PAGE, README, COMPARISON = "docs/benchmarks/index.md", "README.md", "docs/comparison.md"


def train(rows: Rows) -> str:
    names = [name for name in dict.fromkeys(row["name"] for row in rows) if name != "optax"]
    body = []
    for model, batch in dict.fromkeys((row["model"], row["batch"]) for row in rows):
        at = {row["name"]: row for row in rows if (row["model"], row["batch"]) == (model, batch)}
        label = f"{model}, {batch}: {number(at['optax']['milliseconds'])}"
        body.append([label, *(cell(at.get(name)) for name in names)])
    short = ("A/A" if is_again({"name": name}) else name for name in names)
    return table(["model, batch: plain, ms", *short], body)


def imports(rows: Rows) -> str:
    return f"`import jamp` after `import optax` takes {number(rows[0]['milliseconds'])} ms."


def large(rows: Rows) -> str:
    """XLA counts what a loop accesses once, and all layers are one loop: that number is good for comparing alone."""
    body = []
    for row in rows:
        products = ", ".join(f"{n} {types}" for types, n in row["products"].items())
        label = f"{row['model']}, batch {row['batch']}"
        cells = number(row["temporary_megabytes"] / 1e3), number(row["gigabytes_accessed"]), products
        body.append([label, row["name"], *cells])
    return table(["model", "", "temporary, GB", "accessed, GB, a loop's body once", "products, by operands"], body)


# The mark: its page, the keys of the results that the table needs, and what makes it of their rows.
TABLES: dict[str, tuple[str, tuple[str, ...], Callable[..., str]]] = {
    "counted": (PAGE, ("tpu", "h200"), report_step.counted),
    "predicted": (PAGE, ("tpu", "h200"), report_step.predicted),
    "aims": (PAGE, ("tpu", "h200", "step"), report_step.aims),
    "tpu": (PAGE, ("tpu",), report_step.ahead),
    "h200": (PAGE, ("h200",), report_step.ahead),
    "step": (PAGE, ("step",), report_step.step),
    "sizes": (PAGE, ("step",), report_step.sizes),
    "half": (PAGE, ("step",), report_step.half),
    "costs": (PAGE, ("step",), report_step.costs),
    "train": (PAGE, ("train",), train),
    "imports": (PAGE, ("imports",), imports),
    "ahead_tpu": (PAGE, ("ahead_tpu",), large),
    "ahead_h200": (PAGE, ("ahead_h200",), large),
    "gpu_steps": (PAGE, ("gpu",), report_gpu.steps),
    "gpu_products": (PAGE, ("gpu",), report_gpu.products),
    "gpu_models": (PAGE, ("gpu",), report_gpu.models),
    "cost": (README, ("tpu", "h200"), report_step.cost),
    "speed": (COMPARISON, ("tpu", "h200", "step"), report_step.speed),
}
# What stands above a table, drawn from the same results.
PICTURES = {
    "step": ("benchmark_step.png", "Time of the step beside plain Optax on a CPU, by library and optimizer"),
    "train": ("benchmark_train.png", "Time of whole training steps beside plain Optax on a CPU, by batch size"),
    "gpu_models": ("benchmark_gpu.png", "Speed-ups of whole models over TF32, jamp and PyTorch"),
}


def picture(name: str) -> str:
    if name not in PICTURES:
        return ""
    file, alt = PICTURES[name]
    return f"![{alt}](../images/{file})\n\n"


def read(files: list[Path]) -> dict[str, dict[str, Any]]:
    """The results that hold each key."""
    found: dict[str, dict[str, Any]] = {}
    keys = {key for _, needed, _ in TABLES.values() for key in needed}
    for file in files:
        results = json.loads(file.read_text())
        used = keys & results.keys()
        if used and results["quick"]:
            raise SystemExit(f"{file} is of --quick: its numbers mean nothing. Measure without it.")
        found |= dict.fromkeys(used, results)
        print(f"{file}: {', '.join(sorted(used)) or 'passed over'}")
    return found


def write(root: Path, found: dict[str, dict[str, Any]]) -> None:
    """Fill the tables of all pages below `root`."""
    pages = {name: (root / name).read_text() for name in (PAGE, README, COMPARISON)}
    told: set[str] = set()
    for name, (page, keys, make) in TABLES.items():
        if found.keys() >= set(keys):
            text = make(*(found[key][key] for key in keys))
            source = origin(found[keys[0]])
            if page == PAGE and len(keys) == 1 and source not in told:
                told.add(source)
                text = f"{text}\n\n{source}"
            text = picture(name) + text
            pages[page] = fill(pages[page], name, text)
    for name, text in pages.items():
        (root / name).write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, help="results; those of other programs are passed over")
    parser.add_argument("--root", type=Path, default=Path(), help="where README.md and docs are")
    options = parser.parse_args()
    found = read(options.files)
    write(options.root, found)
    for name, draw in plots.PLOTS.items():
        if name in found:
            draw(found[name][name], options.root / "docs" / "images")


if __name__ == "__main__":
    main()
