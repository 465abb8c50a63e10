"""Find the operations that make inf and NaN, and tell causes from consequences.

An operation makes an inf or NaN at an element if its operands do not explain it. From there on, the walk follows more
than one value of each array:

- the natural one, which holds the inf or NaN,
- the clean one, in which every inf and NaN that an operation makes is replaced by a finite number,
- for each cause, the one in which only that cause is not replaced.

An operation that also makes inf or NaN of clean operands follows from no other one. It is a cause of an inf or NaN in a
result if it alone puts it there.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend import core

from jamp._cast import is_inexact
from jamp._jaxprs import build, constructs, equality, interpret, ir
from jamp._jaxprs.ir import JaxprEqn
from jamp._jaxprs.primitives import ARITHMETIC, EXACT, PRODUCTS, REARRANGES, operation
from jamp._jaxprs.source import in_scope, pattern
from jamp._recompute.segments import SEGMENT
from jamp.debug._cause import explain
from jamp.debug._nonfinite_search import Finding, Values

CLEAN = -1
_MOST = 8  # Causes with a stream of their own. More than that share the last one.
# A sum of products of its operands. If it overflows, it does so without the inf in them.
_SUMS = PRODUCTS | {"add_any", "cumsum", "psum", "reduce_sum", "reduce_window_sum", "scatter-add"}
_CASTS = ("convert_element_type", "reduce_precision")


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
      causes: The operations that made inf or NaN and follow from no other one, in the order in which they ran.
      count: The number of operations that ran.
    """

    def __init__(self) -> None:
        super().__init__()
        self.causes: list[Finding] = []
        self.count = 0
        self._index: dict[Any, int] = {}

    def operation(self, eqn: JaxprEqn, values: list[ArrayInStreams]) -> list[ArrayInStreams]:
        self.count += 1
        arrays = [x.array for x in values]
        bind = functools.partial(_bind, eqn)
        results = bind(arrays)
        parameter = values[0].parameter if values and ir.name(eqn) in REARRANGES else ""
        is_constant = bool(values) and all(x.is_constant for x in values)
        form = _form(eqn, values)
        keys = {CLEAN}.union(*(x.streams for x in values)) if any(x.streams for x in values) else set()
        if eqn.effects or (not keys and all(map(all_finite, results))):  # An effect happens once.
            return [ArrayInStreams(x, parameter=parameter, is_constant=is_constant, form=form) for x in results]
        operands = {i: [x.stream(i) for x in values] for i in keys}
        streams = {i: bind(xs) for i, xs in operands.items()}
        clean = streams.get(CLEAN, results)
        # An inf in the code is a mask. A NaN in the code is a finding at the operation that reads it with other values.
        is_nan = [x.is_constant and not is_constant and bool(_where(np.isnan, x.array).any()) for x in values]

        def find(xs: Sequence[Any], found: Sequence[Any]) -> _Made | None:
            return _made(eqn, [jnp.zeros_like(x) if y else x for x, y in zip(xs, is_nan, strict=True)], found)

        made = find(operands.get(CLEAN, arrays), clean)
        if made is not None:
            natural = find(arrays, results) if keys else made
            cause = None
            if natural is not None and any(np.any(x & y) for x, y in zip(made.masks, natural.masks, strict=True)):
                cause = self._cause(eqn, values, results, natural)
                streams.setdefault(cause, clean)
                operands.setdefault(cause, operands.get(CLEAN, arrays))
            for i, mine in streams.items():
                own = made if i == CLEAN or i not in keys else find(operands[i], mine)
                if i != cause and own is not None:
                    both = [x & y for x, y in zip(made.masks, own.masks, strict=True)]
                    streams[i] = list(map(_replaced, mine, both))
            streams[CLEAN] = streams.get(CLEAN) or list(map(_replaced, clean, made.masks))
        return [
            ArrayInStreams(x, _different(x, {i: mine[n] for i, mine in streams.items()}), parameter, is_constant, form)
            for n, x in enumerate(results)
        ]

    def _cause(self, eqn: JaxprEqn, values: Sequence[ArrayInStreams], results: Sequence[Any], made: "_Made") -> int:
        """Return the stream of a cause. An operation that runs again, such as in a loop, is the same cause."""
        here = self.context(eqn)
        key = ir.name(eqn), here.line, here.scope, here.is_backward
        if key not in self._index:
            self._index[key] = min(len(self.causes), _MOST - 1)
            arrays = [x.array for x in values]
            shown = [_filled(x, ~mask) if is_inexact(x) else x for x, mask in zip(results, made.masks, strict=True)]
            finding = Finding(
                operation(eqn),
                explain(eqn, made.operands, shown)
                + ", a difference of squares" * (ir.name(eqn) in _ROOTS and values[0].form == "difference"),
                here.line,
                tuple(filter(None, map(_step, self.entered))),
                here.is_backward,
                tuple(map(Values.of, filter(is_inexact, arrays))),
                tuple(map(Values.of, filter(is_inexact, results))),
                order=len(self.causes),
                scope=here.scope,
                parameter=pattern(x.parameter for x in values if x.parameter),
            )
            self.causes.append(finding)
        return self._index[key]

    def constant(self, array: Any) -> ArrayInStreams:
        return ArrayInStreams(array, is_constant=True)

    def item(self, value: ArrayInStreams, i: int) -> ArrayInStreams:
        return ArrayInStreams(value.array[i], {k: x[i] for k, x in value.streams.items()}, value.parameter)

    def stack(self, values: list[ArrayInStreams]) -> ArrayInStreams:
        keys = set[int]().union(*(x.streams for x in values))
        stack = lambda get: jnp.stack([get(x) for x in values])
        return ArrayInStreams(stack(lambda x: x.array), {k: stack(lambda x, k=k: x.stream(k)) for k in keys})

    def stream_of(self, finding: Finding) -> int:
        """Return the stream in which only this cause is not replaced."""
        return min(finding.order, _MOST - 1)


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


