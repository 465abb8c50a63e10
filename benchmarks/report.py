"""Tables and pictures of docs/benchmarks/index.md, from results: `python -m benchmarks.report docs/benchmarks/*.json`.

Each table stands between `<!-- name -->` and `<!-- /name -->`, and says when, where and by which command it was made.
A table without results stays as it is. Results of `--quick` are refused.
"""

import argparse
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks import plots
from benchmarks.growth import growths

Rows = list[dict[str, Any]]
Cells = list[list[str]]
TITLES = {"adamw": "AdamW", "sgd momentum": "SGD with momentum", "clip + adamw": "clip + AdamW"}
TITLES |= {"adafactor": "Adafactor", "muon": "Muon"}


def table(header: Iterable[str], rows: Cells) -> str:
    header = list(header)
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def number(x: float | None, digits: int = 3) -> str:
    """So many significant digits, never an exponent."""
    if x is None:
        return ""
    text = f"{x:.{digits}g}"
    if "e" in text:
        return f"{x:.0f}" if abs(x) > 1 else "0"
    return text


def spread(row: dict[str, Any] | None) -> str:
    return f"{row['ratio']:.2f} ({row['ratio_low']:.2f} to {row['ratio_high']:.2f})" if row else ""


def bound(limit: float | None) -> str:
    return "" if limit is None else f"{limit:.2f}"


def optimizers_in(rows: Rows) -> list[str]:
    return [name for name in TITLES if any(row["optimizer"] == name for row in rows)]


def size(row: dict[str, Any]) -> tuple[float, int]:
    return round(row["millions"], 1), row["leaves"]


def step(rows: Rows) -> str:
    """Libraries by optimizers at 40 leaves, at the largest size at which all of them were timed."""
    rows = [row for row in rows if row["grads"] == "float32" and row["leaves"] == 40]
    peers = lambda optimizer: [row for row in rows if row["optimizer"] == optimizer]
    shown: Rows = []
    for optimizer in optimizers_in(rows):
        sizes = [size(row) for row in peers(optimizer) if "framework" not in row]
        largest = max(sizes, key=lambda s: (sizes.count(s), s))
        shown += [row for row in peers(optimizer) if size(row) == largest]
    columns = optimizers_in(shown)
    at = {(row["name"], row["optimizer"]): row for row in shown}
    first = {optimizer: at["optax", optimizer] for optimizer in columns}
    limit = lambda optimizer: bound(at["jamp", optimizer]["limit_ratio"])
    body = [
        ["parameters, millions", *(number(first[c]["millions"]) for c in columns)],
        ["plain Optax, ms", *(number(first[c]["milliseconds"]) for c in columns)],
        ["**limit by bytes moved**", *(limit(c) for c in columns)],
    ]
    for name in dict.fromkeys(row["name"] for row in shown if row["name"] not in ("optax", "keras", "torch")):
        rows_of = [at.get((name, c)) for c in columns]
        own = next((row["framework"] for row in rows_of if row and "framework" in row), "")
        body.append([f"{name} (beside plain {own})" if own else name, *map(spread, rows_of)])
    return table(["", *(TITLES[c] for c in columns)], body)


def sizes(rows: Rows) -> str:
    """What jamp costs at each size."""
    rows = [row for row in rows if row["grads"] == "float32" and "framework" not in row and row["limit_ratio"]]
    columns = optimizers_in(rows)
    body = []
    # First along the parameters, then along the leaves.
    for millions, leaves in sorted({size(row) for row in rows}, key=lambda s: (s[1] != 40, s[1], s[0])):
        at = {(r["name"], r["optimizer"]): r for r in rows if size(r) == (millions, leaves)}
        if any((("jamp", c) in at) for c in columns):
            body.append([number(millions), str(leaves), *(spread(at.get(("jamp", c))) for c in columns)])
    limits = {row["optimizer"]: row["limit_ratio"] for row in rows if row["name"] == "jamp"}
    body.append(["**limit**", "", *(bound(limits[c]) for c in columns)])
    return table(["parameters, millions", "leaves", *(TITLES[c] for c in columns)], body)


