"""Tables of the optimizer step and of whole training steps: what the compilers count, and what was timed on a CPU."""

from collections.abc import Iterable
from typing import Any

from benchmarks.processes import cell, is_again
from benchmarks.record import Rows
from benchmarks.report.markdown import TITLES, names, number, select, table
from benchmarks.step.peers import AGAIN
from benchmarks.step.update import FEW, WITHIN

FIRST = ("optax", "jamp", "lax.cond by hand", "where by hand", "flax DynamicScale recipe", "optax.apply_if_finite")


def optimizers_in(rows: Rows) -> list[str]:
    return [name for name in TITLES if any(row["optimizer"] == name for row in rows)]


def at(rows: Rows) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["name"], row["optimizer"]): row for row in rows}


def counted(tpu: Rows, h200: Rows) -> str:
    """AdamW: what a step moves, its kernels and its temporaries, TPU v5e / H200."""
    header = ["AdamW, TPU v5e / H200", "moved, GB", "of plain Optax's", "kernels", "temporary, MB"]
    on = [at(rows) for rows in (tpu, h200)]
    body = []
    for name in FIRST:
        rows = [found[name, "adamw"] for found in on]
        moved = pair(number(row["megabytes"] / 1e3) for row in rows), pair(f"{row['bytes_ratio']:.2f}" for row in rows)
        temporary = pair(f"{row['temporary_megabytes']:.0f}" for row in rows)
        body.append([name, *moved, pair(str(row["kernels"]) for row in rows), temporary])
    return table(header, body)


def pair(texts: Iterable[str]) -> str:
    return "&nbsp;/&nbsp;".join(texts)


def predicted(tpu: Rows, h200: Rows) -> str:
    """Every optimizer and library: the time that bytes, kernels and bandwidth predict, TPU v5e / H200."""
    columns, on = optimizers_in(tpu), (at(tpu), at(h200))
    both = lambda one, name, key: pair(f"{rows[name, one][key]:.2f}" for rows in on)
    first = ["plain Optax, ms", *(both(c, "optax", "predicted_milliseconds") for c in columns)]
    limit = ["**limit by bytes**", *(bound(on[0]["jamp", c]["limit_ratio"]) for c in columns)]
    body = [[name, *(both(c, name, "predicted_ratio") for c in columns)] for name in names(tpu) if name != "optax"]
    return table(["TPU v5e / H200", *(TITLES[c] for c in columns)], [first, limit, *body])


def bound(limit: float | None) -> str:
    return "" if limit is None else f"{limit:.2f}"


def ahead(rows: Rows) -> str:
    header = ["moved, MB", "kernels", "conditionals", "temporary, MB", "predicted, ms"]
    parts = []
    for optimizer in optimizers_in(rows):
        body = []
        for row in select(rows, optimizer=optimizer):
            moved = f"{number(row['megabytes'], 4)} ({row['bytes_ratio']:.2f})"
            milliseconds = f"{row['predicted_milliseconds']:.2f} ({row['predicted_ratio']:.2f})"
            counts = str(row["kernels"]), str(row["conditionals"]), number(row["temporary_megabytes"])
            body.append([row["name"], moved, *counts, milliseconds])
        parts.append(table([TITLES[optimizer], *header], body))
    return "\n\n".join(parts)


def aims(tpu: Rows, h200: Rows, measured: Rows) -> str:
    """Whether jamp is within 5 % of the limit."""
    body = []
    on = {"TPU v5e, predicted": (tpu, "predicted_ratio"), "H200, predicted": (h200, "predicted_ratio")}
    on |= {"XLA:CPU, measured": (largest(measured), "ratio")}
    for optimizer in optimizers_in(tpu):
        limit = at(tpu)["jamp", optimizer]["limit_ratio"]
        if limit is not None:
            found = [(at(rows)["jamp", optimizer], key) for rows, key in on.values()]
            body.append([TITLES[optimizer], bound(limit), *(verdict(row, key, limit) for row, key in found)])
    return table(["jamp beside plain Optax", "limit", *on], body)


def verdict(row: dict[str, Any], key: str, limit: float) -> str:
    if row[key] <= WITHIN * limit:
        return f"{row[key]:.2f}, met"
    return f"{row[key]:.2f}, **missed**" if row.get("difference", True) else f"{row[key]:.2f}, within the noise"


def largest(rows: Rows) -> Rows:
    """At 40 leaves, of each optimizer the size at which most libraries were timed; float32 gradients."""
    rows = [row for row in rows if row["leaves"] == 40 and row["grads"] == "float32"]
    sizes = [(row["optimizer"], row["millions"]) for row in rows if "framework" not in row]
    best = {name: max((s for s in sizes if s[0] == name), key=lambda s: (sizes.count(s), s)) for name, _ in sizes}
    return [row for row in rows if (row["optimizer"], row["millions"]) == best[row["optimizer"]]]


