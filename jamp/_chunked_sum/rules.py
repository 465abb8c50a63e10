"""What each primitive makes of rows: a table of rules for the analysis in `rows.py`."""

import functools
import itertools
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from jamp._jaxprs import ir
from jamp._jaxprs.ir import JaxprEqn
from jamp._jaxprs.primitives import ARITHMETIC, GATHERS, TRANSFERS, operation

Kind = Enum("Kind", "ZERO CONSTANT POSITION ROWS PAIRS RUNNING SUM UNKNOWN WRONG")
ZERO, CONSTANT, POSITION, ROWS, PAIRS, RUNNING, SUM, UNKNOWN, WRONG = Kind


class Fact(NamedTuple):
    """What a value is.

    Attributes:
      kind: ZERO or CONSTANT: the same in each row. POSITION: another number in each row, whatever is in it. ROWS:
        computed from its own row. PAIRS: from two rows. RUNNING: the carry of a scan that adds up rows. SUM: linear in
        sums over rows.
      detail: For a CONSTANT, which power of the number of rows it is, or None if unknown. For ROWS, their order, or
        None if it has not changed. For a POSITION, OWN (the number of the row), SORTED (a permutation) or MOVED (any
        other). For WRONG, the reason and the id of the equation.
    """

    kind: Kind
    detail: Any = None


OWN, MOVED, SORTED, REVERSED = "own", "moved", "sorted", "reversed"
FIXED = Fact(CONSTANT, 0)
AVERAGE = "divides by their number, as jnp.mean does"
TERM = "adds a term that depends on no row, once for each chunk"
NONLINEAR, REDUCED = "is not linear in a sum over rows, because of {}", "reduces rows by {} instead of a sum"
PAIRED, CARRIED = "combines a row with other rows by {}", "carries from row to row what is not a sum"
SOME = "reads some rows of a chunk and not the others"
IN_ROWS, PLACE = "reads a sum over the rows of a chunk in each row", "reads the place of a row in its chunk"
NUMBER = "reads the number of rows in a chunk"


class Step(NamedTuple):
    """An equation, the same equation for fewer rows, the facts about its operands, and the number of rows."""

    eqn: JaxprEqn
    other: JaxprEqn
    facts: list[Fact]
    rows: int

    @property
    def params(self) -> dict[str, Any]:
        return ir.params(self.eqn)

    @property
    def kinds(self) -> set[Kind]:
        return {x.kind for x in self.facts}

    def shape(self, i: int) -> tuple[int, ...]:
        """The shape of an operand."""
        shape: tuple[int, ...] = ir.avals(self.eqn.invars)[i].shape
        return shape

    def axes(self, i: int) -> list[int]:
        """The axes of an operand that follow the rows."""
        return following(self.eqn.invars[i], self.other.invars[i])

    def out(self, i: int = 0) -> list[int]:
        """The axes of a result that follow the rows."""
        return following(self.eqn.outvars[i], self.other.outvars[i])

    def wrong(self, why: str) -> Fact:
        return Fact(WRONG, (why.format(operation(self.eqn)), id(self.eqn)))


def following(v: Any, other: Any) -> list[int]:
    """The axes that follow the rows: their size is another with fewer rows."""
    sizes = zip(getattr(v.aval, "shape", ()), getattr(other.aval, "shape", ()), strict=False)
    return [i for i, (m, n) in enumerate(sizes) if m != n]


def join(one: Fact, two: Fact) -> Fact:
    """The fact about a value that is one or the other."""
    if one == two:
        return one
    one, two = sorted((one, two), key=lambda x: x.kind.value)
    if one.kind == ZERO or two.kind in (UNKNOWN, WRONG):
        return two
    if one.kind == CONSTANT and two.kind in (CONSTANT, POSITION, ROWS, PAIRS):
        return Fact(CONSTANT) if two.kind == CONSTANT else two
    return one if (one.kind, two.kind) == (ROWS, RUNNING) else Fact(UNKNOWN)


def each(step: Step) -> list[Fact]:
    """Each result is linear in its operand, row by row."""
    return step.facts[: len(step.eqn.outvars)]


