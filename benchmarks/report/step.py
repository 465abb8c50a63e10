"""Tables of the optimizer step and of whole training steps: what the compilers count, and what was timed."""

from collections.abc import Iterable
from typing import Any

from benchmarks.record import Rows
from benchmarks.report.markdown import TITLES, names, number, origin, pivot, select, table
from benchmarks.step.peers import AGAIN
from benchmarks.step.update import FEW, WITHIN
from benchmarks.timing import cell, is_again

FIRST = ("optax", "jamp", "lax.cond by hand", "where by hand", "flax DynamicScale recipe", "optax.apply_if_finite")
Found = dict[tuple[str, Any], dict[str, Any]]


def optimizers_in(rows: Rows) -> list[str]:
    return [name for name in TITLES if name in names(rows, "optimizer")]


def at(rows: Rows, label: str = "optimizer") -> Found:
    """The rows by their name and another label."""
    return {(row["name"], row[label]): row for row in rows}


def cells(found: Found, name: str, columns: list[Any]) -> list[str]:
    return [cell(found.get((name, column))) for column in columns]


def plain(found: Found, columns: list[Any], key: str = "milliseconds") -> list[str]:
    """A measure of plain Optax."""
    return [number(found["optax", column][key]) for column in columns]


def limits(found: Found, columns: list[str]) -> list[str]:
    """The least that a step which may be skipped can take, where it is known."""
    return [f"{limit:.2f}" if (limit := found["jamp", column]["limit_ratio"]) else "" for column in columns]


def pair(texts: Iterable[str]) -> str:
    return "&nbsp;/&nbsp;".join(texts)


def counted(tpu: Rows, h200: Rows) -> str:
    """AdamW: what a step moves, its kernels and its temporaries, TPU v5e / H200."""
    header = ["AdamW, TPU v5e / H200", "moved, GB", "of plain Optax's", "kernels", "temporary, MB"]
    body = []
    for name in FIRST:
        rows = [at(found)[name, "adamw"] for found in (tpu, h200)]
        moved = pair(number(row["megabytes"] / 1e3) for row in rows), pair(f"{row['bytes_ratio']:.2f}" for row in rows)
        temporary = pair(f"{row['temporary_megabytes']:.0f}" for row in rows)
        body.append([name, *moved, pair(str(row["kernels"]) for row in rows), temporary])
    return table(header, body)


def predicted(tpu: Rows, h200: Rows) -> str:
    """Every optimizer and library: the time that bytes, kernels and bandwidth predict, TPU v5e / H200."""
    columns, on = optimizers_in(tpu), (at(tpu), at(h200))
    both = lambda name, key: [pair(f"{found[name, column][key]:.2f}" for found in on) for column in columns]
    first = [["plain Optax, ms", *both("optax", "predicted_milliseconds")]]
    first += [["**limit by bytes**", *limits(on[0], columns)]]
    body = [[name, *both(name, "predicted_ratio")] for name in names(tpu) if name != "optax"]
    return table(["TPU v5e / H200", *map(TITLES.get, columns)], first + body)


def cost(tpu: Rows, h200: Rows) -> str:
    """The README's table."""
    columns, on = optimizers_in(tpu)[:3], (at(tpu), at(h200))
    both = lambda name, column: " / ".join(f"{found[name, column]['predicted_ratio']:.2f}" for found in on)
    body = [["limit by bytes", *limits(on[0], columns)]]
    body += [[name, *(both(name, column) for column in columns)] for name in FIRST[1:]]
    return table(["TPU v5e / H200", *map(TITLES.get, columns)], body)


def machines(tpu: Rows, h200: Rows, measured: Rows) -> dict[str, tuple[Rows, str]]:
    """The rows and what is compared of them."""
    on = {"TPU v5e, predicted": (tpu, "predicted_ratio"), "H200, predicted": (h200, "predicted_ratio")}
    return on | {"XLA:CPU, measured": (largest(measured), "ratio")}


def speed(tpu: Rows, h200: Rows, measured: Rows) -> str:
    """The comparison's table: AdamW, predicted for accelerators and measured on a CPU."""
    ratios = lambda rows, key: (f"{at(rows)[name, 'adamw'][key]:.2f}" for name in FIRST[1:])
    return table(
        ["AdamW", *FIRST[1:]], [[where, *ratios(*found)] for where, found in machines(tpu, h200, measured).items()]
    )


def aims(tpu: Rows, h200: Rows, measured: Rows) -> str:
    """Whether jamp is within 5 % of the limit."""
    on, body = machines(tpu, h200, measured), []
    for optimizer in optimizers_in(tpu):
        limit = at(tpu)["jamp", optimizer]["limit_ratio"]
        if limit is not None:
            found = [(at(rows)["jamp", optimizer], key) for rows, key in on.values()]
            body.append([TITLES[optimizer], f"{limit:.2f}", *(verdict(row, key, limit) for row, key in found)])
    return table(["jamp beside plain Optax", "limit", *on], body)


def verdict(row: dict[str, Any], key: str, limit: float) -> str:
    if row[key] <= WITHIN * limit:
        return f"{row[key]:.2f}, met"
    return f"{row[key]:.2f}, **missed**" if row.get("difference", True) else f"{row[key]:.2f}, within the noise"


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


