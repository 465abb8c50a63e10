"""Gradients of a loss over a large vocabulary: whole logits, checkpointed chunks, its peers and `jamp.chunked_sum`.

    python -m benchmarks.memory.vocabulary h200 --json docs/benchmarks/vocabulary_h200.json  needs "jax[cuda13]"
    python -m benchmarks.memory.vocabulary tpu --json docs/benchmarks/vocabulary_tpu.json    needs libtpu
    python -m benchmarks.memory.vocabulary cpu --json docs/benchmarks/vocabulary_cpu.json    times a small one, here

They are the gradients of a cross entropy for the head and the hidden rows: in bfloat16, or of float32 arrays under
autocast to bfloat16. Products are those of the compiled program, a loop's once. Of the bytes to and from main memory, a
loop's count as often as it runs. The CPU's step is in float32, with an update in place. Without `pip install tokamax`,
its rows are left out. In its kernel for TPUs, neither products nor what it reads again are counted.
"""

from functools import partial
from importlib import util
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jamp
from benchmarks import hlo
from benchmarks.ahead_of_time import compiled, does_not_fit
from benchmarks.memory.large_models import AHEAD
from benchmarks.models import cast, sgd_step
from benchmarks.record import Rows, parser, record, show, write
from benchmarks.timing import Case, across, compare

BF16, FORMS = jnp.bfloat16, ("take_along_axis", "where")


class Head(NamedTuple):
    """A problem, and the rows of a chunk."""

    rows: int
    width: int
    words: int
    chunks: tuple[int, ...] = (4096, 2048, 1024)

    def make(self, dtype: Any = jnp.float32) -> tuple[Any, tuple[jax.Array]]:
        """The head and the hidden rows, and the targets."""
        weight, hidden, targets = jax.random.split(jax.random.key(0), 3)
        head = 0.02 * jax.random.normal(weight, (self.width, self.words), dtype)
        x = jax.random.normal(hidden, (self.rows, self.width), dtype)
        return (head, x), (jax.random.randint(targets, (self.rows,), 0, self.words),)


SMALL, ON_CPU = Head(64, 16, 128, (32, 16, 8)), Head(2048, 256, 16384, (1024, 512, 256))
LARGEST = Head(32768, 2560, 128256)
HEADS = {"GPT-2": Head(8192, 768, 50257), "Llama 3": Head(8192, 4096, 128256), "Llama 3, 32,768 rows": LARGEST}


def loss_sum(head: jax.Array, x: jax.Array, y: jax.Array, *, form: str, dtype: Any = None) -> jax.Array:
    """Cross entropy, whose form is how the logit of the target is read."""
    logits = (cast(x, dtype) @ cast(head, dtype)).astype(jnp.float32)
    if form == "take_along_axis":
        return jnp.sum(jax.nn.logsumexp(logits, 1) - jnp.take_along_axis(logits, y[:, None], 1)[:, 0])
    one_hot = jnp.arange(logits.shape[1]) == y[:, None]
    chosen = jnp.where(one_hot, logits, 0) if form == "where" else one_hot.astype(jnp.float32) * logits
    return jnp.sum(jax.nn.logsumexp(logits, 1) - chosen.sum(1))


def split(size: int, *rows: jax.Array) -> Any:
    return tuple(x.reshape(-1, size, *x.shape[1:]) for x in rows)


def in_chunks(fun: Any, size: int, head: jax.Array, *rows: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda total, x: (total + fun(head, *x), None), jnp.float32(0), split(size, *rows))[0]


def tiled(fun: Any, size: int, *args: jax.Array) -> Any:
    """As MaxText's vocabulary_tiling.py does (d60bb24e9, 2026-08-20): a loop forward, and one backward from the logits.

    The gradient of the head is added up in its own dtype.
    """
    total = jax.custom_vjp(partial(in_chunks, fun, size))

    def backward(kept: Any, cotangent: jax.Array) -> Any:
        head, x, y = kept

        def add(total: jax.Array, rows: Any) -> Any:
            of_head, of_rows = jax.grad(fun, (0, 1))(head, *rows)
            return total + of_head, of_rows

        of_head, of_rows = jax.lax.scan(add, jnp.zeros_like(head), split(size, x, y))
        return (of_head * cotangent).astype(head.dtype), (of_rows * cotangent).reshape(x.shape).astype(x.dtype), None

    total.defvjp(lambda *args: (total(*args), args), backward)
    return total(*args)


