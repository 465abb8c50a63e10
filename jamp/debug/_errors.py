"""The errors that roundings cause in the value of a function and in its gradients, measured and predicted."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from jamp._arguments import Call, differentiable, parameter_paths, with_numbers_as_arrays
from jamp._autocast.decisions import entries
from jamp._autocast.rules import wide_dtype
from jamp._cast import check_floating, is_floating
from jamp._jaxprs import build, ir
from jamp._jaxprs.primitives import PRODUCTS
from jamp._products.formats import Format
from jamp._transforms.autocast import autocast
from jamp._transforms.passes import Passes, passes
from jamp.debug._program import ON, RoundedProgram
from jamp.debug._run_steps import Damage, Data, reference_dtype
from jamp.debug._unencoded import Unencoded

_LOSS_SCALES = 2.0**15, 2.0**10, 2.0**5, 1.0  # for float16: the first with which the gradients are finite


class Errors:
    """A call of a function under autocast, with its gradients. `compiled` holds what several of them compile once.

    With `exact`, the results without any rounding are known.

    Attributes:
      format: The format of 8 bits, if it is one.
      dtype: The name of the compute dtype, or of the carrier of the format.
      wide: The dtype of the operands that products cast to it.
      program: The function and its gradient.
      has_gradients: Whether the first result is a scalar, so that there are gradients.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        compute_dtype: DTypeLike | Format,
        rules: Mapping[str, str],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        compiled: dict[Any, Any],
        exact: list[Array] | None = None,
    ):
        args, kwargs = with_numbers_as_arrays(args, kwargs)
        call = Call(args, kwargs)
        self._cast = functools.partial(autocast, fun, compute_dtype, rules=rules)
        self.format, dtype = None, np.dtype(np.float32)
        if isinstance(compute_dtype, Format):
            self.format, dtype = compute_dtype, np.dtype(compute_dtype.carrier)
            compute_dtype = Unencoded(compute_dtype)
        else:
            dtype = check_floating("compute_dtype", compute_dtype)
        self.dtype, self.wide, self.has_gradients = str(dtype), wide_dtype(dtype), False
        self._call, self._leaves = call, call.leaves
        self._inputs = [i for i in differentiable(args, kwargs, call.leaves) if is_floating(call.leaves[i])]
        value_and_gradients = self._value_and_gradients(autocast(fun, compute_dtype, rules=rules, recompute=False))
        closed, (values, _) = jax.make_jaxpr(value_and_gradients, return_shape=True)(jnp.float32(1), *call.leaves)
        self._n = len(values)
        self._scale = jnp.float32(_LOSS_SCALES[0] if dtype == jnp.float16 else 1)
        wide = min(self.wide, reference_dtype(), key=lambda x: x.itemsize)  # Without x64, there is no float64.
        self.program = RoundedProgram(closed, ["", *parameter_paths(fun, args, kwargs)], wide, compiled)
        if self.format:
            self._name_products(passes(fun, compute_dtype, rules)(args, kwargs))
        self._exact: tuple[list[Array], dict[Any, Any]] | None = None if exact is None else (exact, {})

    def _value_and_gradients(self, cast: Callable[..., Any]) -> Callable[..., tuple[list[Any], list[Any]]]:
        """Return a function of a loss scale and the leaves, which returns the value of `cast` and its gradients."""
        flat = self._call.traceable(cast)

        def value_and_gradients(scale: Any, *leaves: Any) -> tuple[list[Any], list[Any]]:
            def loss(*xs: Any) -> tuple[Any, list[Any]]:
                results = [jnp.asarray(x) for x in flat(*build.replaced(leaves, self._inputs, xs))]
                self.has_gradients = bool(self._inputs and results) and is_floating(results[0]) and not results[0].shape
                return (results[0] * scale if self.has_gradients else jnp.zeros(())), results

            value, pull_back, results = jax.vjp(loss, *[leaves[i] for i in self._inputs], has_aux=True)
            if not self.has_gradients:
                return results, []
            return results[:1], [g / scale for g in pull_back(jnp.ones_like(value))]

        return value_and_gradients

    def of_residuals(self, residuals: DTypeLike) -> float:
        """Return the error that residuals in 8 bits add to the gradients of autocast."""
        options = {"xla_allow_excess_precision": False}  # Else XLA may leave out other roundings in one of the two.
        without, within = (
            jax.jit(self._value_and_gradients(cast), compiler_options=options)(self._scale, *self._leaves)[1]
            for cast in (self._cast(), self._cast(residuals=residuals))
        )
        return _distance(list(zip(within, without, strict=True)))

    def _name_products(self, found: Passes) -> None:
        """Give the products the names that their rules have. A convolution in 8 bits is a matrix product."""
        for x in entries(found.decided, found.decisions, found.target):
            for site in self.program.sites if x.product and ir.name(x.eqn) != "dot_general" else ():
                if site.format and (site.line, site.scope) == (x.source, x.scope):
                    site.operation = ir.name(x.eqn)

    @property
    def share(self) -> float:
        """The share of the FLOPs that are products in the compute dtype, or in the format."""
        is_low = lambda x: bool(x.format) if self.format else x.operation in PRODUCTS
        low = sum(x.flops for x in self.program.sites if is_low(x))
        return low / self.program.flops if self.program.flops else math.nan

    def exact(self) -> tuple[list[Array], dict[Any, Any]]:
        """Return the results without any rounding, and all values by their variables."""
        self._exact = self._exact or self.program.run([self._scale, *self._leaves], {}, keep=True)
        return self._exact

    def values(self, on: Data) -> list[Array]:
        """Return the results of the function and its gradients with some roundings."""
        return self.program.run([self._scale, *self._leaves], on)[0]

    @functools.cached_property
    def total(self) -> tuple[float, float]:
        """The errors of value and gradients with all roundings. In float16 it lowers a loss scale that overflows."""
        everything = dict.fromkeys(range(len(self.program.sites)), ON)
        for scale in [x for x in _LOSS_SCALES if x <= self._scale]:
            self._scale = jnp.float32(scale)
            errors = self.of(everything)
            if np.all(np.isfinite(errors)):
                break
            self._exact = None
        return errors

    def of(self, on: Data) -> tuple[float, float]:
        """Return the measured errors of value and gradients with some roundings."""
        pairs = list(zip(self.values(on), self.exact()[0], strict=True))
        return _distance(pairs[: self._n]), _distance(pairs[self._n :])

    @functools.cached_property
    def damages(self) -> list[dict[int, Damage]]:
        """The predicted damage of each site to the value, and to the gradients. Inside scans it has an axis for each.

        Raises:
          ValueError: If the function or its gradients are not finite in the reference.
        """
        exact, env = self.exact()
        self._exact = exact, {}
        if not all(bool(jnp.all(jnp.isfinite(x))) for x in exact if is_floating(x)):
            got = "The function or its gradients are inf or NaN in float32"
            raise ValueError(f"{got}. Write jamp.debug.find_nonfinite(fun, grad=True).")
        value, gradients = exact[: self._n], exact[self._n :]
        probes = [*_probe(value, 0), *[None] * len(gradients)], [*[None] * len(value), *_probe(gradients, 1)]
        env = env or self.program.run([self._scale, *self._leaves], {}, keep=True)[1]
        damages = self.program.damages(env, probes[: 1 + self.has_gradients])
        add = lambda first, *rest: functools.reduce(np.add, rest, first)
        return [{site: jax.tree.map(add, *parts) for site, parts in by_site.items()} for by_site in damages]


def _distance(pairs: Sequence[tuple[Any, Any]]) -> float:
    """Return the norm of the differences of pairs of arrays, relative to the norm of the second ones."""
    wide = [(np.asarray(x, np.float64), np.asarray(y, np.float64)) for x, y in pairs if is_floating(y)]
    size = sum(float(np.sum(y**2)) for _, y in wide)
    error = math.sqrt(sum(float(np.sum((x - y) ** 2)) for x, y in wide))
    if not math.isfinite(error) or (error and not size):
        return math.inf
    return error / math.sqrt(size) if size else math.nan


def _probe(values: Sequence[Any], seed: int) -> list[Any]:
    """Return random signs, divided by the norm of all values. The inner product with an error has its relative size."""
    size = math.sqrt(sum(float(jnp.sum(jnp.square(x))) for x in values if is_floating(x))) or math.inf
    keys = jax.random.split(jax.random.key(seed), max(1, len(values)))
    # Cotangents lie as the values do: on Explicit axes this is part of their type.
    sign = lambda key, x: jax.device_put(jax.random.rademacher(key, x.shape, x.dtype) / size, x.sharding)
    return [sign(key, x) if is_floating(x) else None for key, x in zip(keys, values, strict=False)]