def _per_row(step: Step) -> Fact:
    """Any function of the elements of all operands at one place."""
    kinds, facts = step.kinds, step.facts
    if RUNNING in kinds:
        return step.wrong(CARRIED)
    if SUM in kinds:
        return step.wrong(IN_ROWS if kinds & {POSITION, ROWS, PAIRS} else NONLINEAR)
    if PAIRS in kinds:
        return Fact(UNKNOWN if POSITION in kinds else PAIRS)
    if POSITION in kinds:
        orders = {x.detail for x in facts if x.kind == POSITION}
        is_own = orders == {OWN} and ir.name(step.eqn) in ("clamp", "max", "min")
        if ROWS not in kinds:
            return Fact(POSITION, SORTED if SORTED in orders else OWN if is_own else MOVED)
        # An integer may be an index into rows that are merged with another axis.
        return Fact(UNKNOWN) if ir.avals(step.eqn.outvars)[0].dtype.kind in "iu" else step.wrong(PLACE)
    is_fixed = all(x.detail == 0 for x in facts if x.kind == CONSTANT)
    if ROWS not in kinds:
        return FIXED if is_fixed else Fact(CONSTANT)
    orders = {x.detail for i, x in enumerate(facts) if x.kind == ROWS and (step.axes(i) or x.detail)}
    if len(orders) > 1 or not is_fixed:
        return step.wrong(PAIRED if is_fixed else NUMBER)
    return Fact(ROWS, next(iter(orders), None))


def _less(step: Step) -> Fact:
    """The number of a row is not negative. An index is compared with 0 before a gather."""
    return Fact(ZERO) if step.facts == [Fact(POSITION, OWN), Fact(ZERO)] else _per_row(step)


def _add(step: Step) -> Fact:
    kinds, facts = step.kinds, [x for x in step.facts if x.kind != ZERO]
    if len(facts) < 2:
        return facts[0] if facts else Fact(ZERO)
    if RUNNING in kinds and len(kinds) == 2 and SUM not in kinds:  # plus something of a row, or the same in each row
        is_left = facts[0].kind == RUNNING or ir.name(step.eqn) != "sub"
        return Fact(RUNNING) if is_left else step.wrong(CARRIED)
    facts = [_total(step, x) if x.kind == ROWS and _is_part(x.detail) and not step.out() else x for x in facts]
    if SUM in kinds and {x.kind for x in facts} <= {CONSTANT, SUM}:
        is_sum = all(x.detail == 1 for x in facts if x.kind == CONSTANT)
        parts = {part for x in facts if x.kind == SUM for part in x.detail or ()}
        return Fact(SUM, None if _whole(step, sorted(parts)) else frozenset(parts)) if is_sum else step.wrong(TERM)
    return facts[0] if kinds == {CONSTANT} and facts[0] == facts[1] else _per_row(step)


def multiply(step: Step, one: Fact, two: Fact) -> Fact:
    """The product of two elements."""
    one, two = sorted((one, two), key=lambda x: x.kind.value)
    if one.kind == ZERO:
        return one
    if one.kind != CONSTANT or two.kind == RUNNING:
        return two if two.kind == UNKNOWN else _per_row(step)
    if two.kind == CONSTANT:
        return Fact(CONSTANT, None if None in (one.detail, two.detail) else one.detail + two.detail)
    if two.kind == POSITION:
        return Fact(POSITION, MOVED)
    return two if one.detail == 0 else step.wrong(AVERAGE)


def divide(step: Step) -> Fact:
    """A quotient. By a constant it is a product with the inverse, else an operation on each row."""
    one, two = step.facts
    if two.kind == CONSTANT:
        return multiply(step, one, Fact(CONSTANT, None if two.detail is None else -two.detail))
    return Fact(UNKNOWN) if UNKNOWN in step.kinds else one if one.kind == ZERO else _per_row(step)


def _power(step: Step) -> Fact:
    (x,) = step.facts
    is_known = x.kind == CONSTANT and x.detail is not None
    return Fact(CONSTANT, x.detail * ir.exponent(step.eqn)) if is_known else _per_row(step)


def _total(step: Step, x: Fact) -> Fact:
    """The sum over an axis that follows the rows."""
    if x.kind == ROWS:
        if _is_part(x.detail):
            return Fact(SUM, frozenset([x.detail[1:]]))
        return Fact(SUM if x.detail in (None, OWN, REVERSED) else UNKNOWN)
    if x.kind in (CONSTANT, POSITION):
        return Fact(CONSTANT, None if x.kind == POSITION or x.detail is None else x.detail + 1)
    return step.wrong(PAIRED if x.kind == PAIRS else IN_ROWS) if x.kind in (PAIRS, SUM) else x


def _is_part(order: Any) -> bool:
    return isinstance(order, tuple) and len(order) == 3 and order[0] is None


