"""float8: where training ends, and what the compiler for an H200 makes of the products.

    python -m benchmarks.float8 accuracy --json docs/benchmarks/float8_accuracy.json   about an hour on one core
    python -m benchmarks.float8 h200 --json docs/benchmarks/float8_h200.json
                                                         needs `pip install "jax[cuda13]" equinox flax dm-haiku qwix`
    python -m benchmarks.float8 micro-batches            needs `pip install "jax[cuda13]"`

accuracy: the language model and the digits of `benchmarks.accuracy`, five seeds, the same weights and batches for each
way to compute. The loss is that of data that are never trained on.
h200: the gradients of `benchmarks.float8_models`, compiled ahead of time, and those of other float8 libraries: how many
matrix products are float8, kernels, and memory. All this is read from the compiled program. A product of the head has
an axis of `CLASSES`, and one of attention has a batch axis. All others are products of the layers.
micro-batches: the kernels of gradient accumulation with and without `jamp.precompute`, in the loop and before it.
"""

import argparse
import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple
from unittest import mock

# As in `benchmarks.memory`.
os.environ.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false")

import jax
import jax.numpy as jnp
import optax
from jax.experimental import topologies

import jamp
from benchmarks.accuracy_setups import FLOAT32
from benchmarks.accuracy_tasks import Task, digits, language_model
from benchmarks.ahead_of_time import TARGETS, on_device
from benchmarks.float8_models import BY_DOCUMENTATION, CLASSES, MODELS, PEERS, Model
from benchmarks.memory import kept
from benchmarks.record import record, write
from jamp._autocast import quantized

SEEDS = 5
TENSOR = jamp.Float8(min_size=16)  # The models of the study are small.
ROW = jamp.Float8(min_size=16, granularity="row")
ALL = {"dot_general": "compute"}


def unscaled(x: Any, dtype: Any, axes: Any = None) -> Any:
    """A plain cast to float8, in place of `quantize`: every scale is 1."""
    x = jax.lax.stop_gradient(x).astype(jnp.float32)
    return x.astype(dtype), jnp.sign(1 + jnp.max(jnp.abs(x), axes, keepdims=axes is not None))


WAYS: dict[str, Callable[[Any], Any]] = {
    "float32": lambda loss: loss,
    "bfloat16": partial(jamp.autocast, compute_dtype=jnp.bfloat16),
    "float8, per tensor": partial(jamp.autocast, compute_dtype=TENSOR),
    "float8, per row": partial(jamp.autocast, compute_dtype=ROW),
    "float8, per tensor, head and attention too": partial(jamp.autocast, compute_dtype=TENSOR, rules=ALL),
    "float8, E4M3 gradients": partial(
        jamp.autocast, compute_dtype=jamp.Float8(min_size=16, backward=jnp.float8_e4m3fn)
    ),
    "cast to float8 without scales": partial(jamp.autocast, compute_dtype=TENSOR),
}


def program(task: Task, name: str, example: jax.Array) -> Any:
    """The compiled training of a seed: the loss on held-out data at the end, and the cosine of the first gradient."""
    plain = FLOAT32.make_loss(task)
    loss, tx = WAYS[name](plain), task.optimizer()

    def step(carry: Any, key: jax.Array) -> tuple[Any, None]:
        params, state = carry
        grads = jax.grad(lambda p: loss(p, task.get_batch(task.data, key))[0])(params)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    def run(key: jax.Array) -> dict[str, jax.Array]:
        params = task.init(key)
        batch = task.get_batch(task.data, jax.random.fold_in(key, 1))
        found, true = (jax.grad(lambda p, f=f: f(p, batch)[0])(params) for f in (loss, plain))
        cosine = optax.tree.vdot(found, true) / (optax.tree.norm(found) * optax.tree.norm(true))
        keys = jax.random.split(jax.random.fold_in(key, 2), task.steps)
        (params, _), _ = jax.lax.scan(step, (params, tx.init(params)), keys)
        held_out, accuracy = plain(params, task.held_out)
        return {"held_out_loss": held_out, "accuracy": accuracy, "cosine": cosine}

    replaced = unscaled if "without" in name else quantized.quantize
    with mock.patch.object(quantized, "quantize", replaced):
        return jax.jit(run).lower(example).compile()