def by_tokamax(kind: str, head: jax.Array, x: jax.Array, y: jax.Array) -> Any:
    import tokamax

    return tokamax.linear_softmax_cross_entropy_loss(x, y, head, implementation=kind)


def for_v5e(grad: Any) -> Any:
    """With what tokamax's kernel asks of a TPU that is not there."""
    from tokamax import config

    def traced(*args: Any) -> Any:
        device = jax.sharding.AbstractDevice(platform="tpu", device_kind="TPU v5 lite", num_cores=1)
        mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
        with config.cross_compile(True), jax.sharding.use_abstract_mesh(mesh):
            return grad(*args)

    return traced


def ways(sizes: tuple[int, ...], form: str, half: bool = False, target: str = "") -> dict[str, Any]:
    """By name, losses `(head and hidden rows, targets)`. With `half`, products of float32 arrays are in bfloat16.

    With a target, those of peers too.
    """
    auto = partial(jamp.autocast, compute_dtype=BF16) if half else lambda fun: fun
    mean = lambda fun: lambda params, y: fun(*params, y) / len(y)
    fun, size = partial(loss_sum, form=form), sizes[1]
    found = {"whole logits": auto(mean(fun))}
    found[f"jax.checkpoint, chunks of {size}"] = auto(mean(partial(in_chunks, jax.checkpoint(fun), size)))
    if target and form == "where":  # their forms are their own
        one_hot = partial(loss_sum, form="one_hot", dtype=BF16 if half else None)
        found[f"MaxText's tiling, chunks of {size}"] = mean(partial(tiled, one_hot, size))
        if util.find_spec("tokamax") and not half:
            kinds = ("chunked_xla", "mosaic_tpu") if target == "tpu" else ("chunked_xla",)
            found |= {f"tokamax, {kind}": mean(partial(by_tokamax, kind)) for kind in kinds}
    return found | {f"jamp.chunked_sum, chunks of {n}": auto(mean(jamp.chunked_sum(fun, n))) for n in sizes}


def ahead(target: str, quick: bool) -> Rows:
    """Temporary memory, products, and the bytes to and from main memory."""
    rows: Rows = []
    for model, head in {"small": SMALL}.items() if quick else HEADS.items():
        for dtype, form in ((dtype, form) for dtype in (BF16, jnp.float32) for form in FORMS):
            params, targets = jax.eval_shape(partial(head.make, dtype))
            for name, fun in ways(head.chunks, form, dtype != BF16, target).items():
                row = {"model": model, **head._asdict(), "dtype": jnp.dtype(dtype).name, "form": form, "name": name}
                grad = jax.value_and_grad(fun)
                grad = for_v5e(grad) if "mosaic_tpu" in name else grad
                rows.append(row | facts(target, grad, params, *targets))
                show(rows[-1])
    return rows


def facts(target: str, fun: Any, *args: Any) -> dict[str, Any]:
    try:
        program = compiled(target, fun, *args, options=AHEAD[target][-1])
    except jax.errors.JaxRuntimeError as error:
        return {"outcome": "does not fit", "temporary_megabytes": does_not_fit(error) / 1e6}
    text, temporary = program.as_text(), program.memory_analysis().temp_size_in_bytes
    moved, products = hlo.count(text).bytes / 1e9, hlo.products(text)
    return {"temporary_megabytes": temporary / 1e6, "main_memory_gigabytes": moved, "products": products}


def timed(form: str, quick: bool) -> Rows:
    head = SMALL if quick else ON_CPU
    (params, args), found = head.make(), ways(head.chunks, form, target="cpu")
    found = {"whole logits": found["whole logits"], "whole logits, again": found["whole logits"]} | found
    return compare([Case(name, partial(sgd_step, fun), params, args) for name, fun in found.items()], 1 if quick else 5)


if __name__ == "__main__":
    arguments = parser("benchmarks.memory.vocabulary", __doc__)
    arguments.add_argument("target", choices=[*AHEAD, "cpu"])
    options = arguments.parse_args()
    jax.config.update("jax_platforms", "cpu")
    target, quick = options.target, options.quick
    about = record("benchmarks.memory.vocabulary", quick, target, ("tokamax",))
    if target == "cpu":
        rows = [row for x in FORMS[quick:] for row in across({"form": x}, timed, x, quick, quick=quick)]
    else:
        rows = ahead(target, quick)
    write(options.json, about | {"rows": rows})
