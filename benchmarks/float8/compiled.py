"""What the compilers for an H200 and a TPU v5e make of 8-bit gradients: products, kernels and memory.

A product of the head has an axis of `CLASSES`, and one of attention has a batch axis. All others are products of the
layers.
"""

import math
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax

from benchmarks import hlo
from benchmarks.ahead_of_time import compiled, facts, kept
from benchmarks.float8.models import CLASSES, GRADIENTS, MODELS, PEERS, Model, wrapped
from benchmarks.hlo import Instruction, computations, running
from benchmarks.record import Rows, show

# With its default of 16384, XLA's own fusion of an int8 ragged product does not fit, and compiling fails.
SCOPED = {"xla_tpu_scoped_vmem_limit_kib": "20480"}
PACKAGES = ("equinox", "dm-haiku", "qwix", "jax-cuda13-plugin")
RATIOS = {"temporary_megabytes": "temporary", "kernels": "kernel_ratio", "kept_megabytes": "kept"}


class Product(NamedTuple):
    """A matrix product of a compiled program."""

    flops: int  # in all iterations of the loops around it
    is_low: bool  # float8 or int8
    is_layer: bool  # not the head, and not attention


def shape(text: str) -> tuple[str, list[int]]:
    dtype, sizes = re.findall(r"(\w+)\[([\d,]*)\]", text)[0]
    return dtype, [int(n) for n in sizes.split(",") if n]


def numbers(text: str, name: str) -> list[int]:
    """The axes that a product sums, or its batch axes, as a library call or as a dot writes them."""
    found = re.search(rf'"{name}_dimensions":\[([^\]]*)\]|{name}_dims=\{{([^}}]*)\}}', text)
    return [int(n) for n in re.findall(r"\d+", found[0].partition("_dim")[2])] if found else []


def products(programs: dict[str, list[Instruction]]) -> list[Product]:
    """The calls of cuBLAS, and the products that XLA compiles itself."""
    found = []
    for name, times, _ in running(programs):
        types = {x.name: x.type for x in programs[name]}
        for _, type_, kind, operands, rest in programs[name]:
            if kind != "dot" and 'custom_call_target="__cublas' not in rest:
                continue
            (left, sizes), (right, others) = (shape(types[x]) for x in (operands * 2)[:2])
            _, out = shape(type_)
            flops = 2 * times * math.prod(out) * math.prod(sizes[i] for i in numbers(rest, "lhs_contracting"))
            is_low = left[:2] == right[:2] and left[:2] in ("f8", "s8")
            is_layer = CLASSES not in sizes + others and not numbers(rest, "lhs_batch")
            found.append(Product(flops, is_low, is_layer))
    return found


def share(found: list[Product]) -> float:
    """The part of the operations that is in 8 bit."""
    return sum(p.flops for p in found if p.is_low) / max(sum(p.flops for p in found), 1)


def gradient(fun: Any, params: Any, batch: Any) -> dict[str, Any]:
    """What the compiler for an H200 makes of a gradient."""
    program = compiled("h200", jax.grad(fun), params, batch)
    programs = computations(program.as_text())
    found = products(programs)
    return {
        "float8_gemms": sum(p.is_low for p in found),
        "gemms": len(found),
        "layer_share": share([p for p in found if p.is_layer]),
        "share": share(found),
        "temporary_megabytes": facts(program)["temporary_megabytes"],
        "kernels": sum(kernels(programs).values()),
        "arguments": sum(x.kind == "parameter" for x in programs["ENTRY"]),
        "kept_megabytes": kept(fun, params, batch),
    }


def kernels(programs: dict[str, list[Instruction]]) -> Counter[int]:
    """How many there are, by how often they run."""
    found: Counter[int] = Counter()
    for name, times, is_fused in running(programs):
        found[times] += 0 if is_fused else sum(x.kind in ("fusion", "custom-call") for x in programs[name])
    return found


def compare(model: str, ways: dict[str, Callable[[], Model]]) -> Rows:
    """A row for each way to compute the gradient of a model, beside that of the first."""
    rows: Rows = []
    for way, make in ways.items():
        row: dict[str, Any] = {"model": model, "way": way}
        try:
            row |= gradient(*make())
        except Exception as error:  # of a package that is not there, or of its code: the row says which
            row["error"] = f"{type(error).__name__}: {error}"
        else:
            first = rows[0] if rows and "error" not in rows[0] else row
            row |= {ratio: row[name] / first[name] for name, ratio in RATIOS.items()}
            row["state_leaves"] = row["arguments"] - first["arguments"]
        rows.append(row)
        show(row)
    return rows


def h200(quick: bool, only: list[str]) -> dict[str, Rows]:
    rows: Rows = []
    for model in [name for name in MODELS if any(part in name for part in only or [""])][: 1 if quick else None]:
        rows += compare(model, {name: partial(wrapped, MODELS[model], **how) for name, how in GRADIENTS.items()})
    if quick:
        wrong = [
            row
            for row in rows
            if row["way"] not in ("bfloat16", "int8") and (row["layer_share"] < 0.95 or row["state_leaves"])
        ]
        assert not wrong, f"Expected float8 in 95 % of the layers' products, and no state. Got {wrong}"
    if quick or (only and "peers" not in only):
        return {"rows": rows}
    peers = compare("Linen transformer", {way: make for way, (_, make) in PEERS.items()})
    return {"rows": rows, "peers": [{"lines": PEERS[row["way"]][0]} | row for row in peers]}


def tpu(quick: bool, only: list[str]) -> dict[str, Rows]:
    """Products by the dtypes of their operands, temporary memory, and the bytes and kernels of main memory."""
    rows: Rows = []
    for model in [name for name in MODELS if any(part in name for part in only or [""])][: 1 if quick else None]:
        first: dict[str, float] = {}
        for way in ("bfloat16", "int8"):
            loss, params, batch = wrapped(MODELS[model], **GRADIENTS[way])
            program = compiled("tpu", jax.grad(loss), params, batch, options=SCOPED if "ragged" in model else None)
            count, found = hlo.count(program.as_text()), hlo.products(program.as_text())
            measured = {
                "temporary": facts(program)["temporary_megabytes"],
                "bytes": count.bytes,
                "kernels": count.kernels,
            }
            first = first or measured
            ratios = {name: measured[name] / first[name] for name in measured}
            rows.append(
                {"model": model, "way": way, "int8": found.get("s8 x s8", 0), "products": sum(found.values())} | ratios
            )
            show(rows[-1])
    return {"rows": rows}
