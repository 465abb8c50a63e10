"""`stochastic_rounding`: bfloat16 parameters without float32 masters."""

import collections
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import PartitionSpec
from jax.tree_util import keystr, tree_map_with_path
from jax.typing import DTypeLike

from jamp._cast import check_floating, is_floating, to_float32
from jamp._jaxprs.source import users_stacklevel
from jamp._leaves import contains
from jamp._loss_scale.scaler_state import check_holds_no_scaler, check_kind, check_optimizer
from jamp._optimizer_state.dtypes import cast_like, keeping_dtypes
from jamp._optimizer_state.moments import may_be_moment, measures_distance
from jamp._optimizer_state.params import check_bfloat16, compute_update, rounds_params
from jamp._optimizer_state.rounding import next_count, random_bits, random_words, round_stochastically, straight_through
from jamp._optimizer_state.split_masters import MasterParamsState, SplitMasterParamsState

_ADVICE = "Stochastic rounding is for bfloat16, which has the range of float32. Write jamp.master_params(tx)."
_CURE = "For the inner optimizer's: tx.init(params)._replace(inner_state=state)."


class StochasticRoundingState(NamedTuple):
    """State of `stochastic_rounding`.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> int(jamp.stochastic_rounding(optax.sgd(0.1)).init(jnp.ones(3, jnp.bfloat16)).rounding_count)
      0
    """

    rounding_count: Array  # i32[], steps so far modulo 2**32, on which the random bits depend
    inner_state: Any

    @property
    def rounds_params(self) -> bool:
        """True: wrappers pass the parameters at their own dtypes."""
        return True


