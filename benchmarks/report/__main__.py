"""Tables and pictures of the documentation, made of results: `python -m benchmarks.report docs/benchmarks/*.json`.

Each table stands between `<!-- name -->` and `<!-- /name -->`. The first of some results on the benchmarks' page says
when, where and by which command they were made. A table is filled when all results that it needs are given, and else
stays as it is. Results of `--quick` are refused.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.report import accuracy, float64, parameters, pictures, quantized, readme, reinforce, step, trainers
from benchmarks.report.markdown import fill, origin

Results = dict[str, Any]
PAGE, README = "docs/benchmarks/index.md", "README.md"
ACCURACY, DTYPES = "docs/benchmarks/accuracy.md", "docs/float16-or-bfloat16.md"
PARAMETERS = "docs/optimizer-memory.md"
FIT = "docs/a-model-that-does-not-fit.md"
GRPO = "docs/frameworks/language-models.md"
QUANTIZED = "docs/8-bit.md"
SCIENCE = "docs/frameworks/science.md"
# The tables that are made of the rows under some keys of the results, or of whole files of them: their page, these keys
# or files, and what makes them.
TABLES: dict[str, tuple[str, tuple[str, ...], Callable[..., str]]] = {
    "counted": (PAGE, ("tpu", "h200"), step.counted),
    "step": (PAGE, ("step",), step.step),
    "train": (PAGE, ("train",), step.train),
    "imports": (PAGE, ("imports",), step.imports),
    "gpu_steps": (PAGE, ("gpu_steps",), step.step),
    "gpu_models": (PAGE, ("gpu_models",), step.models),
    "ways": (PARAMETERS, ("rounding_tpu", "rounding_h200", "rounding.json"), parameters.ways),
    "facts": (
        README,
        ("gpu_models", "text_model.json", "rounding_h200", "float64"),
        readme.facts,
    ),
    "budgets": (FIT, ("budget_h200.json", "budget_tpu.json"), step.budgets),
    "float64": (SCIENCE, ("float64", "float64_h200.json"), float64.problems),
}
# The tables of a whole file of results, by the file's name: their page, and what makes each.
FILES: dict[str, tuple[str, dict[str, Callable[[Results], str]]]] = {
    "accuracy": (ACCURACY, {"small": accuracy.small}),
    "text_model": (ACCURACY, {"text-model": accuracy.text_model}),
    "budget_cpu": (FIT, {"budgets_timed": step.budgets_timed}),
    "fit_h200": (FIT, {"fit": step.fit}),
    "reinforce": (DTYPES, reinforce.TABLES),
    "tunix_mismatch": (GRPO, {"tunix_mismatch": trainers.mismatch}),
    **{name: (QUANTIZED, tables) for name, tables in quantized.FILES.items()},
}
PAGES = sorted({page for page, *_ in (*TABLES.values(), *FILES.values())})
# What stands above a table, drawn from the same results.
PICTURES = {
    "step": "Time of the step beside plain Optax on a CPU, by library and optimizer",
    "train": "Time of whole training steps beside plain Optax on a CPU, by batch size",
}
# Each picture by its name: the key of the results, and what draws it of their rows.
DRAWN: dict[str, tuple[str, Callable[[Any], Figure]]] = {
    "benchmark_step": ("step", pictures.steps),
    "benchmark_train": ("train", pictures.train),
    "text_model": ("text_model.json", pictures.text_model),
    "budgets": ("budget_h200.json", pictures.budgets),
}


def read(files: list[Path]) -> dict[str, Results]:
    """The results that hold each key; those of `FILES` under the file's name."""
    found: dict[str, Results] = {}
    keys = {key for _, needed, _ in TABLES.values() for key in needed}
    for file in files:
        results = json.loads(file.read_text())
        used = keys & results.keys() | ({file.name} if file.stem in FILES or file.name in keys else set())
        if used and results["quick"]:
            raise SystemExit(f"{file} is of --quick: its numbers mean nothing. Measure without it.")
        found |= dict.fromkeys(used, results)
        print(f"{file}: {', '.join(sorted(used)) or 'passed over'}")
    return found


def tables(found: dict[str, Results]) -> Iterator[tuple[str, str, str]]:
    """The page, the mark and the text of all that the results suffice for."""
    told: set[str] = set()
    for name, (page, keys, make) in TABLES.items():
        if found.keys() >= set(keys):
            text = make(*(found[key] if key.endswith(".json") else found[key][key] for key in keys))
            source = origin(found[keys[0]])
            if page == PAGE and len(keys) == 1 and source not in told:
                told.add(source)
                text = f"{text}\n\n{source}"
            drawn = f"![{PICTURES[name]}](../images/benchmark_{name}.png)\n\n" if name in PICTURES else ""
            yield page, name, drawn + text
    for name, (page, makes) in FILES.items():
        if f"{name}.json" in found:
            yield from ((page, mark, make(found[f"{name}.json"])) for mark, make in makes.items())


def write(root: Path, found: dict[str, Results]) -> None:
    """Fill the tables of all pages below `root`."""
    for page, mark, text in tables(found):
        (root / page).write_text(fill((root / page).read_text(), mark, text))


if __name__ == "__main__":
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__, formatter_class=form)
    parser.add_argument("files", nargs="+", type=Path, help="results; those of other programs are passed over")
    parser.add_argument("--root", type=Path, default=Path(), help="where README.md and docs are")
    options = parser.parse_args()
    found = read(options.files)
    write(options.root, found)
    for name, (key, draw) in DRAWN.items():
        if key in found:  # opaque, because they stand on light and on dark pages
            file = options.root / "docs/images" / f"{name}.png"
            rows = found[key]["rows" if key.endswith(".json") else key]
            draw(rows).savefig(file, dpi=100, facecolor="white")