def accuracy(quick: bool) -> list[dict[str, Any]]:
    rows = []
    for task in (language_model(quick), digits(quick)):
        for name in WAYS:
            run = program(task, name, jax.random.key(0))
            for seed in range(1 if quick else SEEDS):
                start = time.perf_counter()
                found = {key: float(x) for key, x in run(jax.random.key(seed)).items()}
                rows.append({"task": task.name, "way": name, "seed": seed} | found)
                print(
                    "{task:15s} {way:45s} seed {seed}  held-out loss {held_out_loss:.4f}  accuracy {accuracy:.4f}  "
                    "first gradient's cosine {cosine:.5f}".format(**rows[-1]),
                    f" {time.perf_counter() - start:.0f} s",
                    flush=True,
                )
    return rows


GRADIENTS: dict[str, Callable[[Any], Any]] = {
    "bfloat16": partial(jamp.autocast, compute_dtype=jnp.bfloat16),
    "float8": partial(jamp.autocast, compute_dtype=jamp.Float8()),
    "float8, per row": partial(jamp.autocast, compute_dtype=jamp.Float8(granularity="row")),
    "float8, all products": partial(jamp.autocast, compute_dtype=TENSOR, rules=ALL),
}
PACKAGES = ("equinox", "dm-haiku", "qwix", "jax-cuda13-plugin")
RATIOS = {
    "temporary_megabytes": "temporary",
    "kernels": "kernel_ratio",
    "kept_megabytes": "kept",
}
LABEL = "{model:22s} {way:32s}"
MEASURED = (
    " {float8_gemms:3d} of {gemms:3d} GEMMs float8, of FLOPs: layers {layer_share:.3f} (forward {forward_share:.3f}, "
    "backward {backward_share:.3f}), all {share:.3f}  {temporary_megabytes:5.0f} MB temporary ({temporary:.2f})  "
    "{kernels:4d} kernels ({kernel_ratio:.2f})  {kept_megabytes:5.0f} MB kept ({kept:.2f})  {state_leaves} state leaves"
)


class Product(NamedTuple):
    """A matrix product of a compiled program."""

    flops: int  # in all iterations of the loops around it
    is_float8: bool
    kind: str  # layer, head or attention
    is_backward: bool
    name: str  # its shapes, and what it was traced from