def _whole(step: Step, parts: Sequence[tuple[int, int]]) -> bool:
    """Whether parts, in this order, are all rows."""
    ends = [0, *(stop for _, stop in parts)]
    return not ends[-1] % step.rows and all(start == end for (start, _), end in zip(parts, ends, strict=False))


def add_up(step: Step) -> list[Fact]:
    """The sums of each operand over some axes, or over devices."""
    axes = set(step.params["axes"])
    return [_total(step, x) if axes & set(step.axes(i)) else x for i, x in enumerate(each(step))]


def _dot(step: Step) -> Fact:
    found = multiply(step, *step.facts[:2])
    contracted = zip(ir.contracted(step.params), map(step.axes, (0, 1)), strict=True)
    return _total(step, found) if any(set(c) & set(axes) for c, axes in contracted) else found


def _convolve(step: Step) -> Fact:
    numbers, axes = step.params["dimension_numbers"], step.axes(0)
    windows = {i: step.shape(1)[j] for i, j in zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], strict=True)}
    if step.axes(1) or not set(axes) <= {numbers.lhs_spec[0], *windows}:
        return Fact(UNKNOWN)
    is_mixed = ROWS in step.kinds and any(windows.get(i, 1) > 1 for i in axes)
    return step.wrong(PAIRED) if is_mixed else multiply(step, *step.facts)


def _reduce(step: Step) -> Fact | list[Fact]:
    """What reads all elements along some axes: a maximum, a sort, a cumulative sum, a decomposition of matrices."""
    params, x, shape = step.params, step.facts[0], step.shape(0)
    axes = params.get("axes", [params[key] for key in ("axis", "dimension", "reduction_dimension") if key in params])
    last = len(params.get("fft_lengths", ())) or _LAST.get(ir.name(step.eqn), 0)
    axes = axes or range(-last, 0)
    # An axis may also have the name of devices.
    if not {i % len(shape) for i in axes if isinstance(i, (int, np.integer)) and shape} & set(step.axes(0)):
        return x if ir.name(step.eqn) == "cumsum" else _per_row(step)
    if ROWS in step.kinds or PAIRS in step.kinds:
        # A sort that moves positions along makes a permutation.
        is_order = [i < len(step.facts) and step.facts[i].kind == POSITION for i, _ in enumerate(step.eqn.outvars)]
        return [Fact(POSITION, SORTED) if order else step.wrong(REDUCED) for order in is_order]
    if SUM in step.kinds:
        return step.wrong(IN_ROWS)
    return Fact(POSITION, SORTED) if step.out() else Fact(CONSTANT)


_LAST = {"top_k": 1} | dict.fromkeys(("cholesky", "eig", "eigh", "householder_product", "lu", "qr", "svd"), 2)


def select(step: Step) -> Fact:
    """A choice between values, by a condition."""
    which, *cases = step.facts
    found = cases[0] if which.kind == ZERO else functools.reduce(join, cases)
    if which.kind in (ZERO, CONSTANT) or found.kind == UNKNOWN or (which.kind == ROWS and found.kind == RUNNING):
        return found
    return which if which.kind == UNKNOWN else _per_row(step)


def _reshape(step: Step) -> Fact:
    """Rows lie along an axis, alone or merged with others. If they are divided into groups, nobody knows how."""
    shape: tuple[int, ...] = ir.avals(step.eqn.outvars)[0].shape
    sizes = [shape[i] for i in step.out()]
    is_whole = all(n % step.rows == 0 for n in sizes) or sizes == [step.shape(0)[i] for i in step.axes(0)]
    return step.facts[0] if is_whole or step.facts[0].kind in (ZERO, CONSTANT) else Fact(UNKNOWN)


def _part(step: Step, axis: int, one: Sequence[int], two: Sequence[int]) -> Fact:
    """The elements between two bounds along an axis that follows the rows. `two` are the bounds for fewer rows."""
    x, size, fewer = step.facts[0], step.shape(0)[axis], ir.avals(step.other.invars)[0].shape[axis]
    if x.kind not in (POSITION, ROWS, PAIRS):
        return x
    if x.kind == POSITION:
        return Fact(POSITION, MOVED)
    # A part of what is merged may be an entry of each row.
    is_share = size != step.rows and all(m * fewer == n * size for m, n in zip(one, two, strict=True))
    return Fact(UNKNOWN) if is_share else Fact(x.kind, (x.detail, *one))


