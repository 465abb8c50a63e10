"""`compare`, which says whether the results of two programs differ by more than rounding, and where they part."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jamp._arguments import Call, leaf_names
from jamp._cast import is_floating
from jamp._jaxprs import interpret
from jamp._jaxprs.ir import ClosedJaxpr
from jamp.debug._align import AlignedProgram, Entry, align, list_entries, pair_up
from jamp.debug._compared_array import FLOAT32, JUMP, ComparedArray, agree, differ_by, relative_difference, roundoff
from jamp.debug._comparison import ComparedRow, Comparison
from jamp.debug._observe import Operation, observe, to_host
from jamp.debug._parting import find_differences, find_region, make_row
from jamp.debug._usage import called_as, check_concrete, naming_states

_CALL = "jamp.debug.compare(fun, other)(params, batch)"


@called_as(_CALL, functions=2)
def compare(fun: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Comparison]:
    """Say whether the results of two functions differ by more than rounding explains, and where the functions part.

    Both run operation by operation, as they are and in float64. What differs in float64 is not rounding. So the order
    of sums, the dtypes and the casts of the functions make no difference, and a test needs no tolerance:
    `assert not jamp.debug.compare(fun, other)(*args)`.

    If the results differ, `compare` follows the difference back to values that both functions compute, in any order
    and layout. A loop may be unrolled in one of them, a batch split into micro-batches, and tokens decoded one by one.
    Of the operations after these values it names those whose constants, arguments or options differ, those that only
    one function has, and the first whose operands agree and whose result does not.

    All values of both functions are kept on the host: use a small batch. A call without a body that can be entered,
    such as a kernel, runs as it is, and its rounding is allowed for. Rounding to integers counts as a difference.

    Args:
      fun: A function of arrays, or pytrees of them, and any other arguments.
      other: A function of the same arguments: before and after a change, sampler and trainer, float32 and autocast, one
        device and several.

    Returns:
      A function of the arguments that returns a `Comparison`. It is false if rounding explains all differences.

    Raises:
      TypeError: If it is called inside `jit` or another transformation.
      ValueError: If the results have different structures.

    Examples:
      >>> import jax, jax.numpy as jnp, jamp.debug
      >>> def before(x):
      ...     return jnp.sum(jax.nn.gelu(x @ x))
      >>> def after(x):
      ...     return jnp.sum(jax.nn.gelu(x @ x, approximate=False))
      >>> found = jamp.debug.compare(before, after)(jnp.linspace(-1, 1, 64).reshape(8, 8))
      >>> bool(found), bool(jamp.debug.compare(before, before)(jnp.ones((8, 8))))
      (True, False)
    """

    def comparison(*args: Any, **kwargs: Any) -> Comparison:
        here, there = (_run(f, args, kwargs) for f in (fun, other))
        if here.tree != there.tree:
            cure = "Return the same part of both, as in compare(lambda x: fun(x)[0], other)."
            raise ValueError(f"compare needs results of one structure, got {here.tree} and {there.tree}. {cure}")
        results = list(zip(here.arrays, there.arrays, strict=True))
        traced = tuple(relative_difference(x.traced, y.traced) for x, y in results)
        without_rounding = tuple(differ_by(x, y)[0] for x, y in results)
        in_float64 = np.dtype(np.float64) in _dtypes(here, there)
        # As observed, float64 code ran in float32.
        differences = tuple(map(relative_difference, here.run(), there.run())) if in_float64 else traced
        differing = [i for i, (x, y) in enumerate(results) if x.value.shape != y.value.shape or not agree(x, y)]
        programs = align(here.operations, there.operations, [here.results, there.results])
        ends = [(programs[0][here.results[i]], programs[1][there.results[i]]) for i in differing]
        for x, y in ends:
            if x.kind == y.kind:  # The same elements, in another order.
                x.kind = y.kind = None
        sides = [find_region(program, [end[k] for end in ends]) for k, program in enumerate(programs)]
        aligned = pair_up(*sides)
        swapped = [make_row(x, y, "the results are other values") for x, y in ends[:1]]
        return Comparison(
            results_part=bool(differing) or np.inf in differences,
            results=differences,
            without_rounding=without_rounding,
            dtype=_dtype(here, there),
            differences=tuple(find_differences(sides, aligned) or swapped),
            rows=tuple(_rows(programs, {id(sides[0][i]): sides[1][j] for i, j in aligned})),
            rounding_is_unknown=in_float64 and np.inf in traced and np.inf not in without_rounding,
        )

    return comparison


class _Run(NamedTuple):
    """The operations of a function, those that computed its results, the tree of these, and the function itself."""

    operations: list[Operation]
    results: list[int]
    tree: Any
    closed: ClosedJaxpr
    leaves: list[Any]

    @property
    def arrays(self) -> list[ComparedArray]:
        """The results."""
        return [self.operations[i].result for i in self.results]

    def run(self) -> list[Any]:
        """The results of the function as it is."""
        found = interpret.call(self.closed, self.leaves)[: len(self.results)]
        return list(map(to_host, found))


def _run(fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Run:
    call = Call(args, kwargs)
    check_concrete("compare", call.leaves)
    with naming_states(_CALL, args):
        closed = jax.make_jaxpr(call.traceable(fun))(*call.leaves)
    tree = call.result_structure  # without the new values of an NNX module
    names = [name + path for name, path in leaf_names(fun, args, kwargs)]
    operations, results = observe(closed, call.leaves, names)
    return _Run(operations, results[: tree.num_leaves], tree, closed, call.leaves)


def _dtypes(here: _Run, there: _Run) -> list[Any]:
    """The floating dtypes of two functions, the finest first."""
    return sorted({x.dtype for run in (here, there) for x in run.operations if is_floating(x)}, key=roundoff)


def _dtype(here: _Run, there: _Run) -> str:
    """The coarsest dtype of two functions if its rounding is seen in their results, else the finest."""
    used = _dtypes(here, there)
    in_float32 = lambda x: relative_difference(x.value, x.traced) * (FLOAT32 / x.unit)
    pairs = zip(here.arrays, there.arrays, strict=True)
    explained = lambda x, y: JUMP * max(FLOAT32, in_float32(x), in_float32(y))
    is_fine = all(relative_difference(x.traced, y.traced) <= explained(x, y) for x, y in pairs)
    return str(used[0 if is_fine else -1]) if used else ""


def _rows(programs: Sequence[AlignedProgram], aligned: dict[int, Entry]) -> Iterator[ComparedRow]:
    """The rows of entries with the same elements, and of others that are aligned."""
    is_row = lambda x: is_floating(x.operation) and not x.is_leaf and not x.is_layout
    key = lambda x: (x.kind, x.operation.primitive)
    partners: dict[Any, list[Entry]] = {}
    for y in filter(is_row, list_entries(programs[1])):
        partners.setdefault(key(y), []).append(y)
    for x in filter(is_row, list_entries(programs[0])):
        same = partners.get(key(x), []) if x.kind is not None else [aligned[id(x)]] if id(x) in aligned else []
        if same:
            yield make_row(x, same.pop(0))
