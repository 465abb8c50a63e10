"""`chunked_sum`: the transformation, and what it can tell about the function."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.tree_util import keystr

from jamp._arguments import Call, check_function
from jamp._cast import is_floating, is_inexact
from jamp._chunked_sum.primitive import Chunks, chunked_sum_p
from jamp._chunked_sum.rows import FACTOR, check
from jamp._jaxprs import build
from jamp._jaxprs.ir import ClosedJaxpr
from jamp._jaxprs.manual_axes import varying, varying_together
from jamp._numbers import as_number

R = TypeVar("R")


def chunked_sum(fun: Callable[..., R], chunk_size: int, *, axis: int = 0) -> Callable[..., R]:
    """Compute a sum over rows some rows at a time, and its gradient in the same pass.

    It is for losses over a large vocabulary: logits exist for `chunk_size` rows, and no product runs twice. `fun` is a
    function of params and rows that adds up what it computes for each row: cross entropy, distillation, DPO, GRPO. The
    rows are divided into chunks, and the results for the chunks are added. While the loss is computed, so are its
    gradients with respect to the params and the floating-point rows. The backward pass multiplies them by the
    cotangent of the sum. Without differentiation, nothing of the gradient is computed.

    Rows must not interact. A result is a sum over rows of what is computed from each row alone, or linear in such sums.
    Anything else is an error that names your line: an average over rows, a function of a sum that is not linear, a
    maximum, softmax, sort or cumulative sum over rows, a row that reads other rows or its place among them, and a term
    that depends on no row. So divide outside, as in the example: by the number of rows, or by the sum of a mask as an
    auxiliary result. What jamp cannot follow is not an error: a kernel, a callback, and a `fun` that cannot be traced
    with three times as many rows or then has other operations, as a Python loop over rows has.

    The form of the loss matters as much as the chunks. `jnp.where(jnp.arange(n) == y[:, None], logits, 0).sum(-1)`
    reads the target's logit in half the memory of `jnp.take_along_axis`, whose gradient is a scatter into zeros.

    Args:
      fun: A function of params and rows that returns a floating-point number, or a pair of one and an auxiliary pytree
        of numbers, each summed over the rows. What it closes over is differentiated too.
      chunk_size: The largest number of rows that are computed at a time. If a number between half of it and itself
        divides the rows, chunks have that size. Otherwise the last chunk is smaller, and `fun` is compiled twice.
      axis: The axis of the rows, in every array of the rows. Chunk i of k has the rows i, i + k, i + 2k, and so on, so
        that rows that are sharded over devices stay where they are, if `chunk_size` is a multiple of the devices.

    Returns:
      A function `(params, *rows)` with the results of `fun`. Params and rows are pytrees of arrays, or modules. A
      random key in the params is the same in each chunk: pass one key for each row. Gradients of params are added in at
      least float32, and have the dtypes of the params. Auxiliary results have no derivative. Use it under `jax.grad`,
      `jit`, `vmap`, `scan`, `shard_map`, `autocast` and `recompute`, and put `autocast` around or inside. In float16
      each chunk scales its own backward pass, as `jamp.scaled` does. `jax.checkpoint` around it computes all of it
      again. Use a `vmap` of its gradient, not the gradient of a `vmap`, which computes each chunk twice and needs a
      loss scale in float16. Outside `jit`, it is traced at every call.

    Raises:
      TypeError: If `fun` is not a function. When called, if it returns something else, or there are no rows.
      ValueError: If `chunk_size` is not positive, or `axis` is not an int. When called, if rows differ in size or
        interact, if `fun` changes a Variable of a module, or closes over arrays inside a `shard_map`.

    Examples:
      >>> import jax, jax.numpy as jnp, jamp
      >>> def loss_sum(head, hidden, targets):
      ...     logits = (hidden @ head).astype(jnp.float32)
      ...     chosen = jnp.where(jnp.arange(logits.shape[-1]) == targets[:, None], logits, 0).sum(-1)
      ...     return jnp.sum(jax.nn.logsumexp(logits, -1) - chosen)
      >>> def loss(head, hidden, targets):
      ...     return jamp.chunked_sum(loss_sum, 1024)(head, hidden, targets) / len(targets)
      >>> head, hidden, targets = jnp.ones((64, 5000)), jnp.ones((8192, 64)), jnp.zeros(8192, jnp.int32)
      >>> compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(head, hidden, targets).compile()
      >>> logits = 8192 * 5000 * 4  # bytes
      >>> compiled.memory_analysis().temp_size_in_bytes < logits / 2
      True

    References:
      Hsu et al., Liger Kernel: Efficient Triton Kernels for LLM Training, 2024 (FusedLinearCrossEntropy), for the
      gradient in the forward pass.
    """
    check_function(fun, "jamp.chunked_sum({}, 1024)")
    chunk_size, axis = as_number(chunk_size), as_number(axis)
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
        raise ValueError(f"chunk_size must be an int of at least 1, got {chunk_size!r}.")
    if isinstance(axis, bool) or not isinstance(axis, int):
        raise ValueError(f"axis must be an int, such as axis=0, got {axis!r}.")

    @functools.wraps(fun)
    def summed(params: Any, *rows: Any) -> R:
        call = Call((params, *rows), {})
        function = _Function(fun, call, axis)
        count, size, rest = _split(function.rows, chunk_size)
        results = function.sums(0, count, size)
        if rest:
            results = [x + y for x, y in zip(results, function.sums(count * size, 1, rest), strict=True)]
        result: R = call.finish(results)
        return result

    return summed


class _Function:
    """A function and its arguments.

    Attributes:
      rows: The number of rows.
    """

    def __init__(self, fun: Callable[..., Any], call: Call, axis: int):
        self._fun, self._call = fun, call
        # Inside a shard_map, what is added up over devices is added once, and not in each chunk.
        self._leaves = _vary_alike(call.leaves)
        is_row = [path[1].idx > 0 for path in call.paths]
        self._shared = [i for i, x in enumerate(is_row) if not x]
        self._of_rows = [i for i, x in enumerate(is_row) if x]
        self._axes = {i: _axis(call, i, axis) for i in self._of_rows}
        sizes = {_name(call, i): self._leaves[i].shape[a] for i, a in self._axes.items()}
        if not sizes:
            raise TypeError("chunked_sum got no rows. Write jamp.chunked_sum(fun, 1024)(params, x, y).")
        if len(set(sizes.values())) > 1:
            found = ", ".join(f"{path} has {n}" for path, n in sizes.items())
            raise ValueError(f"The rows must have one size along axis {axis}, but {found}.")
        self.rows = next(iter(sizes.values()))

    def sums(self, start: int, count: int, size: int) -> list[Array]:
        """The sums over some chunks of a size."""
        before = self._traces_to_compare(size) if start == 0 else []
        closed = self._trace(size)  # last, because `call` holds the structure of the results of its last trace
        _check_results(self._fun, self._call, closed)
        self._check_closure(closed.consts)
        if before:
            longer, fewer = [*before, closed][:2]
            _check_shapes(closed, longer, size)
            check(longer, fewer, [i in self._axes for i in range(len(self._leaves))], size)
        split = [self._split(i, start, count, size) for i in self._of_rows]
        shared = [*closed.consts, *(self._leaves[i] for i in self._shared)]
        jaxpr = closed.jaxpr
        inputs = [*jaxpr.constvars, *(jaxpr.invars[i] for i in (*self._shared, *self._of_rows))]
        body = build.closed_jaxpr({}, inputs, jaxpr.outvars, jaxpr.eqns)
        chunks = Chunks(count, len(shared), tuple(self._axes[i] for i in self._of_rows))
        results: list[Array] = chunked_sum_p.bind(*shared, *split, jaxpr=body, chunks=chunks, wanted=())
        return results

    def _trace(self, size: int) -> ClosedJaxpr:
        types = list(map(jax.typeof, self._leaves))
        for i, axis in self._axes.items():
            shape = types[i].shape
            types[i] = types[i].update(shape=(*shape[:axis], size, *shape[axis + 1 :]))
        return self._call.trace(self._fun, "chunked_sum", types)

    def _traces_to_compare(self, size: int) -> list[ClosedJaxpr]:
        """A trace with more rows, and one with fewer unless they are `size`. None if it is a function of `size` rows.

        One row is too few, because its axis may be broadcast or dropped.
        """
        try:
            return [self._trace(n) for n in ([FACTOR * size] if size > 1 else [FACTOR * 2, 2])]
        except (AssertionError, TypeError, ValueError):
            return []

    def _split(self, i: int, start: int, count: int, size: int) -> Array:
        """Rows, as [.., size, count, ..]. A chunk has every `count`th."""
        x, axis = self._leaves[i], self._axes[i]
        if count * size != x.shape[axis]:
            x = lax.slice_in_dim(x, start, start + count * size, axis=axis)
        return x.reshape(*x.shape[:axis], size, count, *x.shape[axis + 1 :])

    def _check_closure(self, constants: Sequence[Any]) -> None:
        around = frozenset[str]().union(*(varying(jax.typeof(x)) for x in self._leaves))
        if any(is_inexact(x) and around - varying(jax.typeof(x)) for x in constants):
            raise ValueError("Inside a shard_map, chunked_sum takes no closed-over arrays. Pass them in its params.")


def _check_results(fun: Callable[..., Any], call: Call, closed: ClosedJaxpr) -> None:
    """Raise unless a function returns a real number, or a pair of one and an aux, and changes nothing else."""
    structure = call.result_structure
    if len(closed.out_avals) > structure.num_leaves:
        raise ValueError(
            f"{getattr(fun, '__name__', fun)} changes a Variable, which no chunk may. Pass random keys as rows, and "
            "compute statistics outside."
        )
    result = jax.tree.unflatten(structure, closed.out_avals)
    pair = isinstance(result, tuple) and len(result) == 2
    total, aux = result if pair else (result, None)
    if not (hasattr(total, "shape") and total.shape == () and is_floating(total)):
        got = f"{total.dtype}{list(total.shape)}" if hasattr(total, "shape") else f"a {type(total).__name__}"
        name = getattr(fun, "__name__", fun)
        raise TypeError(f"{name} must return a number, or (number, aux), summed over its rows, got {got}.")
    for path, x in jax.tree_util.tree_flatten_with_path(aux)[0]:
        if not (jnp.issubdtype(x.dtype, jnp.number) or x.dtype == jax.dtypes.float0):
            raise TypeError(f"aux{keystr(path)} must be a number to be summed, got {x.dtype}. Count with jnp.sum.")


def _check_shapes(closed: ClosedJaxpr, longer: ClosedJaxpr, size: int) -> None:
    """Raise if a result has a value for each row."""
    for x, y in zip(closed.out_avals, longer.out_avals, strict=False):
        if x.shape != y.shape:
            raise TypeError(f"aux must be summed over the {size} rows, got shape {x.shape}. Compute it outside.")


def _vary_alike(leaves: Sequence[Any]) -> list[Any]:
    places = [i for i, x in enumerate(leaves) if is_inexact(x)]
    others = frozenset[str]().union(*(varying(jax.typeof(x)) for x in leaves))
    return build.replaced(leaves, places, varying_together([leaves[i] for i in places], others))


def _axis(call: Call, i: int, axis: int) -> int:
    shape = jnp.shape(call.leaves[i])
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"{_name(call, i)} must have axis {axis}, got shape {shape}. Pass what rows share in params.")
    return axis % len(shape)


def _name(call: Call, i: int) -> str:
    _, argument, *rest = call.paths[i]
    return f"rows[{argument.idx - 1}]{keystr(tuple(rest))}"


def _split(rows: int, chunk_size: int) -> tuple[int, int, int]:
    """The number of chunks, their size, and the rows that are left.

    None are left if a divisor of `rows` is at least half of `chunk_size`, so that the function is compiled once.
    """
    if rows <= chunk_size:
        return 1, rows, 0
    size = next((n for n in range(chunk_size, (chunk_size - 1) // 2, -1) if rows % n == 0), chunk_size)
    return rows // size, size, rows % size