def _slice(step: Step) -> Fact:
    shape, bounds = step.shape(0), lambda given, i: (given["start_indices"][i], given["limit_indices"][i])
    for i in step.axes(0):
        stride = (step.params["strides"] or [1] * len(shape))[i]
        one, two = bounds(step.params, i), bounds(ir.params(step.other), i)
        if stride > 1 and shape[i] % (stride * step.rows):
            return _part(step, i, (*one, stride), (*one, stride))
        if stride == 1 and one != (0, shape[i]):
            return _part(step, i, one, two)
    return _piece(step)  # all rows, or one element of each


def _split(step: Step) -> list[Fact]:
    axis, ends = (
        step.params["axis"],
        [[0, *itertools.accumulate(ir.params(e)["sizes"])] for e in (step.eqn, step.other)],
    )
    if axis not in step.axes(0):
        return step.facts * len(step.eqn.outvars)
    return [_part(step, axis, *bounds) for bounds in zip(*map(itertools.pairwise, ends), strict=True)]


def _piece(step: Step) -> Fact:
    """A piece of a value. The first n entries of a table are positions."""
    x = step.facts[0]
    return Fact(POSITION, MOVED) if x.kind == CONSTANT and len(step.out()) > len(step.axes(0)) else x


def _concatenate(step: Step) -> Fact:
    kinds, orders = step.kinds, {x.detail for x in step.facts if x.kind == POSITION}
    if step.params["dimension"] in step.out():
        if kinds <= {ZERO, CONSTANT, POSITION}:
            return Fact(POSITION, MOVED)
        parts = [x.detail for x in step.facts]
        if all(map(_is_part, parts)) and _whole(step, [part[1:] for part in parts]):
            return Fact(ROWS)
        is_moved = any(isinstance(x, tuple) for x in parts) and kinds <= {ZERO, CONSTANT, ROWS}
        return Fact(ROWS, (*parts, MOVED)) if is_moved else Fact(UNKNOWN)
    if kinds <= {ZERO, SUM}:
        return Fact(SUM if SUM in kinds else ZERO)
    if orders == {OWN}:  # the indices of a gather
        of_rows = {x.detail for x in step.facts if x.kind == ROWS} - {None}
        return Fact(ROWS if ROWS in kinds else POSITION, next(iter(of_rows), OWN))
    return Fact(UNKNOWN) if kinds & {POSITION, RUNNING, SUM} else _per_row(step)


def _pad(step: Step) -> Fact:
    before = [step.params["padding_config"][i][0] for i in step.axes(0)]
    if any(step.params["padding_config"][i] != (0, 0, 0) for i in step.axes(0)):
        return step.wrong(PAIRED) if any(before) and ROWS in step.kinds else Fact(UNKNOWN)
    return step.facts[0] if step.facts[1].kind == ZERO else _per_row(step)


def _reverse(step: Step) -> Fact:
    x = step.facts[0]
    if not set(step.params["dimensions"]) & set(step.axes(0)) or x.kind in (ZERO, CONSTANT):
        return x
    return Fact(x.kind, REVERSED if x.kind == ROWS else MOVED) if x.kind in (POSITION, ROWS) else Fact(UNKNOWN)


def _gather(step: Step) -> Fact:
    (x, index), shape, mapped = step.facts, step.shape(0), step.params["dimension_numbers"].start_index_map
    picked = [i for i in step.axes(0) if i in mapped and step.params["slice_sizes"][i] != shape[i]]
    if picked and x.kind in (ROWS, PAIRS):
        if index.detail in (OWN, x.detail or OWN):
            return Fact(ROWS, x.detail) if x.kind == ROWS or len(step.out()) == 1 else x
        return Fact(UNKNOWN) if index.kind in (ZERO, CONSTANT) or index.detail == SORTED else step.wrong(PAIRED)
    if index.kind in (ZERO, CONSTANT):
        return x if step.axes(1) else _piece(step)
    return Fact(POSITION, MOVED) if index.kind == POSITION and x.kind == CONSTANT else _per_row(step)


def _dynamic_slice(step: Step) -> Fact:
    x, *starts = step.facts
    picked = [i for i in step.axes(0) if step.params["slice_sizes"][i] != step.shape(0)[i]]
    if picked and x.kind in (ROWS, PAIRS):
        is_first = all(ir.is_literal(step.eqn.invars[1 + i]) for i in picked)
        is_own = all(starts[i] == Fact(POSITION, OWN) for i in picked)
        return x if is_own else step.wrong(PAIRED) if is_first else Fact(UNKNOWN)
    return _piece(step) if {y.kind for y in starts} <= {ZERO, CONSTANT} else _per_row(step)