def _bind(eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
    """Evaluate an equation on other operands. On a CPU it is compiled quickly, and once for equal equations."""
    types = ir.avals(eqn.outvars)
    if eqn.effects or constructs.has_body(eqn) or not all(map(_is_on_cpu, args)):
        return interpret.bind(eqn, args, types)
    inputs: list[Any] = [core.Var(jax.typeof(x)) for x in args]
    outputs = [core.Var(x) for x in types]
    like = eqn.replace(invars=inputs, outvars=outputs)
    key = equality.fingerprint(inputs, outputs, [like], sources=False), eqn.ctx
    results: list[Any] = _compiled(_Operation(key, like))(*args)
    return results


@dataclasses.dataclass(frozen=True)
class _Operation:
    """An equation that equals another one if the keys are equal."""

    key: Any
    eqn: JaxprEqn = dataclasses.field(compare=False)


@functools.lru_cache(maxsize=4096)
def _compiled(operation: _Operation) -> Callable[..., Any]:
    eqn = operation.eqn
    inputs: Any = eqn.invars
    closed = build.closed_jaxpr({}, inputs, eqn.outvars, [eqn])
    options = _quick() if ir.name(eqn) in EXACT else {}
    return jax.jit(lambda *xs: interpret.call(closed, xs), compiler_options=options)


def _is_on_cpu(x: Any) -> bool:
    return isinstance(x, Array) and all(device.platform == "cpu" for device in x.devices())


@functools.cache
def _quick() -> dict[str, Any]:
    """Options with which XLA compiles an operation for a CPU in a fifth of the time. Not every release has all."""
    options: dict[str, Any] = {}
    for name, value in _QUICK.items():
        try:
            jax.jit(lambda x: x + 1, compiler_options={name: value}).lower(np.float32(0)).compile()
            options[name] = value
        except jax.errors.JaxRuntimeError:
            continue
    return options


_QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
}


def all_finite(x: Any) -> bool:
    """Whether an array has no inf and no NaN. On a CPU nothing is compiled for it."""
    if not is_inexact(x):
        return True
    if isinstance(x, Array) and not _is_on_cpu(x):
        return bool(_all_finite(x))
    return bool(np.isfinite(np.asarray(x)).all())


@jax.jit
def _all_finite(x: Array) -> Array:
    return jnp.all(jnp.isfinite(x))


def has_new(x: Any, reference: Any) -> bool:
    """Whether an array has an inf or NaN that another one does not have."""
    return any(bool(np.any(_where(test, x) & ~_where(test, reference))) for test in (_is_bad, np.isnan))


class _Made(NamedTuple):
    """Where an operation makes inf or NaN, and its operands without the inf or NaN that explains others."""

    masks: list[Any]  # bool[...] for each result
    operands: list[Any]


def _made(eqn: JaxprEqn, operands: Sequence[Any], results: Sequence[Any]) -> _Made | None:
    """Return the inf and NaN in the results that the operands do not explain, or None if there are none.

    A NaN is explained by a NaN, and an inf by an inf or NaN: in the same place if the operation is elementwise.
    """
    if all(map(all_finite, results)):
        return None
    if all(map(all_finite, operands)):
        return _Made([_where(_is_bad, x) for x in results], list(operands))
    for is_bad in (_is_bad, np.isnan):  # an overflow first, then a NaN that is made of inf
        given = [_filled(x, _where(is_bad, x)) for x in operands]
        if _is_elementwise(eqn):
            explained = functools.reduce(np.logical_or, [_where(is_bad, x) for x in operands])
            masks = [_where(is_bad, x) & ~explained for x in results]
        elif ir.name(eqn) in _SUMS:
            masks = [_where(is_bad, x) for x in interpret.bind(eqn, given, ir.avals(eqn.outvars))]
        else:
            is_explained = any(_where(is_bad, x).any() for x in operands)
            masks = [_where(is_bad, x) & (not is_explained) for x in results]
        if any(mask.any() for mask in masks):
            return _Made(masks, given)
    return None


def _is_elementwise(eqn: JaxprEqn) -> bool:
    name, shapes = ir.name(eqn), {x.shape for x in ir.avals([*eqn.invars, *eqn.outvars])} - {()}
    return name in _CASTS or (name in ARITHMETIC and not name.startswith(("reduce", "arg")) and len(shapes) <= 1)


def _is_bad(x: Any) -> Any:
    return ~np.isfinite(x)


def _where(test: Callable[[Any], Any], x: Any) -> Any:
    """Test each element of an array, bool[...] on the host. It is false if the array is not floating."""
    return test(np.asarray(x)) if is_inexact(x) else np.zeros(np.shape(x), bool)


def _filled(x: Any, mask: Any) -> Any:
    return jnp.where(mask, jnp.zeros_like(x), x) if mask.any() else x


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