def stochastic_rounding(
    inner: optax.GradientTransformation,
    *,
    seed: int = 0,
    state_dtype: DTypeLike | Callable[[Any, Any], DTypeLike | None] | None = None,
    index_specs: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Train bfloat16 parameters without float32 masters.

    Rounding to nearest loses small updates. This rounds each new parameter up or down, with the probability that makes
    it right on average. `inner` sees float32 gradients and parameters. Parameters of 32 or more bits are stepped as
    usual. If all are, and `state_dtype` is None, it does nothing, and warns.

    Put it last before `apply_updates`, and `loss_scaled` around it. In
    `optax.chain(jamp.stochastic_rounding(tx), optax.scale(0.5))` updates of bfloat16 parameters are lost without an
    error. Put the whole chain inside.

    A step's roundings are noise of up to a 128th of each parameter. Optax's `dog`, `dowg` and `mechanize` measure the
    distance to the first parameters, and with it that noise, so they are an error. `prodigy`, `momo` and `cocob`
    multiply that distance by the gradient, and the noise averages out.

    The random bits are a hash of the seed, the step count, the parameter's path and the element's index in the whole
    array. From the same gradients, and with an `inner` that computes the same bits (`quantized_state` does not), a
    compiled run is the same bit for bit on any number of devices. After a restart it always is.

    `optax.apply_updates(params, updates)` gives exactly the rounded parameter, with two exceptions: an update that is a
    subnormal number, and a step that makes the parameter more than 2**14 times smaller. The result is then at most
    2**-23 times the old parameter away from it.

    Args:
      inner: The optimizer.
      seed: An int, or i32[] for each member of a `vmap`. Members with the same seed share their random bits.
      state_dtype: With bfloat16, the moments (arrays of the inner state at a parameter's path) are kept in bfloat16
        between steps, with the same rounding. Sums of gradients and copies of parameters, such as MultiSteps'
        `acc_grads` and schedule-free's `z`, stay float32. A function of path and array returns bfloat16 for one to
        round, and None or float32 for one that stays. It is asked about float32 arrays. What `inner` itself makes in
        16 bit, such as by `mu_dtype`, stays as it is, rounded to nearest.
      index_specs: Inside `shard_map`, a pytree of `PartitionSpec`s like the parameters, or a prefix of it. Without it,
        and in arrays of the state that do not have their parameter's shape, all shards get the same bits.

    Returns:
      An Optax transformation whose `update` needs `params`. Its state is a `StochasticRoundingState`.

    Raises:
      TypeError: From `update`, if the state is not a `StochasticRoundingState`.
      ValueError: If `seed` or `state_dtype` is wrong. From `init` and `update`, if a parameter is float16 or float8.
        From `init`, if `inner` is loss-scaled, has masters, rounds stochastically, or measures the distance of bfloat16
        parameters. From `update`, without `params`.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> tx, params = jamp.stochastic_rounding(optax.sgd(1e-4)), jnp.ones(1000, jnp.bfloat16)
      >>> state = tx.init(params)
      >>> for _ in range(10):
      ...     updates, state = tx.update(-jnp.ones(1000), state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> 1.0005 < float(params.astype(jnp.float32).mean()) < 1.0015  # rounded to nearest, it would be 1
      True

    References:
      Gupta et al., Deep Learning with Limited Numerical Precision, ICML 2015. Zamirai et al., Revisiting BFloat16
      Training, arXiv:2010.06192.
    """
    check_optimizer(inner, "jamp.stochastic_rounding({})")
    if not jnp.issubdtype(jnp.result_type(seed), jnp.integer) or jnp.ndim(seed):
        raise ValueError(f"seed must be an int, got seed={seed!r}.")
    inner = keeping_dtypes(inner)
    choose = _make_chooser(state_dtype)

    def load(inner_state: Any, params: Any) -> Any:
        """Bring the arrays that `store` rounded back to 32 bit. Others may be 16 bit because `inner` made them so."""
        return inner_state if state_dtype is None else cast_like(inner_state, jax.eval_shape(inner.init, params))

    def store(inner_state: Any, words: Any, params: Any, specs: Any) -> Any:
        """Round some float32 arrays of the inner state to 16 bit."""
        if state_dtype is None:
            return inner_state
        leaves = zip(jax.tree.leaves_with_path(params), jax.tree.leaves(specs), strict=True)
        of_params = {path: (jnp.shape(p), spec) for (path, p), spec in leaves}
        arrays = collections.Counter(of_params.keys())  # of each parameter so far, with itself

        def store_array(path: Any, x: Any) -> Any:
            start = next((i for i in range(len(path) + 1) if path[i:] in of_params), None)
            dtype = choose(path, x, start) if jnp.result_type(x) == jnp.float32 else None
            if dtype is None or _check_state_dtype(dtype) == jnp.float32:
                return x
            param = () if start is None else path[start:]
            shape, spec = (None, None) if start is None else of_params[param]
            if shape != jnp.shape(x):
                return round_stochastically(x, random_bits(words, f"state{keystr(path)}")).astype(jnp.bfloat16)
            arrays[param] += 1
            random = random_bits(words, keystr(param), arrays[param] - 1)
            return round_stochastically(x, random, spec).astype(jnp.bfloat16)

        return tree_map_with_path(store_array, inner_state)

    def init(params: optax.Params) -> StochasticRoundingState:
        check_bfloat16(params, _ADVICE)
        inner_state, count = inner.init(to_float32(params)), jnp.array(0, jnp.int32)
        _check_inner(inner_state, params)
        specs = jax.tree.broadcast(PartitionSpec(), params)
        return StochasticRoundingState(count, store(inner_state, random_words(seed, count), params, specs))

    def update(
        updates: optax.Updates, state: StochasticRoundingState, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, StochasticRoundingState]:
        check_kind(state, StochasticRoundingState, _CURE)
        if params is None:
            raise ValueError("stochastic_rounding needs params. Write tx.update(grads, state, params).")
        check_bfloat16(params, _ADVICE)
        if state_dtype is None:
            _warn_if_nothing_is_rounded(params)
        in_float32, count = to_float32(params), next_count(state.rounding_count)
        inner_state = load(state.inner_state, in_float32)
        updates, inner_state = inner.update(to_float32(updates), inner_state, in_float32, **extra_args)
        words = random_words(seed, count)

        def round_param(path: Any, p: Any, old: Any, step: Any, spec: Any) -> Any:
            if jnp.result_type(p) != jnp.bfloat16:
                return step
            new = round_stochastically((old + step).astype(jnp.float32), random_bits(words, keystr(path)), spec)
            return straight_through(step, compute_update(old, new))

        specs = jax.tree.broadcast(PartitionSpec() if index_specs is None else index_specs, params)
        updates = tree_map_with_path(round_param, params, in_float32, updates, specs)
        return updates, StochasticRoundingState(count, store(inner_state, words, params, specs))

    return optax.GradientTransformationExtraArgs(init, update)


def _make_chooser(state_dtype: Any) -> Callable[[tuple[Any, ...], Any, int | None], Any]:
    """Return a function of an array's path, the array, and the index at which a parameter's path begins (or None)."""
    if callable(state_dtype) and not isinstance(state_dtype, (type, np.dtype, type(jnp.bfloat16))):
        return lambda path, x, start: state_dtype(path, x)
    dtype = None if state_dtype is None else _check_state_dtype(state_dtype)

    def choose(path: tuple[Any, ...], x: Any, start: int | None) -> Any:
        return dtype if start is not None and may_be_moment(path[:start]) and jnp.ndim(x) else None

    return choose


def _check_state_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    checked = check_floating("state_dtype", dtype)
    if checked not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"state_dtype must be bfloat16, or float32 for state that stays, got {checked.name}.")
    return checked


def _warn_if_nothing_is_rounded(params: Any) -> None:
    # A branch of `optax.partition` sees other branches' parameters as masked nodes, and may have wide ones alone.
    dtypes = {p.dtype.name for p in jax.tree.leaves(params) if is_floating(p)}
    if dtypes and "bfloat16" not in dtypes and not contains(params, lambda x: isinstance(x, optax.MaskedNode)):
        got = f"no parameter is bfloat16, they are {', '.join(sorted(dtypes))}"
        cure = "Write jamp.cast_floating(params, jnp.bfloat16), or leave it out."
        warnings.warn(f"stochastic_rounding does nothing: {got}. {cure}", stacklevel=users_stacklevel())


def _check_inner(inner_state: Any, params: Any) -> None:
    # Each rounding adds to the distance.
    if measures_distance(inner_state) and any(jnp.result_type(p) == jnp.bfloat16 for p in jax.tree.leaves(params)):
        raise ValueError(
            "Inside stochastic_rounding, dog, dowg and mechanize measure the distance that rounding adds. Use float32 "
            "masters: jamp.master_params(tx, split=True)."
        )
    check_holds_no_scaler(
        inner_state,
        "The optimizer inside is loss-scaled. Wrap the whole: jamp.loss_scaled(jamp.stochastic_rounding(tx)).",
    )
    if contains(inner_state, lambda x: isinstance(x, MasterParamsState | SplitMasterParamsState)):
        raise ValueError(
            "stochastic_rounding got an optimizer with masters. Pass the plain one in place of jamp.master_params(tx)."
        )
    if rounds_params(inner_state):
        raise ValueError("stochastic_rounding inside stochastic_rounding rounds twice. Pass the plain optimizer.")