def half(rows: Rows) -> str:
    rows = [row for row in rows if row["grads"] != "float32"]
    names = list(dict.fromkeys(row["name"] for row in rows))
    at = {(row["name"], row["grads"]): row for row in rows}
    columns = list(dict.fromkeys(row["grads"] for row in rows))
    body = [[f"{name}, ms" if name == "optax" else name, *(cell(at[name, c]) for c in columns)] for name in names]
    return table(["AdamW, gradients of", *columns], body)


def cell(row: dict[str, Any]) -> str:
    return number(row["milliseconds"]) if row["name"] == "optax" else spread(row)


def costs(rows: Rows) -> str:
    """Tracing, compiling, dispatching and memory, AdamW at 40 leaves."""
    rows = [row for row in rows if row["optimizer"] == "adamw" and row["leaves"] == 40 and row["grads"] == "float32"]
    rows = [row for row in rows if "trace_seconds" in row and "framework" not in row]
    shown = [size(row) for row in rows]
    largest = max(shown, key=lambda s: (shown.count(s), s))
    header = ["", "trace, s", "compile, s", "both, of plain", "dispatch, ms", "temporary, MB", "peak, MB"]
    fields = ("trace_seconds", "compile_seconds", "compile_ratio")
    fields += ("dispatch_milliseconds", "temporary_megabytes", "peak_megabytes")
    return table(header, [[row["name"], *(number(row[f]) for f in fields)] for row in rows if size(row) == largest])


def train(rows: Rows) -> str:
    names = [name for name in dict.fromkeys(row["name"] for row in rows) if name != "optax"]
    body = []
    for model, batch in dict.fromkeys((row["model"], row["batch"]) for row in rows):
        at = {row["name"]: row for row in rows if (row["model"], row["batch"]) == (model, batch)}
        body.append([model, str(batch), number(at["optax"]["milliseconds"]), *(spread(at.get(n)) for n in names)])
    return table(["model", "batch", "plain Optax, ms", *names], body)


def imports(rows: Rows) -> str:
    return f"`import jamp` after `import optax` takes {number(rows[0]['milliseconds'])} ms."


def ahead(rows: Rows) -> str:
    """All libraries for AdamW; for other optimizers plain Optax and jamp."""
    header = ["optimizer, leaves", "", "accessed, MB", "must be, MB", "temporary, MB", "kernels", "conditionals"]
    body = []
    for row in rows:
        if row["optimizer"] != "adamw" and row["name"] not in ("optax", "jamp"):
            continue
        fields = ("megabytes_accessed", "limit_megabytes", "temporary_megabytes")
        counts = (str(row["kernels"]), str(row["conditionals"]))
        label = f"{TITLES[row['optimizer']]}, {row['leaves']}"
        body.append([label, row["name"], *(number(row[f], 4) for f in fields), *counts])
    return table(header, body)


def growth(rows: Rows) -> str:
    body = []
    for g in growths(rows):
        unit, scale = ("a million parameters", 1.0) if g.along == "millions" else ("a thousand leaves", 1e3)
        ms = [number(scale * g.line(what)[0]) for what in ("plain", "added", "limit")]
        seconds = [number(scale * g.line(what)[0]) for what in ("plain_seconds", "added_seconds")]
        body.append([f"{TITLES[g.optimizer]}, {unit}", *ms, *seconds])
    return table(["", "plain, ms", "jamp adds, ms", "limit, ms", "plain, compile s", "jamp adds, compile s"], body)


def devices(rows: Rows) -> str:
    header = ["devices", "collectives, plain", "their kB", "jamp adds", "their bytes"]
    fields = ("devices", "collectives", "bytes", "added_collectives", "added_bytes")
    values = [[r[f] / 1e3 if f == "bytes" else r[f] for f in fields] for r in rows]
    return table(header, [[number(v, 4) for v in row] for row in values])


