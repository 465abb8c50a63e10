"""Follow the rows through a function: is each of its results a sum over them?

The function is traced with n and with 3 n rows. An axis follows the rows if its size differs in the two traces, and a
number follows them if its value does. A fact says what a value is. Here are those of a function that is not a sum:

    y = dot_general x w           f32[n,5]   ROWS
    c = 1 / n                     f32[]      CONSTANT, n to the power -1
    t = reduce_sum[axes=(0,)] y   f32[5]     SUM
    u = mul t 2                   f32[5]     SUM
    v = integer_pow[y=2] u        f32[5]     WRONG: it is not linear in the sum
    s = reduce_sum[axes=(0,)] v   f32[]      WRONG: the error names the line of `v`

A result is a SUM, or UNKNOWN if it comes from something that is not in the table below, such as a kernel. That is not
an error, and neither is a value that is WRONG and reaches no result.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple

import jax
import numpy as np

from jamp._jaxprs import build, constructs, ir
from jamp._jaxprs.dataflow import Forward
from jamp._jaxprs.ir import ClosedJaxpr, JaxprEqn
from jamp._jaxprs.primitives import ARITHMETIC, GATHERS, TRANSFERS, operation
from jamp._jaxprs.source import is_of_jax, user_line
from jamp._jaxprs.walk import walk

FACTOR = 3  # of the rows in the other trace

Kind = Enum("Kind", "ZERO CONSTANT POSITION ROWS PAIRS RUNNING SUM UNKNOWN WRONG")
ZERO, CONSTANT, POSITION, ROWS, PAIRS, RUNNING, SUM, UNKNOWN, WRONG = Kind


class Fact(NamedTuple):
    """What a value is.

    Attributes:
      kind: ZERO, or a CONSTANT: the same in each row. A POSITION: another number in each row, whatever is in it. ROWS:
        computed from its own row. PAIRS: computed from two. RUNNING: the carry of a scan over rows, if it is a sum.
      detail: Of a CONSTANT, its power of the number of rows, or None. Of others, the order in which rows lie along the
        axis, or None for that of the arguments. Of what is WRONG, the reason and the equation.
    """

    kind: Kind
    detail: Any = None


OWN, MOVED, SORTED, JOINED, REVERSED = "own", "moved", "sorted", "joined", "reversed"  # orders
FIXED, NONLINEAR = Fact(CONSTANT, 0), "computes {} of a sum over rows, and only linear functions are the sum of chunks'"
REDUCED, PAIRED = "reduces rows by {}, and not by a sum", "combines each row with other rows by {}"
NUMBER, PLACE = "reads the number of rows in a chunk", "reads the place of a row in its chunk"
IN_ROWS, CARRIED = "reads a sum over the rows of a chunk in each row", "carries from row to row what is not a sum"
TERM = "adds a term that depends on no row, once for each chunk"
AVERAGE = "divides by their number, as jnp.mean does"


class _Step(NamedTuple):
    """An equation, the same one in the other trace, and the facts about its operands."""

    eqn: JaxprEqn
    other: JaxprEqn
    facts: list[Fact]
    rows: int

    @property
    def params(self) -> dict[str, Any]:
        return ir.params(self.eqn)

    def axes(self, i: int) -> list[int]:
        """The axes of an operand that follow the rows."""
        return _following(self.eqn.invars[i], self.other.invars[i])

    def out(self, i: int = 0) -> list[int]:
        """The axes of a result that follow the rows."""
        return _following(self.eqn.outvars[i], self.other.outvars[i])

    def wrong(self, why: str) -> Fact:
        return Fact(WRONG, (why.format(operation(self.eqn)), id(self.eqn)))

    def kinds(self) -> set[Kind]:
        return {x.kind for x in self.facts}


Rule = Callable[[_Step], Fact | list[Fact]]


def _following(v: Any, other: Any) -> list[int]:
    sizes = zip(getattr(v.aval, "shape", ()), getattr(other.aval, "shape", ()), strict=False)
    return [i for i, (m, n) in enumerate(sizes) if m != n]


def _join(one: Fact, two: Fact) -> Fact:
    """The fact about a value that is one or the other."""
    if one == two:
        return one
    one, two = sorted((one, two), key=lambda x: x.kind.value)
    if two.kind in (WRONG, UNKNOWN) or one.kind == ZERO:
        return two
    if one.kind == ROWS and two.kind == RUNNING:
        return one
    if one.kind == CONSTANT and two.kind in (CONSTANT, POSITION, ROWS, PAIRS):
        return Fact(CONSTANT) if two.kind == CONSTANT else two
    return two if one == Fact(CONSTANT, 1) and two.kind == SUM else Fact(UNKNOWN)


def _each(step: _Step) -> list[Fact]:
    """Each result is linear in its operand, and has its rows."""
    return step.facts[: len(step.eqn.outvars)]


def _per_row(step: _Step) -> Fact:
    """Any function of the elements at one place of all operands."""
    kinds, facts = step.kinds(), step.facts
    if RUNNING in kinds:
        return step.wrong(CARRIED)
    if SUM in kinds:
        return step.wrong(IN_ROWS if kinds & {ROWS, PAIRS, POSITION} else NONLINEAR)
    if PAIRS in kinds:
        return Fact(UNKNOWN) if POSITION in kinds else Fact(PAIRS)
    if POSITION in kinds:
        is_sorted = any(x.detail == SORTED for x in facts)
        return step.wrong(PLACE) if ROWS in kinds else Fact(POSITION, SORTED if is_sorted else MOVED)
    is_fixed = all(x.detail == 0 for x in facts if x.kind == CONSTANT)
    if ROWS not in kinds:
        return FIXED if is_fixed else Fact(CONSTANT)
    orders = {None if x.detail == OWN else x.detail for i, x in enumerate(facts) if x.kind == ROWS and step.axes(i)}
    if len(orders - {JOINED}) > 1:
        return step.wrong(PAIRED)
    return Fact(ROWS, JOINED if JOINED in orders else next(iter(orders), None)) if is_fixed else step.wrong(NUMBER)


def _compare(step: _Step) -> Fact:
    """`i < 0` for an index, before a gather."""
    return Fact(ZERO) if step.facts == [Fact(POSITION, OWN), Fact(ZERO)] else _per_row(step)


def _bound(step: _Step) -> Fact:
    """An index stays one if it is clamped."""
    return Fact(POSITION, OWN) if step.kinds() <= {ZERO, CONSTANT, POSITION} and _owns(step.facts) else _per_row(step)


def _owns(facts: Sequence[Fact]) -> bool:
    return any(x.detail == OWN for x in facts) and all(x.detail == OWN for x in facts if x.kind == POSITION)


def _add(step: _Step) -> Fact:
    kinds, facts = step.kinds(), [x for x in step.facts if x.kind != ZERO]
    if len(facts) < 2:
        return facts[0] if facts else Fact(ZERO)
    if RUNNING in kinds:  # Another term is of one row, or the same in each.
        is_sum = facts[1].kind != RUNNING and SUM not in kinds if facts[0].kind == RUNNING else ir.name(step.eqn) != "sub"
        return Fact(RUNNING) if is_sum and SUM not in kinds else step.wrong(CARRIED)
    if SUM in kinds and kinds <= {SUM, CONSTANT}:
        return Fact(SUM) if all(x.detail == 1 for x in facts if x.kind == CONSTANT) else step.wrong(TERM)
    return facts[0] if kinds == {CONSTANT} and facts[0] == facts[1] else _per_row(step)


def _product(step: _Step, one: Fact, two: Fact) -> Fact:
    one, two = sorted((one, two), key=lambda x: x.kind.value)
    if one.kind == ZERO:
        return one
    if one.kind == CONSTANT and two.kind == CONSTANT:
        return Fact(CONSTANT, None if None in (one.detail, two.detail) else one.detail + two.detail)
    if one.kind == CONSTANT and two.kind in (ROWS, PAIRS, SUM, UNKNOWN) and one.detail != 0:
        return step.wrong(AVERAGE)
    if one.kind == CONSTANT and two.kind != RUNNING:
        return Fact(POSITION, MOVED) if two.kind == POSITION else two
    return two if two.kind == UNKNOWN else _per_row(step)


def _multiply(step: _Step) -> Fact:
    return _product(step, *step.facts)


def _divide(step: _Step) -> Fact:
    one, two = step.facts
    if two.kind == CONSTANT:
        return _product(step, one, Fact(CONSTANT, None if two.detail is None else -two.detail))
    return Fact(UNKNOWN) if UNKNOWN in step.kinds() else one if one.kind == ZERO else _per_row(step)


def _power(step: _Step) -> Fact:
    (x,) = step.facts
    known = x.kind == CONSTANT and x.detail is not None
    return Fact(CONSTANT, x.detail * ir.exponent(step.eqn)) if known else _per_row(step)


def _total(step: _Step, x: Fact) -> Fact:
    """The sum over an axis that follows the rows."""
    if x.kind == ROWS:
        return Fact(SUM if x.detail in (None, OWN, REVERSED, JOINED) else UNKNOWN)
    if x.kind == CONSTANT:
        return Fact(CONSTANT, None if x.detail is None else x.detail + 1)
    return {POSITION: Fact(CONSTANT), PAIRS: step.wrong(PAIRED), SUM: step.wrong(IN_ROWS)}.get(x.kind, x)


def _sum(step: _Step) -> list[Fact]:
    axes = set(step.params["axes"])
    return [_total(step, x) if axes & set(step.axes(i)) else x for i, x in enumerate(_each(step))]


def _reduce(step: _Step) -> Fact | list[Fact]:
    """What looks at all elements along some axes: a maximum, a sort, a cumulative sum."""
    params, x = step.params, step.facts[0]
    axes = params.get("axes", [params[key] for key in ("axis", "dimension", "reduction_dimension") if key in params])
    if ir.name(step.eqn) in ("fft", "top_k") and not axes:
        axes = range(-len(params.get("fft_lengths", "k")), 0)
    rank = len(step.eqn.invars[0].aval.shape)
    if not {i % rank for i in axes if isinstance(i, (int, np.integer))} & set(step.axes(0)):
        return x if ir.name(step.eqn) == "cumsum" else _per_row(step)
    if x.kind in (ROWS, PAIRS):  # A sort that carries positions along gives a permutation.
        return [step.wrong(REDUCED) if i >= len(step.facts) or step.facts[i].kind != POSITION else Fact(POSITION, SORTED) for i, _ in enumerate(step.eqn.outvars)]
    if SUM in step.kinds():
        return step.wrong(IN_ROWS)
    return Fact(POSITION, SORTED) if step.out() else Fact(CONSTANT)


def _dot(step: _Step) -> Fact:
    found = _product(step, *step.facts[:2])
    contracted = zip(ir.contracted(step.params), map(step.axes, (0, 1)), strict=True)
    return _total(step, found) if any(set(c) & set(axes) for c, axes in contracted) else found


def _convolve(step: _Step) -> Fact:
    params, axes = step.params, step.axes(0)
    batch, _, *spatial = params["dimension_numbers"].lhs_spec
    if step.axes(1) or not set(axes) <= {batch, *spatial}:
        return Fact(UNKNOWN)
    window = [step.eqn.invars[1].aval.shape[i] for i in params["dimension_numbers"].rhs_spec[2:]]
    is_mixed = ROWS in step.kinds() and any(n > 1 and i in axes for i, n in zip(spatial, window, strict=True))
    return step.wrong(PAIRED) if is_mixed else _product(step, *step.facts)


def _select(step: _Step) -> Fact:
    which, *cases = step.facts
    if which.kind == ZERO:
        return cases[0]
    if which.kind == UNKNOWN:
        return which
    found = cases[0]
    for x in cases[1:]:
        found = _join(found, x)
    if which.kind == CONSTANT or found.kind == UNKNOWN or (which.kind == ROWS and found.kind == RUNNING):
        return found
    return _per_row(step)


def _iota(step: _Step) -> Fact:
    return Fact(POSITION, OWN) if step.params["dimension"] in step.out() else FIXED


def _convert(step: _Step) -> Fact:
    return _per_row(step) if step.params["new_dtype"] == bool else step.facts[0]


def _reshape(step: _Step) -> Fact:
    """Rows lie along one axis, alone or with what is in a row, or it is not known how they lie."""
    shape = step.eqn.outvars[0].aval.shape
    is_followed = all(shape[i] % step.rows == 0 for i in step.out())
    return step.facts[0] if is_followed or step.facts[0].kind in (ZERO, CONSTANT) else Fact(UNKNOWN)


def _part(step: _Step, axis: int, start: int, stop: int, other: tuple[int, int]) -> Fact:
    """Some rows: the halves that a concatenation has joined, halves of the chunk, or rows at fixed places."""
    x, size = step.facts[0], step.eqn.invars[0].aval.shape[axis]
    if x.kind not in (ROWS, PAIRS):
        return Fact(POSITION, MOVED) if x.kind == POSITION else x
    if [start, stop] != [FACTOR * i for i in other]:
        return step.wrong(PAIRED)
    if size != step.rows and (stop - start) % step.rows == 0:
        return Fact(x.kind) if x.detail == JOINED else Fact(UNKNOWN)
    return Fact(x.kind, (x.detail, start, stop)) if size == step.rows else Fact(UNKNOWN)


def _slice(step: _Step) -> Fact:
    params, other, shape = step.params, ir.params(step.other), step.eqn.invars[0].aval.shape
    bounds = lambda given, i: (given["start_indices"][i], given["limit_indices"][i])
    for i in step.axes(0):
        stride = (params["strides"] or [1] * len(shape))[i]
        if shape[i] % (stride * step.rows) == 0 and stride > 1:
            continue  # one of the elements of each row
        if bounds(params, i) != (0, shape[i]) or stride > 1:
            return _part(step, i, *bounds(params, i), bounds(other, i))
    return _placed(step)


def _split(step: _Step) -> list[Fact]:
    axis, ends = step.params["axis"], [[0, *itertools.accumulate(ir.params(e)["sizes"])] for e in (step.eqn, step.other)]
    if axis not in step.axes(0):
        return step.facts * len(step.eqn.outvars)
    bounds = zip(*(zip(x, x[1:], strict=False) for x in ends), strict=True)
    return [_part(step, axis, *bound, other) for bound, other in bounds]


def _placed(step: _Step) -> Fact:
    """A part of a value, which is a position if only the part follows the rows: the first n entries of a table."""
    x = step.facts[0]
    return Fact(POSITION, MOVED) if x.kind == CONSTANT and len(step.out()) > len(step.axes(0)) else x


def _concatenate(step: _Step) -> Fact:
    kinds, axis, n = step.kinds(), step.params["dimension"], range(len(step.facts))
    if axis in step.out():
        if ROWS in kinds:
            is_whole = all(v.aval.shape[axis] % step.rows == 0 for v in step.eqn.invars)
            joins = kinds == {ROWS} and is_whole and all(axis in step.axes(i) for i in n)
            return Fact(ROWS, JOINED) if joins else Fact(UNKNOWN)
        return Fact(POSITION, MOVED) if kinds <= {ZERO, CONSTANT, POSITION} else Fact(UNKNOWN)
    if kinds <= {ZERO, SUM} or kinds == {RUNNING}:
        return Fact(SUM if SUM in kinds else step.facts[0].kind)
    if POSITION in kinds and _owns(step.facts):  # the indices of a gather
        return Fact(ROWS if ROWS in kinds else POSITION, OWN)
    return Fact(UNKNOWN) if kinds & {SUM, RUNNING, POSITION} else _per_row(step)


def _pad(step: _Step) -> Fact:
    if any(step.params["padding_config"][i] != (0, 0, 0) for i in step.axes(0)):
        is_shift = any(step.params["padding_config"][i][0] for i in step.axes(0))
        return step.wrong(PAIRED) if is_shift and ROWS in step.kinds() else Fact(UNKNOWN)
    return step.facts[0] if step.facts[1].kind == ZERO else _per_row(step)


def _reverse(step: _Step) -> Fact:
    x = step.facts[0]
    if not set(step.params["dimensions"]) & set(step.axes(0)):
        return x
    if x.kind == ROWS and x.detail in (None, OWN, REVERSED):
        return Fact(ROWS, None if x.detail == REVERSED else REVERSED)
    return Fact(POSITION, MOVED) if x.kind == POSITION else x if x.kind in (ZERO, CONSTANT) else Fact(UNKNOWN)


def _gather(step: _Step) -> Fact:
    params, (x, index) = step.params, step.facts
    numbers, shape = params["dimension_numbers"], step.eqn.invars[0].aval.shape
    picked = [i for i in step.axes(0) if i in numbers.start_index_map and params["slice_sizes"][i] != shape[i]]
    if not picked or x.kind not in (ROWS, PAIRS):
        if index.kind in (ZERO, CONSTANT):
            return x if step.axes(1) else _placed(step)
        is_table = x.kind in (ZERO, CONSTANT) and index.kind == POSITION
        return Fact(POSITION, MOVED) if is_table else _per_row(step)
    if index.detail == OWN:
        return Fact(ROWS) if x.kind == ROWS or len(step.out()) == 1 else x
    return Fact(UNKNOWN) if index.kind in (ZERO, CONSTANT) or index.detail == SORTED else step.wrong(PAIRED)


def _dynamic_slice(step: _Step) -> Fact:
    x, *starts = step.facts
    sizes, shape = step.params["slice_sizes"], step.eqn.invars[0].aval.shape
    picked = [i for i in step.axes(0) if sizes[i] != shape[i]]
    if picked and x.kind in (ROWS, PAIRS):
        if all(starts[i] == Fact(POSITION, OWN) for i in picked):
            return x
        is_literal = all(ir.is_literal(step.eqn.invars[1 + i]) for i in picked)
        return step.wrong(PAIRED) if is_literal else Fact(UNKNOWN)
    if x.kind == SUM and step.kinds() <= {SUM, ZERO, CONSTANT}:
        return x
    return _placed(step) if {y.kind for y in starts} <= {ZERO, CONSTANT} else _per_row(step)


def _update(step: _Step) -> Fact:
    """Elements that are put, or added, at indices into the first operand: `x.at[i].set(y)`."""
    x, *others = step.facts
    kinds = step.kinds()
    index = step.facts[1] if ir.name(step.eqn).startswith("scatter") else FIXED
    if not step.axes(0) and any(map(step.axes, range(1, len(step.facts)))):
        adds = ir.name(step.eqn) in ("scatter-add", "scatter_add") and kinds <= {ZERO, CONSTANT, ROWS, SUM}
        return Fact(SUM) if adds and x.kind in (ZERO, SUM) and SUM not in {y.kind for y in others} else Fact(UNKNOWN)
    if SUM in kinds or RUNNING in kinds:
        return Fact(SUM) if kinds <= {SUM, ZERO, CONSTANT} and x.kind == SUM else Fact(UNKNOWN)
    if index.detail == OWN:
        return Fact(ROWS)
    return Fact(UNKNOWN) if POSITION in kinds else _per_row(step)


def _finite(step: _Step) -> Fact:
    return Fact(UNKNOWN) if step.kinds() & {SUM, RUNNING} else _per_row(step)


def _matrices(step: _Step) -> Fact:
    """A function of the last two axes."""
    ranks = [len(v.aval.shape) for v in step.eqn.invars]
    inside = any(axis >= rank - 2 for i, rank in enumerate(ranks) for axis in step.axes(i))
    if ir.name(step.eqn) == "triangular_solve" and (inside or step.facts[0].kind == CONSTANT):
        return step.facts[1] if step.facts[0].kind == CONSTANT else Fact(UNKNOWN)
    return step.wrong(REDUCED) if inside and ROWS in step.kinds() else _per_row(step)


def _random(step: _Step) -> Fact:
    """Random numbers: other ones in each chunk only if each row has a key."""
    return _per_row(step) if ROWS in step.kinds() else FIXED


def _encoded(step: _Step) -> Fact:
    """A product in 8 bit is as near to the product of its operands whatever the scale of a whole tensor."""
    x, *others = step.facts
    if x.kind != WRONG:
        return x
    return Fact(ROWS if step.out() and ROWS in {y.kind for y in others} else UNKNOWN)


def _other(step: _Step) -> Fact:
    return FIXED if step.kinds() <= {ZERO, CONSTANT} and not any(map(step.out, range(len(step.eqn.outvars)))) else Fact(UNKNOWN)


def _names(text: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(text.split(), rule)


_PER_DEVICE = {"all_to_all", "collective_permute", "ppermute", *(x for x in GATHERS if x.startswith("all_gather"))}
_RULES: dict[str, Rule] = {
    **dict.fromkeys(ARITHMETIC, _per_row),
    **dict.fromkeys((TRANSFERS | GATHERS) - _PER_DEVICE, _each),
    **_names("broadcast_in_dim conj copy copy_p detached imag neg real reduce_precision", _each),
    **_names("rounded row_major squeeze stop_gradient transpose", _each),
    **_names("bessel_i0e bessel_i1e digamma igamma igammac lgamma polygamma zeta", _per_row),
    **_names("random_bits random_clone random_fold_in random_gamma random_seed random_split random_unwrap", _random),
    **_names("random_wrap rng_bit_generator threefry2x32", _random),
    **_names("argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_xor", _reduce),
    **_names("approx_top_k cumlogsumexp cummax cummin cumprod cumsum fft pmax pmin sort top_k", _reduce),
    **_names("cholesky eig eigh householder_product lu qr svd triangular_solve", _matrices),
    **_names("dynamic_update_slice scatter scatter-add scatter_add scatter-max scatter-min scatter-mul", _update),
    **_names("add add_any sub", _add),
    **_names("attach scaled_sums", _encoded),
    **_names("clamp max min", _bound),
    "concatenate": _concatenate,
    "conv_general_dilated": _convolve,
    "convert_element_type": _convert,
    "div": _divide,
    "dot_general": _dot,
    "dynamic_slice": _dynamic_slice,
    "gather": _gather,
    "integer_pow": _power,
    "iota": _iota,
    "is_finite": _finite,
    "lt": _compare,
    "mul": _multiply,
    "pad": _pad,
    **_names("psum psum_invariant reduce_sum", _sum),
    "reshape": _reshape,
    "rev": _reverse,
    "select_n": _select,
    "slice": _slice,
    "split": _split,
}


class _Rows(Forward[Fact]):
    """The analysis of a trace beside another one with fewer rows."""

    def __init__(self, rows: int):
        super().__init__(self._of_results, _join, lambda x: self._constants.get(id(x), FIXED))
        self._rows = rows
        self._constants: dict[int, Fact] = {}  # of literals and constants
        # The body of a jit is one object for all its calls with operands of the same types.
        self._others: dict[int, list[JaxprEqn]] = {}
        self._seen: set[tuple[int, int]] = set()

    def pair(self, one: ClosedJaxpr, two: ClosedJaxpr) -> bool:
        """Note which equations and numbers of two traces belong together. False if the traces differ in more."""
        if (id(one.jaxpr), id(two.jaxpr)) in self._seen:
            return True
        self._seen.add((id(one.jaxpr), id(two.jaxpr)))
        names = [[ir.name(e) for e in x.jaxpr.eqns] for x in (one, two)]
        if names[0] != names[1] or len(one.consts) != len(two.consts):
            return False
        for x, y in zip(one.consts, two.consts, strict=True):
            self._constants[id(x)] = _of_number(x, y)
        self._note(one.jaxpr.outvars, two.jaxpr.outvars)
        for a, b in zip(one.jaxpr.eqns, two.jaxpr.eqns, strict=True):
            self._note(a.invars, b.invars)
            self._others.setdefault(id(a), []).append(b)
            bodies = constructs.bodies(a) or (), constructs.bodies(b) or ()
            if len(a.outvars) != len(b.outvars) or len(bodies[0]) != len(bodies[1]):
                return False
            if not all(map(self.pair, *bodies)):
                return False
        return True

    def _note(self, ones: Sequence[Any], twos: Sequence[Any]) -> None:
        for v, w in zip(ones, twos, strict=False):
            if ir.is_literal(v) and ir.is_literal(w):
                fact = _of_number(v.val, w.val)
                self._constants[id(v)] = _join(fact, self._constants.get(id(v), fact))

    def read(self, facts: dict[Any, Fact], atoms: Sequence[Any]) -> list[Fact]:
        return [self._constants.get(id(v), FIXED) if ir.is_literal(v) else facts[v] for v in atoms]

    def _step(self, eqn: JaxprEqn, facts: list[Fact]) -> _Step:
        others = self._others.get(id(eqn), [eqn])
        if len(others) > 1:
            count = lambda other: sum(map(len, map(_following, eqn.invars + eqn.outvars, other.invars + other.outvars)))
            others = sorted(others, key=count, reverse=any(x.kind in (ROWS, PAIRS, POSITION) for x in facts))
        return _Step(eqn, others[0], facts, self._rows)

    def _of_results(self, eqn: JaxprEqn, facts: list[Fact]) -> list[Fact]:
        """The facts about the results of an equation that is not a construct."""
        step, name = self._step(eqn, facts), ir.name(eqn)
        rule = _RULES.get(name, _other)
        found: Fact | list[Fact]
        wrong = next((x for x in facts if x.kind == WRONG), None)
        if rule in (_each, _encoded, _sum):
            found = rule(step)
        elif wrong:
            found = wrong
        elif UNKNOWN in step.kinds() and rule not in (_multiply, _divide, _select):
            found = Fact(UNKNOWN)
        else:
            found = rule(step)
        results = found if isinstance(found, list) else [found] * len(eqn.outvars)
        return [Fact(PAIRS) if x.kind == ROWS and len(step.out(i)) > 1 else x for i, x in enumerate(results)]

    def _around(self, eqn: JaxprEqn, operands: list[Fact]) -> list[Fact]:
        if not self._scans_rows(eqn, operands):
            return super()._around(eqn, operands)
        carry = constructs.carry(eqn)
        at_start = [Fact(RUNNING) if operands[i].kind in (ZERO, SUM) else operands[i] for i in carry]
        known = super()._around(eqn, build.replaced(operands, carry, at_start))
        wrong = self._step(eqn, operands).wrong(CARRIED)
        at_end = [wrong if known[i].kind in (ROWS, PAIRS) else known[i] for i in carry]
        return super()._around(eqn, build.replaced(known, carry, at_end))

    def _scans_rows(self, eqn: JaxprEqn, operands: list[Fact]) -> bool:
        step, xs = self._step(eqn, operands), range(constructs.carry(eqn).stop, len(operands))
        is_longer = ir.name(eqn) == "scan" and constructs.iterations(eqn) != constructs.iterations(step.other)
        return is_longer and any(operands[i].kind in (ROWS, PAIRS, POSITION) for i in xs)

    def _results(self, eqn: JaxprEqn, operands: list[Fact]) -> list[Fact]:
        results = super()._results(eqn, operands)
        if ir.name(eqn) == "cond" and operands[0].kind not in (ZERO, CONSTANT):
            return [_chosen(operands[0], x) for x in results]
        step = self._step(eqn, operands)
        if ir.name(eqn) != "scan" or constructs.iterations(eqn) == constructs.iterations(step.other):
            return results
        carry = len(constructs.carry(eqn))
        if not self._scans_rows(eqn, operands):  # by index, perhaps
            return [Fact(UNKNOWN) if x.kind in (CONSTANT, SUM) and i < carry else x for i, x in enumerate(results)]
        end = [Fact(SUM) if i < carry else step.wrong(CARRIED) for i, _ in enumerate(results)]
        return [y if x.kind == RUNNING else x for x, y in zip(results, end, strict=True)]


def _chosen(which: Fact, x: Fact) -> Fact:
    if which.kind in (WRONG, UNKNOWN):
        return which
    return Fact(UNKNOWN) if x.kind == SUM else _join(which, x) if x.kind in (ZERO, CONSTANT) else x


def _of_number(x: Any, y: Any) -> Fact:
    """The fact about a constant that is `x` with more rows and `y` with fewer."""
    if isinstance(x, jax.core.Tracer) or not isinstance(getattr(x, "dtype", np.dtype(float)), np.dtype):
        return FIXED
    if np.shape(x) == np.shape(y) and (np.size(x) != 1 or not getattr(x, "is_fully_addressable", True)):
        return FIXED
    values = [np.unique(np.asarray(v, np.float64)) for v in (x, y)]
    if any(len(v) != 1 for v in values):
        return Fact(POSITION, OWN if np.array_equal(x, np.arange(np.size(x))) else MOVED)
    m, n = (float(v[0]) for v in values)
    if m == n or (m != m and n != n):
        return Fact(ZERO) if m == 0 else FIXED
    power = math.log(m / n, FACTOR) if m * n > 0 and math.isfinite(m / n) else 0.5
    return Fact(CONSTANT, round(power) if abs(power - round(power)) < 0.02 else None)


def check(closed: ClosedJaxpr, fewer: ClosedJaxpr, are_rows: Sequence[bool], rows: int, size: int) -> None:
    """Raise unless the results of a function are sums over rows, as far as it can be followed.

    Args:
      closed: The function of `rows` rows.
      fewer: The function of fewer.
      are_rows: Which arguments are rows.
      size: The number of rows in a chunk, for the message.
    """
    analysis = _Rows(rows)
    if not analysis.pair(closed, fewer):
        return
    given = [Fact(ROWS) if x else FIXED for x in are_rows]
    facts = analysis(closed, given)
    for v, x in zip(closed.jaxpr.outvars, analysis.read(facts, closed.jaxpr.outvars), strict=True):
        if x.kind == WRONG:
            why, _ = x.detail
            found = walk(closed, lambda e: id(e) != x.detail[1] and _enters(e), analysis, given)
            line = next((user_line(e) or context.line for e, known, context in found if x in map(known.get, e.outvars) and _holds(e, x.detail[1])), "")
        elif x.kind == CONSTANT and x.detail != 1:
            why, line = TERM, next((user_line(e) for e in closed.jaxpr.eqns if any(w is v for w in e.outvars)), "")
        else:
            continue
        at = f" at {line}" if line else ""
        raise ValueError(f"chunked_sum takes a sum over rows, and this function {why}{at}{_cure(why, size)}")


def _enters(eqn: JaxprEqn) -> bool:
    """Not into a function of JAX under jit: its lines are those of the first call with such operands."""
    return not (ir.name(eqn) == "jit" and all(is_of_jax(body.jaxpr) for body in constructs.bodies(eqn) or ()))


def _holds(eqn: JaxprEqn, origin: int) -> bool:
    bodies = constructs.bodies(eqn) or ()
    return id(eqn) == origin or any(_holds(e, origin) for body in bodies for e in body.jaxpr.eqns)


def _cure(why: str, size: int) -> str:
    if why == AVERAGE:
        return (
            f": by {size} in a chunk of {size}. Return the sum and divide outside: "
            "jamp.chunked_sum(loss_sum, n)(params, x, y) / len(x)."
        )
    if why == TERM:
        return ". Add it outside: jamp.chunked_sum(loss_sum, n)(params, x, y) + term."
    return ". Return sums over rows, also in aux, and compute what needs all rows before or after."
