"""Every optimizer of optax.* and optax.contrib.*: a skipped step moves nothing, half-precision params drift nowhere."""

import functools
import inspect
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax import lax
from trees import bits

import jamp

SGD = optax.sgd(0.1, momentum=0.9)
SCHEDULE = optax.linear_schedule(0.1, 0.01, 4)

# What a required parameter of that name is given. The cases are found, not listed: see `factories`.
BY_NAME = {
    "learning_rate": 0.1,
    "decay": 0.9,
    "eta": 0.01,
    "gamma": 0.55,
    "clipping": 0.5,
    "max_delta": 0.5,
    "threshold": 0.5,
    "max_norm": 0.5,
    "step_size": -0.1,
    "step_size_fn": optax.linear_schedule(-0.1, -0.01, 4),
    "inner": SGD,
    "tx": SGD,
    "optimizer": SGD,
    "base_optimizer": SGD,
    "adv_optimizer": SGD,
    "fast_optimizer": SGD,
    "sync_period": 2,
    "slow_step_size": 0.5,
    "max_backtracking_steps": 5,
    "max_linesearch_steps": 5,
    "max_consecutive_errors": 3,
    "should_transform_fn": lambda step: step % 2 == 0,
    "transforms": {"a": SGD, "b": optax.adam(0.1)},
    "param_labels": {"w": "a", "h": "b", "b": "a"},
    "mask": {"w": True, "h": False, "b": True},
    "freeze_mask": {"w": True, "h": False, "b": False},
    "measure_name": "norm",
    "measure": lambda tree: sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(tree)),
    "l2_norm_clip": 1.0,
    "noise_multiplier": 0.1,
    "seed": 0,
}
BY_FACTORY = {
    "add_noise": {"key": 0},
    "noisy_sgd": {"key": 0},
    "differentially_private_aggregate": {"key": 0},
    "dpsgd": {"key": 0},
    "stateless": {"f": lambda updates, params: jax.tree.map(lambda g: -0.1 * g, updates)},
    "stateless_with_tree_map": {"f": lambda g, p: -0.1 * g},
}
# What `update` needs besides the gradients. All others accept plain gradients.
LINE_SEARCH = ("value", "grad", "value_fn")
EXTRA_ARGS = {
    "lbfgs": LINE_SEARCH,
    "scale_by_zoom_linesearch": LINE_SEARCH,
    "scale_by_backtracking_linesearch": LINE_SEARCH,
    "polyak_sgd": ("value",),
    "scale_by_polyak": ("value",),
    "momo": ("value",),
    "momo_adam": ("value",),
    "reduce_on_plateau": ("value",),
    "sophia": ("obj_fn",),
    "hutchinson_estimator_diag_hessian": ("obj_fn",),
}
PER_EXAMPLE = ("dpsgd", "differentially_private_aggregate")  # gradients with a leading batch axis
LEFT_OUT = {
    "chain": "a composition: test_transforms.py",
    "named_chain": "a composition: test_transforms.py",
    "inject_hyperparams": "makes a factory, not a transformation: test_transforms.py",
    "inject_stateful_hyperparams": "makes a factory, not a transformation: test_transforms.py",
    "scale_by_muon": "takes matrices only: covered by muon, which gives it those",
    "measure_with_ema": "returns a measurement in place of updates",
    "monitor": "returns a measurement in place of updates",
    "skip_large_updates": "a predicate for MultiSteps, not a transformation",
    "skip_not_finite": "a predicate for MultiSteps, not a transformation",
}


def factories() -> dict[str, Any]:
    """The public callables of optax and optax.contrib that say they return a gradient transformation."""
    found = {}
    for module in (optax, optax.contrib):
        for name, f in sorted(vars(module).items()):
            if name.startswith("_") or not (inspect.isfunction(f) or isinstance(f, functools.partial)):
                continue
            returned = inspect.signature(f).return_annotation
            told = (inspect.getdoc(f) or "") if returned is inspect.Signature.empty else str(returned)
            if "GradientTransformation" in told and name not in LEFT_OUT:
                found[name] = f
    return found


