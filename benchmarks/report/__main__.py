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

from benchmarks.report import accuracy, curves, gpu, pictures, reinforce, rounding, step
from benchmarks.report.markdown import fill, origin

Results = dict[str, Any]
PAGE, README, COMPARISON = "docs/benchmarks/index.md", "README.md", "docs/comparison.md"
ACCURACY, DTYPES, PARAMETERS = (
    f"docs/{name}.md" for name in ("benchmarks/accuracy", "float16-or-bfloat16", "bfloat16-parameters")
)
PAGES = (PAGE, README, COMPARISON, ACCURACY, DTYPES, PARAMETERS)
# The mark: its page, the keys of the results that the table needs, and what makes it of their rows.
TABLES: dict[str, tuple[str, tuple[str, ...], Callable[..., str]]] = {
    "counted": (PAGE, ("tpu", "h200"), step.counted),
    "predicted": (PAGE, ("tpu", "h200"), step.predicted),
    "aims": (PAGE, ("tpu", "h200", "step"), step.aims),
    "tpu": (PAGE, ("tpu",), step.ahead),
    "h200": (PAGE, ("h200",), step.ahead),
    "step": (PAGE, ("step",), step.step),
    "sizes": (PAGE, ("step",), step.sizes),
    "half": (PAGE, ("step",), step.half),
    "costs": (PAGE, ("step",), step.costs),
    "train": (PAGE, ("train",), step.train),
    "imports": (PAGE, ("imports",), step.imports),
    "ahead_tpu": (PAGE, ("ahead_tpu",), step.large),
    "ahead_h200": (PAGE, ("ahead_h200",), step.large),
    "gpu_steps": (PAGE, ("gpu",), gpu.steps),
    "gpu_products": (PAGE, ("gpu",), gpu.products),
    "gpu_models": (PAGE, ("gpu",), gpu.models),
    "cost": (README, ("tpu", "h200"), step.cost),
    "speed": (COMPARISON, ("tpu", "h200", "step"), step.speed),
}
# The tables of other pages, by the file of results: what makes them, by their marks.
FILES: dict[str, tuple[str, Callable[[Results], dict[str, str]]]] = {
    "accuracy": (ACCURACY, accuracy.sections),
    "accuracy_overflow": (ACCURACY, lambda found: {"overflow": accuracy.overflow(found)}),
    "text_model": (ACCURACY, lambda found: {"text-model": accuracy.text_model(found)}),
    "reinforce": (DTYPES, lambda found: {name: make(found) for name, make in reinforce.TABLES.items()}),
    "rounding": (PARAMETERS, lambda found: {"training": rounding.training(found["rows"])}),
    "rounding_optimizers": (PARAMETERS, lambda found: {"optimizers": rounding.optimizers(found["rows"])}),
    "rounding_step": (PARAMETERS, lambda found: {"step": rounding.step(found["rows"])}),
}
# What stands above a table, drawn from the same results.
PICTURES = {
    "step": ("benchmark_step.png", "Time of the step beside plain Optax on a CPU, by library and optimizer"),
    "train": ("benchmark_train.png", "Time of whole training steps beside plain Optax on a CPU, by batch size"),
}


def picture(name: str) -> str:
    if name not in PICTURES:
        return ""
    file, alt = PICTURES[name]
    return f"![{alt}](../images/{file})\n\n"


def read(files: list[Path]) -> dict[str, Results]:
    """The results that hold each key; those of `FILES` under the file's name."""
    found: dict[str, Results] = {}
    keys = {key for _, needed, _ in TABLES.values() for key in needed}
    for file in files:
        results = json.loads(file.read_text())
        used = keys & results.keys() | {f"{file.stem}.json"} if file.stem in FILES else keys & results.keys()
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
            text = make(*(found[key][key] for key in keys))
            source = origin(found[keys[0]])
            if page == PAGE and len(keys) == 1 and source not in told:
                told.add(source)
                text = f"{text}\n\n{source}"
            yield page, name, picture(name) + text
    for name, (page, make_all) in FILES.items():
        if f"{name}.json" in found:
            yield from ((page, mark, text) for mark, text in make_all(found[f"{name}.json"]).items())


def write(root: Path, found: dict[str, Results]) -> None:
    """Fill the tables of all pages below `root`."""
    for page, mark, text in tables(found):
        (root / page).write_text(fill((root / page).read_text(), mark, text))


# Each picture by its name, made of results by their key.
DRAWN: dict[str, tuple[str, Callable[[Results], Figure]]] = {
    "benchmark_step": ("step", lambda found: pictures.steps(found["step"])),
    "benchmark_train": ("train", lambda found: pictures.train(found["train"])),
    "accuracy_digits": ("accuracy.json", lambda found: curves.losses(found["rows"], "digits")),
    "accuracy_digits_in_batches": ("accuracy.json", lambda found: curves.losses(found["rows"], "digits in batches")),
    "accuracy_language_model": ("accuracy.json", lambda found: curves.losses(found["rows"], "language model")),
    "accuracy_starts": ("accuracy.json", lambda found: curves.starts(found["rows"])),
    "text_model": ("text_model.json", lambda found: curves.text_model(found["rows"])),
    "float16_or_bfloat16": ("reinforce.json", lambda found: curves.reinforce(found["rows"])),
}


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__, formatter_class=form)
    parser.add_argument("files", nargs="+", type=Path, help="results; those of other programs are passed over")
    parser.add_argument("--root", type=Path, default=Path(), help="where README.md and docs are")
    options = parser.parse_args()
    found = read(options.files)
    write(options.root, found)
    for name, (key, draw) in DRAWN.items():
        if key in found:  # opaque, because they stand on light and on dark pages
            file = options.root / "docs" / "images" / f"{name}.png"
            draw(found[key]).savefig(file, dpi=100, facecolor="white")


if __name__ == "__main__":
    main()
