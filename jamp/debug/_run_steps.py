"""Run steps in the dtype of a reference, with roundings that can be switched on and off, or tapped for their damage.

The reference is float64 if x64 is on, else float32. Every narrower float is widened to it. An operation that rounds has
switches: for its operands, for their codes of 8 bits, and for its result. A tap rounds nothing. It takes the error that
rounding would make, and in the backward pass multiplies it by the cotangent: to first order, this is the change of the
function's result.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jamp._cast import is_floating
from jamp._jaxprs import constructs, interpret, ir
from jamp.debug._steps import CAST, Step, SteppedJaxpr
from jamp.debug._unencoded import Encoding
from jamp.debug._wider import bind_as_traced, bind_wider, is_narrower

# At the dtypes they were traced with: they work on bits, or on random keys.
_AS_TRACED = ("bitcast_convert_type", "reduce_precision", "nextafter", "random_bits")


class Switches(NamedTuple):
    """Whether the operations at a site round their operands and their results, bool[] each.

    With `codes`, products in a format of 8 bits encode the operands, and without it they round them to 16 bit.
    """

    operands: Any
    result: Any
    codes: Any


class Damage(NamedTuple):
    """The damage of an operation's roundings, f32[] each; in a scan, with an axis for its steps.

    Attributes:
      total: The sum of the products of the errors of its result and their cotangents.
      operands, result: The expected square of this sum, for the rounding of operands and of the result.
      overflows: How many values become inf or NaN.
      error, size: The sums of the squares of the errors of its result, and of its result.
    """

    total: Any
    operands: Any
    result: Any
    overflows: Any
    error: Any
    size: Any


Data = Mapping[int, Any]  # by the index of the site: `Switches` to round, or a `Damage` of zeros to tap


def measure_damage(y: Array, with_operands: Array, cotangent: Array, dtype: np.dtype[Any] | None) -> Damage:
    """Return the damage of rounding operands, with which `y` is `with_operands`, and of rounding the result."""
    errors = [with_operands - y, round_to(with_operands, dtype) - with_operands]
    is_finite = jnp.isfinite(y)  # A mask of -inf does not overflow.
    overflows = is_finite & ~jnp.isfinite(errors[0] + errors[1])
    errors = [jnp.where(is_finite & ~overflows, error, 0) for error in errors]
    products = [cotangent * error for error in errors]
    # Errors are independent, with two exceptions: those from the rounding of one element of an operand, which are in
    # a row or a column, and the errors of equal rows.
    operands = [(-1,), (-2,), tuple(range(y.ndim - 1))] if y.ndim > 1 else []
    number = lambda x: jnp.sum(x).astype(jnp.float32)
    return Damage(
        number(products[0] + products[1]),
        _expected_square(products[0], operands),
        _expected_square(products[1], operands[-1:]),
        number(overflows),
        number((errors[0] + errors[1]) ** 2),
        number(jnp.where(is_finite, y, 0) ** 2),
    )


def _expected_square(x: Array, dependent: Sequence[tuple[int, ...]]) -> Array:
    """Return the expected square of a sum of errors of mean 0, some of which depend on each other along some axes."""
    squares = [jnp.sum(jnp.sum(x, axis) ** 2) for axis in ((), *dict.fromkeys(dependent))]
    return functools.reduce(jnp.maximum, squares).astype(jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _tap(y: Array, zeros: Damage, with_operands: Array, dtype: np.dtype[Any] | None) -> Array:
    """Return `y`. The cotangent of `zeros` is its damage."""
    return y


_tap.defvjp(
    lambda y, zeros, with_operands, dtype: (y, (y, with_operands)),
    lambda dtype, kept, cotangent: (cotangent, measure_damage(kept[0], kept[1], cotangent, dtype), None),
)


def reference_dtype() -> np.dtype[Any]:
    """Return the dtype of the reference: float64 if x64 is on, else float32."""
    return np.dtype(np.float64 if jax.config.read("jax_enable_x64") else np.float32)


def widen(x: Any) -> Any:
    """Return a narrower floating value in the dtype of the reference."""
    return jnp.asarray(x, reference_dtype()) if is_narrower(x, reference_dtype()) else x


def round_to(x: Array, dtype: np.dtype[Any] | None) -> Array:
    """Round values of the reference to a dtype. XLA may leave out a cast to the narrower dtype and back."""
    if dtype is None:
        return x
    info = jnp.finfo(dtype)
    y = lax.reduce_precision(x, info.nexp, info.nmant)
    if info.minexp <= -126:
        return y
    unit = 2.0 ** (info.minexp - info.nmant)  # `reduce_precision` has no subnormal numbers.
    return jnp.where(jnp.abs(x) < 2.0**info.minexp, jnp.round(x / unit) * unit, y)


def _read(env: Mapping[Any, Any], atom: Any) -> Any:
    return widen(ir.value(atom)) if ir.is_literal(atom) else env[atom]


def _run_body(body: SteppedJaxpr, data: Data, taps: Data, xs: Sequence[Any]) -> list[Any]:
    env = {v: widen(x) for v, x in body.constants.items()} | dict(zip(body.inputs, xs, strict=True))
    run_steps(body.steps, {**data, **taps}, env)
    return [_read(env, v) for v in body.outputs]


def run_steps(steps: Sequence[Step], data: Data, env: dict[Any, Any]) -> None:
    """Add the results of some steps, in float32, to the values by their variables."""
    for step in steps:
        xs = [_read(env, v) for v in step.eqn.invars]
        if step.bodies:
            mine = {i: data[i] for i in step.sites if i in data}
            results = _run_construct(step, mine, xs)
        else:
            results = _operate(step, None if step.site is None else data.get(step.site), xs)
        env.update(zip(step.eqn.outvars, results, strict=True))


def _operate(step: Step, data: Any, xs: list[Any]) -> list[Any]:
    eqn, before, after = step.eqn, ir.avals(step.eqn.invars), ir.avals(step.eqn.outvars)
    if ir.name(eqn) in _AS_TRACED or constructs.has_body(eqn):
        return list(map(widen, bind_as_traced(eqn, xs)))
    compute = lambda values: bind_wider(eqn, values, reference_dtype())
    if data is None:
        return compute(xs)
    reads, narrow = zip(xs, before, step.rounds, strict=True), list(map(step.narrow, after))
    rounded_xs = [round_to(x, step.narrow(aval)) if rounds else x for x, aval, rounds in reads]
    # The sums of float32 products are float32, and round as much as the operands do.
    sums_in_float32 = step.encoding is None and any(step.rounds) and all(x.dtype == np.float32 for x in before)
    as_traced = lambda: list(map(widen, interpret.bind(eqn, [x.astype(np.float32) for x in xs], after)))
    if isinstance(data, Damage):
        results = others = compute(xs)
        if step.encoding is not None:
            others = [_encoded(step.encoding, rounded_xs, before)]
        elif sums_in_float32:
            others = list(map(lax.stop_gradient, as_traced()))
        elif any(step.rounds):
            others = compute(list(map(lax.stop_gradient, rounded_xs)))
        return [_tap(y, data, z, dtype) for y, z, dtype in zip(results, others, narrow, strict=True)]
    if step.encoding is not None:
        carrier = np.dtype(step.encoding.format.carrier)
        in_16_bit = [round_to(x, carrier) if is_floating(x) else x for x in xs]
        product = lambda xs: lambda: compute(xs)[0]
        branches = product(xs), product(in_16_bit), lambda: _encoded(step.encoding, rounded_xs, before)
        results = [lax.switch(jnp.where(data.operands, jnp.where(data.codes, 2, 1), 0), branches)]
    elif sums_in_float32:
        results = [jnp.where(data.operands, z, y) for y, z in zip(compute(xs), as_traced(), strict=True)]
    else:
        results = compute([jnp.where(data.operands, z, x) for x, z in zip(xs, rounded_xs, strict=True)])
    on = data.operands if ir.name(eqn) == CAST else data.result
    return [jnp.where(on, round_to(y, dtype), y) for y, dtype in zip(results, narrow, strict=True)]


def _encoded(encoding: Encoding, xs: Sequence[Any], before: Sequence[Any]) -> Array:
    """The product of encoded operands, as traced, in the dtype of the reference."""
    given = [x.astype(aval.dtype) for x, aval in zip(xs, before, strict=True)]
    return widen(encoding.product(given))


def _run_construct(step: Step, data: Data, xs: list[Any]) -> list[Any]:
    if ir.name(step.eqn) == "while" and not all(isinstance(x, Switches) for x in data.values()):
        data, xs = {}, list(map(lax.stop_gradient, xs))  # It has no derivative in reverse mode.
    taps = {i: x for i, x in data.items() if isinstance(x, Damage)}  # in a scan with an axis for its steps
    bodies = [functools.partial(_run_body, body, data) for body in step.bodies]
    return interpret.control_flow(step.eqn, bodies, xs, taps)
