"""Define a primitive of JAX with all its rules in one call."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from jamp._jaxprs import build
from jamp._jaxprs.manual_axes import partitions

Rule = Callable[..., Any]


def define(
    name: str,
    run: Rule,
    types: Rule,
    *,
    jvp: Rule,
    transpose: Rule | None = None,
    batch: Rule | None = None,
    platforms: Mapping[str, Rule] | None = None,
    multiple_results: bool = False,
    has_bodies: bool = False,
    has_vmaps: bool = False,
) -> Any:
    """Make a primitive. The rules get the operands, and the parameters as keywords, as JAX's rules do.

    Args:
      name: Its name.
      run: What it computes, by operations of JAX. It is evaluated, and lowered.
      types: From the types of the operands to the type of the result, or to a list of them.
      jvp: Its derivative.
      transpose: Its transpose, if it is linear.
      batch: Its rule under vmap, if an operand is mapped, which also gets the axis first. Without one, the results
        have the batch axes of the first operands, as in an identity.
      platforms: What it computes in place of that on some platforms.
      multiple_results: Whether `run` returns a list.
      has_bodies: Whether it evaluates jaxprs in its parameters. Then `types` also returns their effects.
      has_vmaps: Whether it stays one primitive under vmap. Then `jvp` and `transpose` are rules for one example, and
        `batch` puts a `Vmap` before those in the parameter `vmaps`, which are outermost first. The batch axes of the
        result are its first ones.
    """
    primitive = core.Primitive(name)
    primitive.multiple_results = multiple_results
    primitive.def_impl(run)
    lower = lambda run: mlir.lower_fun(run, multiple_results=multiple_results)
    mlir.register_lowering(primitive, lower(run))
    for platform, other in (platforms or {}).items():
        mlir.register_lowering(primitive, lower(other), platform=platform)
    if has_bodies:
        primitive.def_effectful_abstract_eval(types)
        primitive.to_lojax = run  # type: ignore[method-assign]  # under jax_remat3, if a body has a checkpoint
    else:
        primitive.def_abstract_eval(types)
    if has_vmaps:
        assert transpose
        jvp, transpose = _of_batches(jvp, transpose)
    ad.primitive_jvps[primitive] = jvp
    if transpose:
        ad.primitive_transposes[primitive] = transpose

    def batched(axis: Any, args: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple[Any, Any]:
        is_mapped = any(d is not None for d in dims)  # JAX also asks if none is.
        if batch and is_mapped:
            found: tuple[Any, Any] = batch(axis, args, dims, **params)
            return found
        results = primitive.bind(*args, **params)
        of_results = list(dims) if is_mapped else [None] * (len(results) if multiple_results else 1)
        return results, of_results if multiple_results else of_results[0]

    batching.fancy_primitive_batchers[primitive] = batched
    return primitive


class Vmap(NamedTuple):
    """A vmap around a primitive: the size, the Explicit mesh axes, and the batch axis of each operand."""

    size: int
    mesh_axes: Any
    axes: tuple[int | None, ...]

    @classmethod
    def of(cls, args: Sequence[Any], dims: Sequence[int | None]) -> "Vmap":
        aval, d = next((jax.typeof(x), d) for x, d in zip(args, dims, strict=True) if d is not None)
        return cls(aval.shape[d], partitions(aval.sharding.spec)[d], tuple(dims))


def batched_type(of_one: Any, vmaps: Sequence[Vmap]) -> Any:
    """The type of a batch of values of a type, the batch axes first."""
    spec = of_one.sharding.spec
    spec = spec.update(partitions=(*(x.mesh_axes for x in vmaps), *partitions(spec)))
    sharding = of_one.sharding.update(spec=spec)
    return of_one.update(shape=(*(x.size for x in vmaps), *of_one.shape), sharding=sharding)


def _of_batches(jvp: Rule, transpose: Rule) -> tuple[Rule, Rule]:
    """Make the derivative rules of a primitive with `vmaps` from its rules for one example."""

    def differentiated(xs: Sequence[Any], tangents: Sequence[Any], *, vmaps: Sequence[Vmap] = (), **params: Any) -> Any:
        if not vmaps:
            return jvp(xs, tangents, **params)
        ((size, _, axes), *inner), places = vmaps, with_tangents(tangents)

        def of_one(xs: list[Any], given: list[Any]) -> tuple[Any, Any]:
            found = build.replaced(list(map(no_tangent, xs)), places, given)
            out, tangent = differentiated(xs, found, vmaps=inner, **params)
            return out, ad.instantiate_zeros(tangent)

        in_axes = list(axes), [axes[i] for i in places]
        return jax.vmap(of_one, in_axes, axis_size=size)(list(xs), [tangents[i] for i in places])

    def transposed(ct: Any, *xs: Any, vmaps: Sequence[Vmap] = (), **params: Any) -> list[Any]:
        if not vmaps or isinstance(ct, ad.Zero):
            return transpose(ct, *xs, **params)
        ((size, _, axes), *inner), types = vmaps, list[Any]()
        avals = [x.aval if ad.is_undefined_primal(x) else jax.typeof(x) for x in xs]
        jax.eval_shape(jax.vmap(lambda *ys: types.extend(map(jax.typeof, ys)), axes, axis_size=size), *avals)
        known = [i for i, x in enumerate(xs) if not ad.is_undefined_primal(x)]

        def of_one(ct: Any, *given: Any) -> list[Any]:
            one = build.replaced(list(map(ad.UndefinedPrimal, types)), known, given)
            return transposed(ct, *one, vmaps=inner, **params)

        found = jax.vmap(of_one, (0, *(axes[i] for i in known)), axis_size=size)(ct, *(xs[i] for i in known))
        # An operand that all examples share gets the sum.
        of_all = lambda x, d: x if x is None else x.sum(0) if d is None else jnp.moveaxis(x, 0, d)
        return list(map(of_all, found, axes))

    return differentiated, transposed


def batch_first(args: Sequence[Any], dims: Sequence[int | None]) -> list[Any]:
    """The operands of a batch with their batch axes first. One that all examples share is repeated."""
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    first = lambda x, d: jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
    return list(map(first, args, dims))


def no_tangent(x: Any) -> Any:
    """The tangent of a value that depends on nothing that is differentiated."""
    return ad.Zero(jax.typeof(x).to_tangent_aval())


def with_tangents(tangents: Sequence[Any]) -> tuple[int, ...]:
    """Which operands have a tangent that may not be zero."""
    return tuple(i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero) and t.dtype != jax.dtypes.float0)