def large(rows: Rows) -> str:
    """XLA counts what a loop accesses once, and all layers are one loop: that number is good for comparing alone."""
    counted = any(row["gigabytes_accessed"] for row in rows)
    body = []
    for row in rows:
        products = ", ".join(f"{n} {types}" for types, n in row["products"].items())
        accessed = [number(row["gigabytes_accessed"])] if counted else []
        label = f"{row['model']}, batch {row['batch']}"
        body.append([label, row["name"], number(row["temporary_megabytes"] / 1e3), *accessed, products])
    accessed = ["accessed, GB, a loop's body once"] if counted else []
    return table(["model", "", "temporary, GB", *accessed, "matrix products, by operands"], body)


def gpu(rows: Rows) -> str:
    body = [
        [r["model"], r["name"], str(r["batch"]), number(r["milliseconds"], 4), f"{1 / r['ratio']:.2f}"] for r in rows
    ]
    return table(["model", "", "batch", "ms", "speed-up over its own float32"], body)


# The mark in the page: the key in the results, and what makes a table of its rows.
TABLES: dict[str, tuple[str, Callable[[Rows], str]]] = {
    "step": ("step", step),
    "sizes": ("step", sizes),
    "half": ("step", half),
    "costs": ("step", costs),
    "growth": ("step", growth),
    "devices": ("devices", devices),
    "train": ("train", train),
    "imports": ("imports", imports),
    "tpu": ("tpu", ahead),
    "h200": ("h200", ahead),
    "ahead_tpu": ("ahead_tpu", large),
    "ahead_h200": ("ahead_h200", large),
    "gpu": ("gpu", gpu),
}


# What stands above a table, drawn from the same results.
PICTURES = {
    "step": ("benchmark_step.png", "Time of the step beside plain Optax, by library and optimizer"),
    "growth": ("benchmark_growth.png", "What jamp adds, along parameters and leaves, beside one read of the gradients"),
    "train": ("benchmark_train.png", "Time of whole training steps beside plain Optax, by batch size"),
    "gpu": ("benchmark_gpu.png", "Speed-ups of two models over float32, jamp and PyTorch"),
}


def picture(name: str) -> str:
    if name not in PICTURES:
        return ""
    file, alt = PICTURES[name]
    return f"![{alt}](../images/{file})\n\n"


def origin(found: dict[str, Any]) -> str:
    machine, versions = found["machine"], found["versions"]
    processor = f", {machine['processor']}, {machine['cores']} cores" if machine["device"] == "cpu" else ""
    installed = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"*{found['date']}; {machine['device']}{processor}; {installed}.* `{found['command']}`"


def fill(page: str, name: str, text: str) -> str:
    """Put a text between its two marks."""
    mark = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    if not mark.search(page):
        raise ValueError(f"The page has no marks <!-- {name} --> and <!-- /{name} -->: add both, each on its line.")
    return mark.sub(lambda m: f"{m[1]}\n{text}\n\n{m[2]}", page)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, help="results; those of other programs are passed over")
    parser.add_argument("--page", type=Path, default=Path("docs/benchmarks/index.md"))
    parser.add_argument("--plot", type=Path, metavar="FOLDER", default=Path("docs/images"))
    options = parser.parse_args()
    page = options.page.read_text()
    for file in options.files:
        found = json.loads(file.read_text())
        used = {name: make for name, (key, make) in TABLES.items() if key in found}
        if used and found["quick"]:
            raise SystemExit(f"{file} is of --quick: its numbers mean nothing. Measure without it.")
        for name, make in used.items():
            page = fill(page, name, f"{picture(name)}{make(found[TABLES[name][0]])}\n\n{origin(found)}")
        for name, draw in plots.PLOTS.items():
            if name in found:
                draw(found[name], options.plot)
        print(f"{file}: {', '.join(used) or 'passed over'}")
    options.page.write_text(page)


if __name__ == "__main__":
    main()
