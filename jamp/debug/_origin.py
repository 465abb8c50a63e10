"""Find the operations that make inf and NaN, and tell causes from consequences.

An operation makes an inf or NaN at an element if its operands do not explain it. From there on, the walk follows more
than one value of each array, which are called streams:

- the natural one, which holds the inf or NaN,
- the clean one, in which every inf and NaN that an operation makes is replaced by a finite number,
- for each cause, the one in which only that cause is not replaced.

An operation that also makes inf or NaN of clean operands follows from no other one. It is a cause of an inf or NaN in a
result if it alone puts it there, or if it takes part in one that no cause alone makes.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jamp._cast import is_inexact
from jamp._jaxprs import constructs, interpret, ir
from jamp._jaxprs.ir import JaxprEqn
from jamp._jaxprs.primitives import REARRANGES, operation
from jamp._jaxprs.source import in_scope, pattern
from jamp._recompute.opened import SEGMENT
from jamp.debug._cause import explain
from jamp.debug._evaluate import bind
from jamp.debug._made import Made, all_finite, filled, find_changed, find_explained, find_made, is_bad, where
from jamp.debug._nonfinite_search import Finding, Values

CLEAN = -1
_MOST = 8  # Streams of causes. The causes beyond share the last one.
REST = _MOST - 1
Key = tuple[str, str, str, bool]  # a primitive, a line, a layer, and whether it is in a backward pass


@dataclasses.dataclass(frozen=True)
class ArrayInStreams:
    """An array, its other streams where they differ, the path if it is an argument, and whether it is a constant.

    `form` is "square" for a square or a mean of squares, and "difference" for the difference of two of them.
    """

    array: Any
    streams: Mapping[int, Any] = dataclasses.field(default_factory=dict)
    parameter: str = ""
    is_constant: bool = False
    form: str = ""

    def stream(self, i: int) -> Any:
        """Return the clean array, or the one in which only cause `i` is not replaced."""
        return self.streams.get(i, self.streams.get(CLEAN, self.array))


class OriginInterpreter(interpret.Interpreter[ArrayInStreams]):
    """An evaluation that follows inf and NaN.

    Attributes:
      made: The operations that made inf or NaN and follow from no other one, in the order in which they ran. An
        operation that runs again, such as in a loop, has the same key.
      streams: The stream of each of them, in which only it is not replaced.
      findings: The first of them of each key and stream.
      count: The number of operations that ran.
    """

    def __init__(self, streams: Mapping[int, int] | None = None) -> None:
        """`streams` has the streams of some causes by their position in `made`, and all others have the last one.

        Without it, a cause has a stream for the first time it runs, and one for all later ones.
        """
        super().__init__()
        self.made: list[Key] = []
        self.streams: list[int] = []
        self.findings: dict[int, Finding] = {}
        self.count = 0
        self._given = streams
        self._known: dict[Any, int] = {}
        self._seen: set[Any] = set()

    def operation(self, eqn: JaxprEqn, values: list[ArrayInStreams]) -> list[ArrayInStreams]:
        self.count += 1
        arrays = [x.array for x in values]
        results = bind(eqn, arrays)
        parameter = values[0].parameter if values and ir.name(eqn) in REARRANGES else ""
        is_constant = bool(values) and all(x.is_constant for x in values)
        form = _form(eqn, values)
        keys = {CLEAN}.union(*(x.streams for x in values)) if any(x.streams for x in values) else set()
        if eqn.effects or (not keys and all(map(all_finite, results))):  # An effect happens once.
            return [ArrayInStreams(x, parameter=parameter, is_constant=is_constant, form=form) for x in results]
        operands = {i: [x.stream(i) for x in values] for i in keys}
        streams = {i: _follow(eqn, xs, arrays, results) for i, xs in operands.items()}
        reference, clean = operands.get(CLEAN, arrays), streams.get(CLEAN, results)
        # An inf in the code is a mask. A NaN in the code is a finding at the operation that reads it with other values.
        is_nan = [x.is_constant and not is_constant and bool(where(np.isnan, x.array).any()) for x in values]

        def find(xs: Sequence[Any], found: Sequence[Any]) -> Made | None:
            return find_made(eqn, [jnp.zeros_like(x) if y else x for x, y in zip(xs, is_nan, strict=True)], found)

        made = find(reference, clean)
        if made is not None:
            natural = find(arrays, results) if keys else made
            cause, own = None, _both(made, natural)
            if natural is not None and any(map(np.any, own)):
                cause = self._cause(eqn, values, results, natural)
                streams.setdefault(cause, clean)
            for i, mine in streams.items():
                replace = made.masks
                if i in keys - {CLEAN}:  # What its cause explains, it keeps, also if the operation alone makes it too.
                    explained = find_explained(eqn, operands[i], reference, results)
                    replace = [x & ~y for x, y in zip(_both(made, find(operands[i], mine)), explained, strict=True)]
                if i == cause:
                    replace = [x & ~y for x, y in zip(replace, own, strict=True)]
                streams[i] = list(map(_replaced, mine, replace))
            streams[CLEAN] = streams.get(CLEAN) or list(map(_replaced, clean, made.masks))
        _share(eqn, operands, results, streams)
        return [
            ArrayInStreams(x, _different(x, {i: mine[n] for i, mine in streams.items()}), parameter, is_constant, form)
            for n, x in enumerate(results)
        ]

    def _cause(self, eqn: JaxprEqn, values: Sequence[ArrayInStreams], results: Sequence[Any], made: Made) -> int:
        """Return the stream of a cause."""
        here, order = self.context(eqn), len(self.made)
        key = ir.name(eqn), here.line, here.scope, here.is_backward
        if self._given is None:
            stream = self._known.setdefault((key, (key, False) in self._known), min(len(self._known), REST))
        else:
            stream = self._given.get(order, REST)
        self.made.append(key)
        self.streams.append(stream)
        if (key, stream) not in self._seen:
            self._seen.add((key, stream))
            arrays = [x.array for x in values]
            shown = [filled(x, ~mask) if is_inexact(x) else x for x, mask in zip(results, made.explained, strict=True)]
            of_squares = ir.name(eqn) in _ROOTS and values[0].form == "difference"
            self.findings[order] = Finding(
                operation(eqn),
                explain(eqn, made.operands, shown, of_squares),
                here.line,
                tuple(filter(None, map(_step, self.entered))),
                here.is_backward,
                tuple(map(Values.of, filter(is_inexact, arrays))),
                tuple(map(Values.of, filter(is_inexact, results))),
                order=order,
                scope=here.scope,
                parameter=pattern(x.parameter for x in values if x.parameter),
            )
        return stream

    def constant(self, array: Any) -> ArrayInStreams:
        return ArrayInStreams(array, is_constant=True)

    def item(self, value: ArrayInStreams, i: int) -> ArrayInStreams:
        return ArrayInStreams(value.array[i], {k: x[i] for k, x in value.streams.items()}, value.parameter)

    def stack(self, values: list[ArrayInStreams]) -> ArrayInStreams:
        keys = set[int]().union(*(x.streams for x in values))
        stack = lambda get: interpret.stacked([get(x) for x in values])
        return ArrayInStreams(stack(lambda x: x.array), {k: stack(lambda x, k=k: x.stream(k)) for k in keys})


def _follow(eqn: JaxprEqn, operands: Sequence[Any], arrays: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """Evaluate an operation in a stream. Where the natural one chooses a finite number, all streams choose the same."""
    found = bind(eqn, operands)
    if ir.name(eqn) != "select_n" or np.array_equal(np.asarray(operands[0]), np.asarray(arrays[0])):
        return found
    same = bind(eqn, [arrays[0], *operands[1:]])
    return [jnp.where(~where(is_bad, x), y, z) for x, y, z in zip(results, same, found, strict=True)]


def _both(made: Made, other: Made | None) -> list[Any]:
    return [x & False if other is None else x & other.masks[n] for n, x in enumerate(made.masks)]


def _share(
    eqn: JaxprEqn, operands: Mapping[int, Sequence[Any]], results: Sequence[Any], streams: dict[int, list[Any]]
) -> None:
    """Put an inf or NaN that no stream has into the streams of all causes that take part in it."""
    if len(streams) < 3 or all(map(all_finite, results)):  # the clean one, and one of a single cause
        return
    columns = zip(*streams.values(), strict=True)
    known = [functools.reduce(np.logical_or, [where(is_bad, x) for x in column]) for column in columns]
    lost = [where(is_bad, x) & ~mask for x, mask in zip(results, known, strict=True)]
    if not any(map(np.any, lost)):
        return
    for i in operands.keys() - {CLEAN}:
        changed = find_changed(eqn, operands[i], operands[CLEAN], results)
        streams[i] = [
            jnp.where(mask & some, x, y) if mask.any() else y
            for x, y, mask, some in zip(results, streams[i], lost, changed, strict=True)
        ]


def _form(eqn: JaxprEqn, values: Sequence[ArrayInStreams]) -> str:
    """Return the form of the results of an equation: see `ArrayInStreams`."""
    name, forms = ir.name(eqn), [x.form for x in values]
    if name == "square" or (name == "integer_pow" and ir.exponent(eqn) == 2):
        return "square"
    if name == "mul" and eqn.invars[0] is eqn.invars[1]:
        return "square"
    if name == "sub" and (forms == ["square", "square"] or forms[0] == "difference"):
        return "difference"
    if name in REARRANGES or name in _KEEPS_FORM:
        return next(filter(None, forms), "")
    return ""


# A mean, a cast, a scale or an epsilon.
_KEEPS_FORM = ("reduce_sum", "div", "mul", "add", "max", "convert_element_type", "psum")
_ROOTS = ("sqrt", "rsqrt")


def _step(entered: interpret.Entered) -> str:
    """Return an entry of a path, such as "scan, iteration 3 of 12". It is empty for a call that jamp made."""
    eqn, iteration, name = entered.eqn, entered.iteration, ir.name(entered.eqn)
    if name == "cond":
        return f"cond, branch {entered.body}"
    if name == "while":
        return f"while, {('condition', 'iteration')[entered.body]} {iteration}"
    if name == "scan":
        return f"scan, iteration {iteration} of {constructs.iterations(eqn)}"
    (body,) = constructs.bodies(eqn) or ()
    function = constructs.function_name(eqn) or body.jaxpr.debug_info.func_name
    return "" if in_scope(eqn, SEGMENT) else f"{_KINDS.get(name, operation(eqn))}({function})"


_KINDS = {
    "remat2": "remat",
    "remat_opt": "custom_vjp",
    "custom_jvp_call": "custom_jvp",
    "custom_vjp_call": "custom_vjp",
}


def _replaced(x: Any, mask: Any) -> Any:
    """Return an array with finite numbers in some places: 1 for NaN, and for inf one that can still be squared."""
    if not mask.any():
        return x
    if jnp.iscomplexobj(x):
        return jnp.where(mask, jnp.ones_like(x), x)
    root = np.sqrt(np.float64(jnp.finfo(x.dtype).max))  # float8's would overflow in its own dtype, float64's in float32
    large = jnp.sign(x) * jnp.asarray(root, x.dtype)
    return jnp.where(mask, jnp.where(jnp.isnan(x), jnp.ones_like(x), large), x)


def _different(x: Any, streams: Mapping[int, Any]) -> Mapping[int, Any]:
    """Return the streams, or none if they all equal the natural one, such as behind a mask."""
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return {}
    is_same = all_finite(x) and all(np.array_equal(np.asarray(x), np.asarray(y)) for y in streams.values())
    return {} if is_same else streams