def computations(text: str) -> dict[str, list[str]]:
    """The instructions of each computation of an HLO program."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if head := re.match(r"(ENTRY )?%([\w.-]+) .*\{$", line):
            body = found["ENTRY" if head[1] else head[2]] = []
        elif line.startswith("  "):
            body.append(line)
    return found


def started(bodies: dict[str, list[str]], name: str = "ENTRY", times: int = 1) -> Iterator[tuple[str, int, bool]]:
    """The computations that run, how often, and whether they are the inside of a fusion."""
    yield name, times, False
    for line in bodies[name]:
        inner = re.findall(r"(?:body|condition|to_apply|calls|[a-z]+_computation)=%([\w.-]+)", line)
        if " fusion(" in line:
            yield from ((name, times, True) for name in inner)
        elif branches := re.search(r"branch_computations=\{([^}]*)\}", line):
            inner += re.findall(r"%([\w.-]+)", branches[1])
        if re.search(r" (while|call|conditional|async-start)\(", line):
            trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
            for body in inner:
                yield from started(bodies, body, times * int(trips[1]) if trips else times)


def shape(text: str) -> tuple[str, list[int]]:
    dtype, sizes = re.findall(r"(\w+)\[([\d,]*)\]", text)[0]
    return dtype, [int(n) for n in sizes.split(",") if n]


def numbers(line: str, name: str) -> list[int]:
    """The axes that a product sums, or its batch axes, as a library call or as a dot writes them."""
    found = re.search(rf'"{name}_dimensions":\[([^\]]*)\]|{name}_dims=\{{([^}}]*)\}}', line)
    return [int(n) for n in re.findall(r"\d+", found[0].partition("_dim")[2])] if found else []


def products(bodies: dict[str, list[str]]) -> list[Product]:
    """The calls of cuBLAS, and the products that XLA compiles itself."""
    found = []
    for name, times, _ in started(bodies):
        types = dict(re.findall(r"%([\w.-]+) = ([^ ]+) ", "\n".join(bodies[name])))
        for line in bodies[name]:
            if not re.search(r'custom_call_target="__cublas| dot\(', line):
                continue
            operands = re.findall(r"%([\w.-]+)", re.split(r" (?:custom-call|dot)\(", line)[1].partition(")")[0])[:2]
            (left, sizes), (right, others) = (shape(types[x]) for x in operands)
            _, out = shape(line.partition(" = ")[2])
            flops = 2 * times * math.prod(out) * math.prod(sizes[i] for i in numbers(line, "lhs_contracting"))
            kind = "head" if CLASSES in sizes + others else "layer"
            kind = "attention" if numbers(line, "lhs_batch") else kind
            trace = (re.findall(r'op_name="([^"]*)"', line) or [""])[0]
            is_float8 = "matmul$f8" in line and left.startswith("f8") and right.startswith("f8")
            source = f"{left}{sizes} {right}{others} -> {out} {trace}"
            found.append(Product(flops, is_float8, kind, "transpose(" in trace, source))
    return found


def share(found: list[Product]) -> float:
    """The part of the floating operations that is float8."""
    return sum(p.flops for p in found if p.is_float8) / max(sum(p.flops for p in found), 1)


def gradient(fun: Any, params: Any, batch: Any) -> dict[str, Any]:
    """What the compiler for an H200 makes of a gradient."""
    start = time.perf_counter()
    # What autocast does depends on the platform that JAX runs on.
    with mock.patch("jax.default_backend", return_value="gpu"):
        lowered = jax.jit(jax.grad(fun)).lower(*on_device("h200", (params, batch)))
        kept_megabytes = kept(fun, params, batch)
    compiled = lowered.compile()
    memory: Any = compiled.memory_analysis()
    bodies = computations(compiled.as_text() or "")
    found = products(bodies)
    layers = [p for p in found if p.kind == "layer"]
    lines = [line for name, _, is_fused in started(bodies) if not is_fused for line in bodies[name]]
    return {
        "float8_gemms": sum(p.is_float8 for p in found),
        "gemms": len(found),
        "layer_share": share(layers),
        "forward_share": share([p for p in layers if not p.is_backward]),
        "backward_share": share([p for p in layers if p.is_backward]),
        "share": share(found),
        "convolutions": sum("__cudnn$conv" in line for line in lines),
        "temporary_megabytes": memory.temp_size_in_bytes / 1e6,
        "kernels": sum(" fusion(" in line or " custom-call(" in line for line in lines),
        "arguments": sum(" parameter(" in line for line in bodies["ENTRY"]),
        "kept_megabytes": kept_megabytes,
        "compile_seconds": time.perf_counter() - start,
        "layers_in_16_bit": Counter(p.name for p in layers if not p.is_float8 and share(layers)),
    }


def compare(model: str, ways: dict[str, Callable[[], tuple[Any, Any, Any]]]) -> list[dict[str, Any]]:
    """A row for each way to compute the gradient of a model, beside that of the first."""
    rows: list[dict[str, Any]] = []
    for way, make in ways.items():
        row: dict[str, Any] = {"model": model, "way": way}
        try:
            row |= gradient(*make())
        except Exception as error:  # of a package that is not there, or of its code: the row says which
            rows.append(row | {"error": f"{type(error).__name__}: {error}"})
            print(LABEL.format(**row), rows[-1]["error"].partition("\n")[0][:200], flush=True)
            continue
        first = rows[0] if rows and "error" not in rows[0] else row
        for name, ratio in RATIOS.items():
            row[ratio] = row[name] / first[name]
        row["state_leaves"] = row["arguments"] - first["arguments"]
        rows.append(row)
        print((LABEL + MEASURED).format(**row), flush=True)
        for product, times in row["layers_in_16_bit"].items():
            print(f"{'':22s} {times} in 16 bit: {product}")
    return rows


def h200(quick: bool, only: list[str]) -> dict[str, list[dict[str, Any]]]:
    chosen = [name for name in MODELS if any(part in name for part in only or [""])][: 1 if quick else None]
    rows = []
    for model in chosen:

        def way(of: Callable[[Any], Any], make: Callable[[], Model] = MODELS[model]) -> tuple[Any, Any, Any]:
            loss, params, batch = make()
            return of(loss), params, batch

        rows += compare(model, {name: partial(way, of) for name, of in GRADIENTS.items()})
    if quick:
        wrong = [row for row in rows if row["way"] != "bfloat16" and (row["layer_share"] < 0.95 or row["state_leaves"])]
        assert not wrong, f"Expected float8 in 95 % of the layers' products, and no state. Got {wrong}"
    if quick or (only and "peers" not in only):
        return {"rows": rows}
    peers = compare("Linen transformer", {name: peer.make for name, peer in PEERS.items()})
    table = []
    for row in peers:
        lines, frameworks, note, _ = PEERS[row["way"]]
        table.append({"lines": lines, "frameworks": frameworks, "note": note} | row)
    for row in table:
        print("{way:32s} lines changed: {lines}; frameworks: {frameworks}; {note}".format(**row))
    for row in BY_DOCUMENTATION:
        print("{way:32s} lines changed: {lines}; frameworks: {frameworks}; {note}".format(**row))
    return {"rows": rows, "peers": table + BY_DOCUMENTATION}


def micro_batches() -> list[dict[str, Any]]:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        for w in params[:-1]:
            x = x + jax.nn.gelu(x @ w)
        return jnp.mean((x @ params[-1]) ** 2)

    grad, rows = jax.grad(jamp.autocast(loss, jamp.Float8())), []
    shapes = [jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 4, jax.ShapeDtypeStruct((8, 1024, 512), jnp.float32)

    def accumulate(params: Any, xs: Any, is_precomputed: bool) -> Any:
        of_batch = jamp.precompute(grad, params, xs[0]) if is_precomputed else partial(grad, params)
        add = lambda total, x: (jax.tree.map(jnp.add, total, of_batch(x)), None)
        return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), xs)[0]

    for is_precomputed in (False, True):
        with mock.patch("jax.default_backend", return_value="gpu"):
            lowered = jax.jit(accumulate, static_argnums=2).lower(*on_device("h200", shapes), is_precomputed)
        bodies = computations(lowered.compile().as_text() or "")
        kernels = Counter({1: 0, 8: 0})
        for name, times, is_fused in started(bodies):
            kernels[times] += sum(bool(re.search(r" (fusion|custom-call)\(", x)) for x in bodies[name]) * (not is_fused)
        rows.append({"precompute": is_precomputed, "kernels_once": kernels[1], "kernels_each": kernels[8]})
        print(
            "precompute {precompute!s:5}  {kernels_each} kernels a micro-batch, {kernels_once} once".format(**rows[-1])
        )
    return rows


def versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["accuracy", "h200", "micro-batches"])
    parser.add_argument("--quick", action="store_true", help="few steps and one seed, or one model")
    parser.add_argument("--only", nargs="+", default=[], help="parts of the names of models for h200, or peers")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    device = "cpu" if options.what == "accuracy" else "h200, which was not there"
    found = record("benchmarks.float8", options.quick, device)
    if options.what == "accuracy":
        return write(options.json, found | {"rows": accuracy(options.quick)})
    jax.config.update("jax_platforms", "cpu")
    try:
        topologies.get_topology_desc(**TARGETS["h200"])
    except NotImplementedError:
        return print('The compiler for the H200 is not installed: pip install "jax[cuda13]"')
    found["versions"] |= versions()
    measured = {"rows": micro_batches()} if options.what == "micro-batches" else h200(options.quick, options.only)
    write(options.json, found | measured)


if __name__ == "__main__":
    main()