def _update(step: Step) -> Fact:
    """Elements that are put, or added, at indices into the first operand: `x.at[i].set(y)`."""
    x, index, *_ = step.facts
    if not step.axes(0) and any(map(step.axes, range(1, len(step.facts)))):
        is_sum = ir.name(step.eqn) in ("scatter-add", "scatter_add") and step.kinds <= {ZERO, CONSTANT, ROWS}
        return Fact(SUM if is_sum and x.kind == ZERO else UNKNOWN)
    if index.detail == OWN and ir.name(step.eqn).startswith("scatter"):
        return Fact(ROWS)
    return Fact(UNKNOWN) if step.kinds & {POSITION, RUNNING, SUM} else _per_row(step)


def _is_number(step: Step) -> Fact:
    """Whether a value is finite, or NaN. It is a guard, not a part of the result."""
    return Fact(UNKNOWN) if SUM in step.kinds else _per_row(step)


def encoded(step: Step) -> Fact:
    """A product in 8 bit. It follows the rows of its operands, also if a scale is a maximum over rows."""
    x, *others = step.facts
    is_by_row = step.out() and any(y.kind == ROWS for y in others)
    return x if x.kind != WRONG else Fact(ROWS if is_by_row else UNKNOWN)


def unknown(step: Step) -> Fact:
    """An operation that no rule follows. Of constants alone it is a constant."""
    follows = "callback" in ir.name(step.eqn) or any(map(step.out, range(len(step.eqn.outvars))))
    return FIXED if step.kinds <= {ZERO, CONSTANT} and not follows else Fact(UNKNOWN)


Rule = Callable[[Step], Fact | list[Fact]]


def _named(names: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


_FROM_DEVICES = {"all_to_all", "collective_permute", "ppermute", *(x for x in GATHERS if x.startswith("all_gather"))}
RULES: dict[str, Rule] = {
    **dict.fromkeys(ARITHMETIC, _per_row),
    **dict.fromkeys((TRANSFERS | GATHERS) - _FROM_DEVICES, each),
    **_named("broadcast_in_dim conj copy copy_p detached imag neg real reduce_precision rounded row_major", each),
    **_named("squeeze stop_gradient transpose", each),
    **_named("bessel_i0e bessel_i1e digamma igamma igammac lgamma polygamma zeta", _per_row),
    **_named("argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_xor", _reduce),
    **_named("approx_top_k cumlogsumexp cummax cummin cumprod cumsum fft pmax pmin sort", _reduce),
    **dict.fromkeys(_LAST, _reduce),
    **_named("psum psum_invariant reduce_sum", add_up),
    **_named("add add_any sub", _add),
    **_named("dynamic_update_slice scatter scatter-add scatter_add scatter-max scatter-min scatter-mul", _update),
    **_named("attach scaled_sums", encoded),
    # Random numbers are others in each row only if keys are rows.
    **_named(
        "random_bits random_clone random_fold_in random_gamma random_seed random_split random_unwrap random_wrap "
        "rng_bit_generator threefry2x32",
        lambda step: _per_row(step) if ROWS in step.kinds else FIXED,
    ),
    "concatenate": _concatenate,
    "conv_general_dilated": _convolve,
    "convert_element_type": lambda step: _per_row(step) if step.params["new_dtype"] == np.bool_ else step.facts[0],
    "div": divide,
    "dot_general": _dot,
    "dynamic_slice": _dynamic_slice,
    "gather": _gather,
    "integer_pow": _power,
    "iota": lambda step: Fact(POSITION, OWN) if step.params["dimension"] in step.out() else FIXED,
    "is_finite": _is_number,
    "lt": _less,
    "ne": lambda step: _is_number(step) if step.eqn.invars[0] is step.eqn.invars[1] else _per_row(step),  # isnan
    "mul": lambda step: multiply(step, *step.facts),
    "pad": _pad,
    "reshape": _reshape,
    "rev": _reverse,
    "select_n": select,
    "slice": _slice,
    "split": _split,
    "triangular_solve": lambda step: step.facts[1] if step.facts[0].kind == CONSTANT else Fact(UNKNOWN),
}
# Rules for operands one by one, and those that look at operands that are not known.
EACH, ANY = (each, add_up, encoded), (divide, select, RULES["mul"])