def step(rows: Rows) -> str:
    """Every library and optimizer, at the largest size at which all were timed."""
    shown = largest(rows)
    columns, found = optimizers_in(shown), at(shown)
    first = ["plain Optax, ms", *(number(found["optax", c]["milliseconds"]) for c in columns)]
    size = ["parameters, millions", *(number(found["optax", c]["millions"]) for c in columns)]
    limit = ["**limit by bytes**", *(bound(found["jamp", c]["limit_ratio"]) for c in columns)]
    body = []
    for name in names(shown):
        own = next((row["framework"] for row in shown if row["name"] == name and "framework" in row), "")
        if name not in ("optax", own):
            label = "plain Optax again (A/A)" if name == AGAIN else f"{name} (beside plain {own})" if own else name
            body.append([label, *(cell(found.get((name, c))) for c in columns)])
    return table(["", *(TITLES[c] for c in columns)], [size, first, limit, *body])


def sizes(rows: Rows) -> str:
    """Every size, each library that was timed at it."""
    rows = [row for row in rows if row["grads"] == "float32" and "framework" not in row and row["name"] in FEW[1:]]
    rows = [row for row in rows if row["limit_ratio"]]
    columns, body = optimizers_in(rows), []
    # First along the parameters, then along the leaves.
    for leaves, millions in sorted({(r["leaves"], r["millions"]) for r in rows}, key=lambda s: (s[0] != 40, s)):
        found = at([row for row in rows if (row["leaves"], row["millions"]) == (leaves, millions)])
        for name in FEW[1:]:
            cells = [cell(found.get((name, c))) for c in columns]
            body.append([f"{number(millions, 2)} M, {leaves}", "A/A" if name == AGAIN else name, *cells])
    return table(["parameters, leaves", "", *(TITLES[c] for c in columns)], body)


def half(rows: Rows) -> str:
    rows = [row for row in rows if row["grads"] != "float32"]
    found = {(row["name"], row["grads"]): row for row in rows}
    columns = list(dict.fromkeys(row["grads"] for row in rows))
    first = ["plain Optax, ms", *(number(found["optax", c]["milliseconds"]) for c in columns)]
    body = [[name, *(cell(found[name, c]) for c in columns)] for name in names(rows) if name != "optax"]
    return table(["AdamW, gradients of", *columns], [first, *body])


def costs(rows: Rows) -> str:
    """Tracing, compiling, dispatching and memory, AdamW."""
    rows = [row for row in largest(rows) if row["optimizer"] == "adamw" and "framework" not in row]
    header = ["", "trace, s", "compile, s", "dispatch, ms", "temporary, MB", "peak, MB"]
    fields = ("trace_seconds", "compile_seconds", "dispatch_milliseconds", "temporary_megabytes", "peak_megabytes")
    return table(header, [[row["name"], *(number(row[f]) for f in fields)] for row in rows])


def cost(tpu: Rows, h200: Rows) -> str:
    """The README's table."""
    columns, on = optimizers_in(tpu)[:3], (at(tpu), at(h200))
    both = lambda name, c: " / ".join(f"{rows[name, c]['predicted_ratio']:.2f}" for rows in on)
    first = ["limit by bytes", *(bound(on[0]["jamp", c]["limit_ratio"]) for c in columns)]
    body = [[name, *(both(name, c) for c in columns)] for name in FIRST[1:]]
    return table(["TPU v5e / H200", *(TITLES[c] for c in columns)], [first, *body])


def speed(tpu: Rows, h200: Rows, measured: Rows) -> str:
    """The comparison's table: AdamW, predicted for accelerators and measured on a CPU."""
    on, cpu = (at(tpu), at(h200)), at(largest(measured))
    body = [
        [where, *(f"{rows[name, 'adamw']['predicted_ratio']:.2f}" for name in FIRST[1:])]
        for where, rows in zip(("TPU v5e, predicted", "H200, predicted"), on, strict=True)
    ]
    body.append(["XLA:CPU, measured", *(f"{cpu[name, 'adamw']['ratio']:.2f}" for name in FIRST[1:])])
    return table(["AdamW", *FIRST[1:]], body)


def train(rows: Rows) -> str:
    columns = [name for name in names(rows) if name != "optax"]
    body = []
    for model, batch in dict.fromkeys((row["model"], row["batch"]) for row in rows):
        found = {row["name"]: row for row in rows if (row["model"], row["batch"]) == (model, batch)}
        label = f"{model}, {batch}: {number(found['optax']['milliseconds'])}"
        body.append([label, *(cell(found.get(name)) for name in columns)])
    short = ("A/A" if is_again({"name": name}) else name for name in columns)
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
