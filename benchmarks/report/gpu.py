"""Tables of `benchmarks.gpu`: the optimizer step, float8 products and whole models, measured."""

from typing import Any

from benchmarks.gpu.models import BATCH
from benchmarks.models import TF32
from benchmarks.processes import cell, is_again, summary
from benchmarks.report.markdown import TITLES, number, table

Entries = list[dict[str, Any]]


def rows_of(entries: Entries, part: str) -> Entries:
    """The rows of a part, each with what identifies its measurement."""
    return [entry["unit"] | row for entry in entries if entry["unit"]["part"] == part for row in entry.get("rows", [])]


def steps(entries: Entries) -> str:
    """Ratios to plain Optax, over processes."""
    rows = rows_of(entries, "steps")
    names = [name for name in dict.fromkeys(row["name"] for row in rows) if name != "optax"]
    body = []
    for key in sorted({(row["millions"], row["optimizer"], row["grads"]) for row in rows}):
        chosen = [row for row in rows if (row["millions"], row["optimizer"], row["grads"]) == key]
        runs = [[row for row in chosen if row["process"] == p] for p in sorted({row["process"] for row in chosen})]
        found = {row["name"]: row for row in summary(runs)}
        millions, optimizer, grads = key
        label = f"{TITLES[optimizer]}, {number(millions)} M, {grads}"
        plain = f"{number(found['optax']['milliseconds'])} ms"
        body.append([label, plain, *(cell(found.get(name)) for name in names)])
    return table(["", "plain Optax", *("A/A" if is_again({"name": n}) else n for n in names)], body)


def products(entries: Entries) -> str:
    """TFLOP/s, and how much faster than bfloat16."""
    body = []
    rows = rows_of(entries, "products")
    for size, what in dict.fromkeys((tuple(row["size"]), row["what"]) for row in rows):
        found = {row["name"]: row for row in rows if (tuple(row["size"]), row["what"]) == (size, what)}
        base = found["bfloat16"]["milliseconds"]
        cells = [f"{row['teraflops']:.0f} ({base / row['milliseconds']:.2f})" for row in found.values()]
        body.append([" x ".join(map(str, size)), what, *cells])
    names = dict.fromkeys(row["name"] for row in rows)
    return table(["M x K x N", "", *(f"{name}, TFLOP/s" for name in names)], body)


def models(entries: Entries) -> str:
    """Milliseconds, speed-ups, tokens a second, MFU and memory."""
    rows, body = rows_of(entries, "models"), []
    for row in sorted(rows, key=lambda row: list(BATCH).index(row["model"])):
        at = {
            r["name"]: r["milliseconds"] for r in rows if (r["model"], r["library"]) == (row["model"], row["library"])
        }
        first = next((at[name] for name in at if name.endswith(TF32)), None)
        speed_up = f"{first / row['milliseconds']:.2f}" if first else ""
        body.append(
            [
                f"{row['model']}, batch {row['batch']}",
                row["name"],
                number(row["milliseconds"]),
                speed_up,
                f"{row['tokens_per_second'] / 1e3:.0f}",
                f"{100 * row['mfu']:.0f} %" if row["mfu"] else "",
                number(row["peak_gigabytes"]),
            ]
        )
    failed = [f"{' '.join(map(str, e['unit'].values()))}: {e['error']}" for e in entries if "error" in e]
    header = ["", "", "ms", "speed-up over its TF32", "thousand tokens/s", "MFU", "peak, GB"]
    return table(header, body) + "".join(f"\n\nNot measured: {line}" for line in failed)
