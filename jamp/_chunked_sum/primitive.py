"""The primitive `chunked_sum`: a loop over chunks of rows, which adds up what a function returns for each.

For rows `x`, f32[8192,64], in chunks of 1024, and params `w`:

    chunked_sum(w, x as f32[1024,8,64])               the sums; chunk i has the rows x[:, i]
    its derivative: the same primitive with `wanted`  the sums, and the gradients dw, f32, and dx, f32[1024,8,64]
                    sum(dw * tangent of w) + ...      the tangent, whose transpose is ct * dw

So a chunk's logits are computed once, and no chunk's logits outlive it. A chunk has every 8th row: where the rows are
sharded over 4 devices, their first axis is reshaped and not moved.

It is opaque until it is compiled. A scan that JAX differentiates would compute what depends on no row before the loop,
such as the zeros, as large as the logits, to which the transpose of `take_along_axis` adds. And a derivative rule is
traced before an `autocast` around it. The body here is cast first and differentiated then, so in float16 each chunk
chooses the scale of its own backward pass.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jamp._chunked_sum.hoist import hoisted
from jamp._jaxprs import build, constructs, equality, interpret, walk
from jamp._jaxprs.define import define, no_tangent, with_tangents
from jamp._jaxprs.ir import ClosedJaxpr
from jamp._jaxprs.manual_axes import varying, zeros
from jamp._step import retry

_EXPONENT, _RETRIES = 15, 2  # the scale of a backward pass in float16, as in `jamp.scaled`


class Chunks(NamedTuple):
    """How the operands of the primitive are split.

    Attributes:
      number: How many there are.
      shared: How many operands, the first ones, each chunk reads whole. The others are rows.
      axes: The axis of rows of each other operand. Its next axis counts the chunks.
    """

    number: int
    shared: int
    axes: tuple[int, ...]

    def of_chunk(self, operands: Sequence[Any], i: Any) -> list[Any]:
        """The operands for one chunk."""
        rows = zip(operands[self.shared :], self.axes, strict=True)
        pick = lambda x, axis: lax.dynamic_index_in_dim(x, i, axis + 1, keepdims=False)
        return [*operands[: self.shared], *(pick(x, axis) for x, axis in rows)]

    def axis(self, operand: int) -> int | None:
        """The axis of rows of an operand, or None if it has none."""
        return None if operand < self.shared else self.axes[operand - self.shared]


def _run(
    *operands: Any,
    jaxpr: ClosedJaxpr,
    chunks: Chunks,
    wanted: tuple[int, ...],
    retries: int = _RETRIES,
    computes_again: bool = False,
) -> list[Any]:
    """The sums, and the gradients of the first of them with respect to the `wanted` operands.

    If JAX differentiates the loop, a chunk `computes_again` what its derivative needs, or else it is kept.
    """
    body, compute_once = hoisted(jaxpr, chunks.shared)
    constants = compute_once(operands[: chunks.shared])
    sums = len(body.out_avals)
    types = [*body.out_avals, *(jax.typeof(operands[i]) for i in wanted)]
    axes = [None] * sums + [chunks.axis(i) for i in wanted]
    dtypes = [_sum_dtype(t.dtype) if axis is None else _row_dtype(t.dtype) for t, axis in zip(types, axes, strict=True)]

    def compute(*values: Any) -> list[Array]:
        return _value_and_gradients(body, constants, values, wanted, retries)

    if computes_again:
        compute = jax.checkpoint(compute, prevent_cse=False)

    def add(totals: list[Array], i: Array) -> tuple[list[Array], None]:
        found = [jnp.asarray(x, t.dtype) for x, t in zip(compute(*chunks.of_chunk(operands, i)), totals, strict=True)]
        put = lambda x, t, axis: t + x if axis is None else lax.dynamic_update_index_in_dim(t, x, i, axis + 1)
        return list(map(put, found, totals, axes)), None

    totals, _ = lax.scan(add, list(map(zeros, types, dtypes)), jnp.arange(chunks.number))
    return [*(x.astype(t.dtype) for x, t in zip(totals[:sums], types[:sums], strict=True)), *totals[sums:]]


def _value_and_gradients(
    body: ClosedJaxpr, constants: Sequence[Any], operands: Sequence[Any], wanted: Sequence[int], retries: int
) -> list[Array]:
    """The results for one chunk, and the gradients of the first of them."""

    def compute(scale: Array | float, operands: Sequence[Any]) -> list[Array]:
        def fun(*xs: Any) -> tuple[Any, list[Any]]:
            total, *aux = interpret.call(body, [*constants, *build.replaced(operands, wanted, xs)])
            return total, aux

        total, pull_back, aux = jax.vjp(fun, *(operands[i] for i in wanted), has_aux=True)
        gradients = pull_back(jnp.ones_like(total) * jnp.asarray(scale, total.dtype))
        return [total, *aux, *(x.astype(_row_dtype(x.dtype)) for x in gradients)]

    if not wanted:
        return interpret.call(body, [*constants, *operands])
    if not _computes_in_float16(body):
        return compute(1.0, operands)
    are_gradients = (False,) * len(body.out_avals) + (True,) * len(wanted)
    return retry.compute_scaled(compute, operands, retry.Scaling(_EXPONENT, retries, are_gradients))


def _sum_dtype(dtype: Any) -> Any:
    """The dtype in which numbers of a dtype are added."""
    return jnp.dtype(jnp.float32) if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4 else dtype


def _row_dtype(dtype: Any) -> Any:
    """The dtype of a gradient that is still to be multiplied with the cotangent of the sum. Float16 would underflow."""
    return jnp.dtype(jnp.float32) if dtype == jnp.float16 else dtype


def _computes_in_float16(closed: ClosedJaxpr) -> bool:
    atoms = (v for eqn in walk.all_equations(closed.jaxpr) for v in (*eqn.invars, *eqn.outvars))
    return any(getattr(v.aval, "dtype", None) == jnp.float16 for v in atoms)


def _types(*avals: Any, jaxpr: ClosedJaxpr, chunks: Chunks, wanted: tuple[int, ...]) -> tuple[list[Any], Any]:
    dtype = lambda i: (_sum_dtype if chunks.axis(i) is None else _row_dtype)(avals[i].dtype)
    strong = lambda aval, dtype: aval.update(dtype=dtype, weak_type=False)
    sums = [strong(aval, aval.dtype) for aval in jaxpr.out_avals]
    return [*sums, *(strong(avals[i], dtype(i)) for i in wanted)], jaxpr.effects


def _differentiate(
    operands: Sequence[Any], tangents: Sequence[Any], *, wanted: tuple[int, ...], **params: Any
) -> tuple[list[Any], list[Any]]:
    places = with_tangents(tangents)
    if wanted:  # a second derivative, for which JAX differentiates the loop
        run = functools.partial(_run, wanted=wanted, retries=0, **params)
        fun = lambda *xs: run(*build.replaced(operands, places, xs))
        found: tuple[list[Any], list[Any]] = jax.jvp(fun, [operands[i] for i in places], [tangents[i] for i in places])
        return found
    results = chunked_sum_p.bind(*operands, wanted=places, **params)
    sums = results[: len(results) - len(places)]
    no_tangents = list(map(no_tangent, sums))
    if not places:
        return sums, no_tangents
    wide = _sum_dtype(sums[0].dtype)
    dot = lambda g, t: jnp.sum(g.astype(_sum_dtype(g.dtype)) * t.astype(_sum_dtype(g.dtype))).real.astype(wide)
    terms = [dot(g, tangents[i]) for i, g in zip(places, results[len(sums) :], strict=True)]
    tangent = sum(terms[1:], start=terms[0])
    # A gradient holds what one device adds to a sum over all of them.
    axes = tuple(varying(jax.typeof(tangent)) - varying(jax.typeof(sums[0])))
    tangent = lax.psum(tangent, axes) if axes else tangent
    return sums, [tangent.astype(sums[0].dtype), *no_tangents[1:]]


def _batch(axis: Any, operands: Sequence[Any], axes: Sequence[Any], **params: Any) -> tuple[list[Any], list[int]]:
    """A loop over chunks of the batch. The gradient of a sum for each element would be as large as all of theirs."""
    run = functools.partial(_run, computes_again=not params["wanted"], **params)
    mapped = jax.vmap(run, tuple(axes), axis_name=axis.name, axis_size=axis.size, spmd_axis_name=axis.spmd_name)
    results = mapped(*operands)
    return results, [0] * len(results)


class _Key:
    """A jaxpr in the key of a cache. It equals one with the same operations, from any line."""

    def __init__(self, closed: ClosedJaxpr):
        jaxpr = closed.jaxpr
        self.closed = closed
        self._key = equality.fingerprint(jaxpr.invars, jaxpr.outvars, jaxpr.eqns, sources=False)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._key == other._key


@functools.lru_cache(maxsize=64)
def _compiled(key: _Key, **params: Any) -> Callable[..., list[Any]]:
    return jax.jit(functools.partial(_run, jaxpr=key.closed, **params))


def _evaluate(*operands: Any, jaxpr: ClosedJaxpr, **params: Any) -> list[Any]:
    """Outside of `jit`, the function is traced in each call. It is compiled once."""
    return _compiled(_Key(jaxpr), **params)(*operands)


chunked_sum_p = define(
    "chunked_sum", _run, _types, jvp=_differentiate, batch=_batch, multiple_results=True, has_bodies=True
)
chunked_sum_p.def_impl(_evaluate)
constructs.LOOPS["chunked_sum"] = _run