def largest(rows: Rows) -> Rows:
    """At 40 leaves, of each optimizer the size at which most libraries were timed; float32 gradients."""
    rows = select(rows, leaves=40, grads="float32")
    sizes = [(row["optimizer"], row["millions"]) for row in rows if "framework" not in row]
    best = {name: max((s for s in sizes if s[0] == name), key=lambda s: (sizes.count(s), s)) for name, _ in sizes}
    return [row for row in rows if (row["optimizer"], row["millions"]) == best[row["optimizer"]]]


def step(rows: Rows) -> str:
    """Every library and optimizer, at the largest size at which all were timed."""
    shown = largest(rows)
    columns, found = optimizers_in(shown), at(shown)
    body = [["parameters, millions", *plain(found, columns, "millions")], ["plain Optax, ms", *plain(found, columns)]]
    body.append(["**limit by bytes**", *limits(found, columns)])
    for name in names(shown):
        own = next((row["framework"] for row in shown if row["name"] == name and "framework" in row), "")
        if name not in ("optax", own):
            label = "plain Optax again (A/A)" if name == AGAIN else f"{name} (beside plain {own})" if own else name
            body.append([label, *cells(found, name, columns)])
    return table(["", *map(TITLES.get, columns)], body)


def sizes(rows: Rows) -> str:
    """Every size, each library that was timed at it."""
    rows = [row for row in select(rows, grads="float32") if row["limit_ratio"] and row["name"] in FEW[1:]]
    columns, body = optimizers_in(rows), []
    # First along the parameters, then along the leaves.
    for leaves, millions in sorted({(r["leaves"], r["millions"]) for r in rows}, key=lambda s: (s[0] != 40, s)):
        found = at(select(rows, leaves=leaves, millions=millions))
        for name in FEW[1:]:
            label = [f"{number(millions, 2)} M, {leaves}", "A/A" if name == AGAIN else name]
            body.append(label + cells(found, name, columns))
    return table(["parameters, leaves", "", *map(TITLES.get, columns)], body)


def half(rows: Rows) -> str:
    rows = [row for row in rows if row["grads"] != "float32"]
    found, columns = at(rows, "grads"), names(rows, "grads")
    body = [[name, *cells(found, name, columns)] for name in names(rows) if name != "optax"]
    return table(["AdamW, gradients of", *columns], [["plain Optax, ms", *plain(found, columns)], *body])


def rounding(found: dict[str, Any]) -> str:
    """Of bfloat16 parameters."""
    return pivot(found["rows"], "name", "millions", lambda rows: cell(rows[0]), "{:.0f} M parameters".format)


def costs(rows: Rows) -> str:
    """Tracing, compiling, dispatching and memory, AdamW."""
    rows = [row for row in largest(rows) if row["optimizer"] == "adamw" and "framework" not in row]
    header = ["", "trace, s", "compile, s", "dispatch, ms", "temporary, MB", "peak, MB"]
    fields = ("trace_seconds", "compile_seconds", "dispatch_milliseconds", "temporary_megabytes", "peak_megabytes")
    return table(header, [[row["name"], *(number(row[f]) for f in fields)] for row in rows])


def train(rows: Rows) -> str:
    columns = [name for name in names(rows) if name != "optax"]
    body = []
    for model, batch in dict.fromkeys((row["model"], row["batch"]) for row in rows):
        found = {row["name"]: row for row in select(rows, model=model, batch=batch)}
        label = f"{model}, {batch}: {number(found['optax']['milliseconds'])}"
        body.append([label, *(cell(found.get(name)) for name in columns)])
    short = ("A/A" if is_again({"name": name}) else name for name in columns)
    return table(["model, batch: plain, ms", *short], body)


def models(rows: Rows) -> str:
    """Whole models on a GPU."""
    fields = lambda row: (number(row["milliseconds"]), f"{1 / row['ratio']:.2f}", number(row["peak_megabytes"] / 1e3))
    body = [[row["model"], row["name"], *fields(row)] for row in rows]
    return table(["", "", "ms", "speed-up over float32", "peak, GB"], body)


def imports(rows: Rows) -> str:
    return f"`import jamp` after `import optax` takes {number(rows[0]['milliseconds'])} ms."


def large(rows: Rows) -> str:
    """XLA counts what a loop accesses once, and all layers are one loop: that number is good for comparing alone."""
    body = []
    for row in rows:
        products = ", ".join(f"{n} {types}" for types, n in row["products"].items())
        label = f"{row['model']}, batch {row['batch']}"
        size = number(row["temporary_megabytes"] / 1e3), number(row["gigabytes_accessed"])
        body.append([label, row["name"], *size, products])
    return table(["model", "", "temporary, GB", "accessed, GB, a loop's body once", "products, by operands"], body)


def memory(found: dict[str, Any]) -> str:
    """Temporary memory, what XLA says is accessed, and bytes of main memory, to the model by hand."""
    ways = {
        "autocast": "`autocast`",
        "recompute=False": "`recompute=False`",
        "by hand, dots_saveable": "`dots_saveable` by hand",
    }
    ways["autocast, stream in 16 bit"] = "`autocast`, 16-bit stream"
    body = []
    for model in names(found["rows"], "model"):
        rows = {row["variant"]: row for row in select(found["rows"], model=model)}
        cell = lambda row: f"{row['temporary']:.2f}, {row['accessed']:.2f}, {row['main_memory']:.2f}"
        size = f"{model} ({rows['by hand']['temporary_megabytes'] / 1e3:.1f} GB)"
        body.append([size, *(cell(rows[way]) if way in rows else "" for way in ways)])
    return f"{table(['model', *ways.values()], body)}\n\n{origin(found)}"