def is_optimizer(name: str) -> bool:
    """Whether a factory makes an optimizer; the others make parts of one."""
    f = FACTORIES[name]
    rated = any("learning_rate" in p for p in inspect.signature(f).parameters)
    contributed = name not in vars(optax)
    return not name.startswith("scale_by") and (rated or contributed or name == "lookahead")


FACTORIES = factories()
OPTIMIZERS = [name for name in FACTORIES if is_optimizer(name)]
PARTS = [name for name in FACTORIES if not is_optimizer(name)]


def make(name: str) -> Any:
    given = BY_FACTORY.get(name, {})
    parameters = inspect.signature(FACTORIES[name]).parameters
    arguments = {k: v for k, v in given.items() if k in parameters}
    for p in parameters.values():
        if p.default is p.empty and p.name not in arguments:
            scheduled = p.name == "learning_rate" and "Callable" in str(p.annotation)
            arguments[p.name] = SCHEDULE if scheduled else BY_NAME[p.name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # an optimizer that optax will replace is one until then
        return FACTORIES[name](**arguments)


# Three leaves, a dtype each, and a negative zero in each: only -0.0 + -0.0 is -0.0.
PARAMS = {
    "w": jnp.array([[0.5, -0.0, 1.0], [-0.75, 2.0, -1.0]]),
    "h": jnp.array([1.0, -0.0, 0.5], jnp.float16),
    "b": jnp.array([[-0.0, 0.25], [0.125, 0.375]], jnp.bfloat16),
}


def fresh_params(name: str, dtype: Any = None) -> Any:
    params = jax.tree.map(lambda x: jnp.array(x, dtype or x.dtype, copy=True), PARAMS)
    return optax.LookaheadParams(params, jax.tree.map(jnp.copy, params)) if name == "lookahead" else params


@functools.cache
def batches(per_example: bool) -> tuple[Any, Any]:
    """Two stacked sequences of gradients: of three good batches with bad ones among them, and of good ones only."""
    random = np.random.default_rng(0)
    shapes = {k: ((2,) if per_example else ()) + x.shape for k, x in PARAMS.items()}
    good = [{k: random.normal(size=s).astype(np.float32) for k, s in shapes.items()} for _ in range(3)]
    every = {k: np.full_like(x, np.inf) for k, x in good[0].items()}  # an overflow on the very first step
    one = good[1] | {"b": good[1]["b"].copy()}  # one nan in one leaf
    one["b"].flat[1] = np.nan
    stack = lambda *steps: jax.tree.map(lambda *x: np.stack(x), *steps)
    return stack(every, good[0], one, good[1], good[2]), stack(*good, *good[:2])


def loss(params: Any) -> jax.Array:
    return sum(jnp.sum(jnp.square(x.astype(jnp.float32) - 0.25)) for x in jax.tree.leaves(params))


def extra_args(name: str, grads: Any) -> dict[str, Any]:
    # The value of a bad batch is nan like its gradients.
    value = 1.0 + 0.0 * sum(jnp.sum(g) for g in jax.tree.leaves(grads))
    available = {"value": value, "grad": grads, "value_fn": loss, "obj_fn": loss}
    return {k: available[k] for k in EXTRA_ARGS.get(name, ())}


def step(name: str, tx: Any, params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
    updates, state = tx.update(grads, state, params, **extra_args(name, grads))
    return optax.apply_updates(params, updates), state


def at(i: Any, tree: Any) -> Any:
    return jax.tree.map(lambda x: x[i], tree)


def check_skips(name: str) -> None:
    tx = jamp.loss_scaled(make(name))

    def scanned(carry: Any, grads: Any) -> Any:
        carry = step(name, tx, *carry, grads)
        return carry, carry

    train = jax.jit(lambda params, state, grads: lax.scan(scanned, (params, state), grads), donate_argnums=(0, 1))
    bad, good = batches(name in PER_EXAMPLE)
    init = jax.jit(tx.init)  # some keep the params themselves in their state, which cannot then be donated twice
    start = bits((fresh_params(name), init(fresh_params(name)).inner_state))
    _, (params, states) = train(fresh_params(name), init(fresh_params(name)), bad)
    end, (good_params, good_states) = train(fresh_params(name), init(fresh_params(name)), good)
    train(*end, good)
    # One compilation, though the last call's state is what another returned: no dtype drifted.
    assert train._cache_size() == 1

    history = [bits(at(i, (params, states.inner_state))) for i in range(5)]
    undisturbed = [bits(at(i, (good_params, good_states.inner_state))) for i in range(5)]
    assert undisturbed[3] != start
    # A skipped step leaves params and all inner state bit-identical ...
    assert history[0] == start
    assert history[2] == history[1]
    # ... and training afterwards equals a run that never saw the bad batches.
    assert [history[1], history[3], history[4]] == undisturbed[:3]
    # The bookkeeping advances also on a skip.
    np.testing.assert_array_equal(states.grads_finite, [False, True, False, True, True])
    np.testing.assert_array_equal(states.stats.overflow_steps, [1, 1, 2, 2, 2])
    np.testing.assert_array_equal(states.loss_scale_state.loss_scale, 2.0 ** np.array([15, 15, 14, 14, 14]))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_skipped_step_leaves_params_and_inner_state_bit_identical(name):
    check_skips(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", PARTS)
def test_skipped_step_leaves_params_and_inner_state_bit_identical_for_parts_of_optimizers(name):
    check_skips(name)


def drift(name: str, tx: Any, dtype: Any) -> dict[str, Any]:
    """The leaves of params and inner state that a step gives another shape, dtype or weak type, by path."""
    abstract = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type)
    params = jax.tree.map(abstract, fresh_params(name, dtype))
    state = jax.eval_shape(tx.init, params)
    stepped = jax.eval_shape(functools.partial(step, name, tx), params, state, one_batch(name in PER_EXAMPLE))
    pairs = zip(jax.tree.leaves_with_path((params, state)), jax.tree.leaves(stepped), strict=True)
    seen = lambda x: (x.shape, x.dtype, x.weak_type)
    return {jax.tree_util.keystr(path): (seen(x), seen(y)) for (path, x), y in pairs if seen(x) != seen(y)}


def one_batch(per_example: bool) -> Any:
    return at(0, batches(per_example)[1])


@pytest.mark.parametrize("name", FACTORIES)
def test_no_leaf_changes_dtype_or_weak_type_whatever_the_params_dtype(name):
    for dtype in (jnp.float32, jnp.float16, jnp.bfloat16):
        assert not drift(name, jamp.loss_scaled(make(name)), dtype), dtype


@pytest.mark.slow
@pytest.mark.parametrize("name", FACTORIES)
def test_applied_steps_are_the_plain_optimizers_and_skipped_steps_as_if_never_seen(name):
    def train(tx: Any, grads: Any) -> Any:
        params = fresh_params(name, jnp.float32)
        body = lambda carry, g: ((new := step(name, tx, *carry, g)), new)
        return jax.jit(lambda p, s: lax.scan(body, (p, s), grads)[1])(params, jax.jit(tx.init)(params))

    bad, good = batches(name in PER_EXAMPLE)
    params, states = at(jnp.array([1, 3, 4]), train(jamp.loss_scaled(make(name)), bad))
    plain = at(slice(3), train(make(name), good))
    for x, y in zip(jax.tree.leaves((params, states.inner_state)), jax.tree.leaves(plain), strict=True):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        # The compiler may contract another product in either.
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)


def test_every_transformation_of_optax_is_covered():
    assert len(OPTIMIZERS) >= 50
    assert len(FACTORIES) >= 105
    known = {"adamw", "sgd", "lars", "optimistic_gradient_descent", "nadam", "lbfgs", "lookahead", "dog", "muon", "sam"}
    assert known <= set(OPTIMIZERS)
    assert set(EXTRA_ARGS) <= set(FACTORIES)
    for name in FACTORIES:
        assert hasattr(make(name), "update"), name
