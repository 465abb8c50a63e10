"""Every optimizer of optax.* and optax.contrib.*: a skip changes nothing, and no dtype drifts in any wrapper."""

import functools
import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from trees import assert_close, assert_equal, bits

import jamp
from jamp._optimizer_state.moments import unknown_fields

pytestmark = pytest.mark.promotes("optax")
SGD = optax.sgd(0.1, momentum=0.9)
SCHEDULE = optax.linear_schedule(0.1, 0.01, 4)

# What a required parameter of that name is given. The cases are found, not listed: see `is_factory`.
BY_NAME = {
    "learning_rate": 0.1, "decay": 0.9, "eta": 0.01, "gamma": 0.55, "clipping": 0.5, "max_delta": 0.5,
    "threshold": 0.5, "max_norm": 0.5, "step_size": -0.1, "step_size_fn": optax.linear_schedule(-0.1, -0.01, 4),
    "inner": SGD, "tx": SGD, "optimizer": SGD, "base_optimizer": SGD, "adv_optimizer": SGD, "fast_optimizer": SGD,
    "sync_period": 2, "slow_step_size": 0.5, "max_backtracking_steps": 5, "max_linesearch_steps": 5,
    "max_consecutive_errors": 3, "should_transform_fn": lambda step: step % 2 == 0,
    "transforms": {"a": SGD, "b": optax.adam(0.1)}, "param_labels": {"w": "a", "h": "b", "b": "a"},
    "mask": {"w": True, "h": False, "b": True}, "freeze_mask": {"w": True, "h": False, "b": False},
    "measure_name": "norm", "measure": optax.tree.norm, "l2_norm_clip": 1.0, "noise_multiplier": 0.1, "seed": 0,
    "f": lambda updates, params: jax.tree.map(lambda g: -0.1 * g, updates),
}  # fmt: skip
KEYED = ("add_noise", "noisy_sgd", "differentially_private_aggregate", "dpsgd")  # with a key that is None by default
# What `update` needs besides the gradients. All others accept plain gradients.
LINE_SEARCHES = ("lbfgs", "scale_by_zoom_linesearch", "scale_by_backtracking_linesearch")
VALUED = ("polyak_sgd", "scale_by_polyak", "momo", "momo_adam", "reduce_on_plateau")
EXTRA_ARGS = dict.fromkeys(LINE_SEARCHES, ("value", "grad", "value_fn")) | dict.fromkeys(VALUED, ("value",))
EXTRA_ARGS |= dict.fromkeys(("sophia", "hutchinson_estimator_diag_hessian"), ("obj_fn",))
PER_EXAMPLE = ("dpsgd", "differentially_private_aggregate")  # gradients with a leading batch axis
# Compositions and what makes a factory (test_loss_scaled.py), measurements in place of updates, predicates for
# MultiSteps, and what takes matrices only, which muon gives it.
LEFT_OUT = ["chain", "named_chain", "inject_hyperparams", "inject_stateful_hyperparams", "measure_with_ema", "monitor"]
LEFT_OUT += ["skip_large_updates", "skip_not_finite", "scale_by_muon"]
# These stand for the others where the others are slow: one of each kind of state and of each extra argument.
REPRESENTATIVE = (
    "sgd", "adam", "adamw", "lars", "lamb", "muon", "adafactor", "lbfgs", "lookahead", "sam", "dpsgd",
    "optimistic_gradient_descent", "schedule_free", "momo", "sophia", "add_noise",
)  # fmt: skip


def is_factory(name, f):
    """Whether it is public and says that it returns a gradient transformation."""
    if name.startswith("_") or name in LEFT_OUT or not (inspect.isfunction(f) or isinstance(f, functools.partial)):
        return False
    returned = inspect.signature(f).return_annotation
    return "GradientTransformation" in str(inspect.getdoc(f) if returned is inspect.Signature.empty else returned)


FACTORIES = {name: f for of in (optax, optax.contrib) for name, f in sorted(vars(of).items()) if is_factory(name, f)}
REST = [pytest.param(name, marks=pytest.mark.slow) for name in FACTORIES if name not in REPRESENTATIVE]


def make(name, **arguments):
    parameters = inspect.signature(FACTORIES[name]).parameters
    arguments |= {"key": 0} if name in KEYED and "key" in parameters else {}
    for p in (p for p in parameters.values() if p.default is p.empty and p.name not in arguments):
        scheduled = p.name == "learning_rate" and "Callable" in str(p.annotation)
        arguments[p.name] = SCHEDULE if scheduled else BY_NAME[p.name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # An optimizer that Optax will replace is one until then.
        return FACTORIES[name](**arguments)


# Three leaves, a dtype each, and a negative zero in each: only -0.0 + -0.0 is -0.0.
PARAMS = {
    "w": jnp.array([[0.5, -0.0, 1.0], [-0.75, 2.0, -1.0]]),
    "h": jnp.array([1.0, -0.0, 0.5], jnp.float16),
    "b": jnp.array([[-0.0, 0.25], [0.125, 0.375]], jnp.bfloat16),
}


def fresh_params(name, dtype=None, like=PARAMS):
    params = jax.tree.map(lambda x: jnp.array(x, dtype or x.dtype, copy=True), like)
    return optax.LookaheadParams(params, jax.tree.map(jnp.copy, params)) if name == "lookahead" else params


@functools.cache
def batches(per_example):
    """Two stacked sequences of gradients: of three good batches with bad ones among them, and of good ones only."""
    random = np.random.default_rng(0)
    draw = lambda x: random.normal(size=(2,) * per_example + x.shape).astype(np.float32)
    good = [{k: draw(x) for k, x in PARAMS.items()} for _ in range(3)]
    every = {k: np.full_like(x, np.inf) for k, x in good[0].items()}  # an overflow on the very first step
    one = good[1] | {"b": good[1]["b"].copy()}  # one NaN in one leaf
    one["b"].flat[1] = np.nan
    stack = lambda *steps: jax.tree.map(lambda *x: np.stack(x), *steps)
    return stack(every, good[0], one, good[1], good[2]), stack(*good, *good[:2])


loss = lambda params: sum(jnp.sum(jnp.square(x.astype(jnp.float32) - 0.25)) for x in jax.tree.leaves(params))
at = lambda i, tree: jax.tree.map(lambda x: x[i], tree)


def trainer(name, tx, run=jax.lax.scan):
    """A scan of steps: what is carried at the end, and after each step."""

    def step(carry, grads):
        # The value of a bad batch is NaN like its gradients.
        value = 1.0 + 0.0 * sum(jnp.sum(g) for g in jax.tree.leaves(grads))
        available = {"value": value, "grad": grads, "value_fn": loss, "obj_fn": loss}
        extra_args = {k: available[k] for k in EXTRA_ARGS.get(name, ())}
        updates, state = tx.update(grads, carry[1], carry[0], **extra_args)
        return ((optax.apply_updates(carry[0], updates), state),) * 2

    return jax.jit(lambda carry, grads: run(step, carry, grads), donate_argnums=0)


@pytest.mark.slow_after(8)
@pytest.mark.parametrize("name", [*REPRESENTATIVE, *REST])
def test_skipped_steps_change_no_bit_and_are_as_if_never_seen(name):
    tx = jamp.loss_scaled(make(name))
    train, init = trainer(name, tx), jax.jit(tx.init)
    dtype = None if name in REPRESENTATIVE else jnp.float32  # the program of the next but one test, compiled once
    # Some keep the params themselves in their state, which cannot then be donated twice.
    start = lambda: (fresh_params(name, dtype), init(fresh_params(name, dtype)))
    bad, good = batches(name in PER_EXAMPLE)
    kept = lambda carry: bits((carry[0], carry[1].inner_state))
    before, disturbed = kept(start()), jax.device_get(train(start(), bad)[1])
    end, undisturbed = train(start(), good)
    (first, *expected), history = ([kept(at(i, x)) for i in range(5)] for x in jax.device_get((undisturbed, disturbed)))
    assert history == [before, first, first, *expected[:2]]
    assert expected[2] != before
    train(end, good)
    assert train._cache_size() == 1  # though the last carry is what another call returned: no dtype drifted
    states = disturbed[1]
    np.testing.assert_array_equal(states.grads_finite, [False, True, False, True, True])
    np.testing.assert_array_equal(states.stats.overflow_steps, [1, 1, 2, 2, 2])
    np.testing.assert_array_equal(jamp.get_loss_scale(states), 2.0 ** np.array([15, 15, 14, 14, 14]))


# Each leaf of PARAMS has a dtype of its own, and one dtype for all is not another path through jamp.
@pytest.mark.slow_after(60)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, None) for name in FACTORIES),
        *(pytest.param(x, ("f4", "f2", "bfloat16")[i % 3], marks=pytest.mark.slow) for i, x in enumerate(FACTORIES)),
    ],
)
@pytest.mark.filterwarnings("ignore:float16 parameters without a master copy")
def test_no_leaf_changes_dtype_or_weak_type_whatever_the_params_dtype(name, dtype):
    tx = jamp.loss_scaled(make(name))
    carry = jax.eval_shape(lambda params: (params, tx.init(params)), fresh_params(name, dtype))
    _, stepped = jax.eval_shape(trainer(name, tx), carry, at(slice(1), batches(name in PER_EXAMPLE)[1]))
    seen = lambda x: (x.dtype, x.weak_type)
    for (path, x), y in zip(jax.tree.leaves_with_path(carry), jax.tree.leaves(stepped), strict=True):
        assert (*seen(x), (1, *x.shape)) == (*seen(y), y.shape), jax.tree_util.keystr(path)


BF16 = jnp.bfloat16
split = lambda tx: jamp.master_params(tx, split=True)
in_16_bit = lambda tx: jamp.stochastic_rounding(tx, state_dtype=BF16)
unscaling = lambda tx, *args: jamp.loss_scaled(tx, *args, unscale=True)
WRAPPERS = {
    "loss_scaled": [jamp.loss_scaled, lambda tx: jamp.loss_scaled(tx, jamp.NoOpLossScale())],
    "loss_scaled, unscale": [unscaling, lambda tx: unscaling(jamp.master_params(tx))],
    "master_params": [jamp.master_params, split, lambda tx: jamp.loss_scaled(split(tx))],
    "quantized_state": [
        jamp.quantized_state, lambda tx: jamp.loss_scaled(jamp.quantized_state(tx)),
        lambda tx: split(jamp.quantized_state(tx)), lambda tx: jamp.quantized_state(jamp.master_params(tx)),
    ],
    "stochastic_rounding": [
        jamp.stochastic_rounding, in_16_bit, lambda tx: jamp.loss_scaled(in_16_bit(tx)),
        lambda tx: jamp.stochastic_rounding(tx, state_dtype=jnp.float32),
        lambda tx: jamp.stochastic_rounding(tx, state_dtype=lambda path, x: BF16 if x.dtype == jnp.float32 else None),
        lambda tx: in_16_bit(jamp.quantized_state(tx)), lambda tx: jamp.quantized_state(in_16_bit(tx)),
    ],
}  # fmt: skip
DISTANCES = "dog", "dowg", "mechanize"  # which stochastic_rounding refuses for bfloat16 parameters
CALLING = {name for name, given in EXTRA_ARGS.items() if {"value_fn", "obj_fn"} & set(given)}  # unscale=True refuses
LARGE = {"w": jnp.ones((64, 64)), "h": jnp.ones(3), "b": jnp.ones((2, 2))}  # w is large enough for eight bits


def check_dtypes(name, make):
    """`jax.lax.scan`, which demands it, finds that the dtypes of the state stay in every wrapper."""
    for params_dtype, dtype in ((jnp.float32, jnp.float32), (BF16, jnp.float32), (BF16, BF16)):
        params, half = fresh_params(name, params_dtype, LARGE), params_dtype == BF16
        grads = {k: jax.ShapeDtypeStruct((2, *(2,) * (name in PER_EXAMPLE), *x.shape), dtype) for k, x in LARGE.items()}

        def run(wrap, run=jax.lax.scan, params=params, grads=grads):
            tx = wrap(make())
            return jax.eval_shape(trainer(name, tx, run), (params, tx.init(params)), grads)

        for kind, wrap in [(kind, wrap) for kind, wrappers in WRAPPERS.items() for wrap in wrappers]:
            if (
                (dtype == BF16 and wrap is not jamp.quantized_state)  # All others give the optimizer float32 gradients.
                or (kind == "stochastic_rounding" and half and name in DISTANCES)
                or (kind == "loss_scaled, unscale" and name in CALLING)
            ):
                continue
            try:
                run(wrap)
            except TypeError as error:
                if wrap is jamp.quantized_state and half and "carry" not in str(error):
                    with pytest.raises(TypeError):  # Without a wrapper, too, it takes no 16-bit parameters.
                        run(optax.with_extra_args_support, lambda step, carry, x: step(carry, at(0, x)))
                    continue
                error.add_note(f"{kind}, parameters in {params_dtype.__name__}, gradients in {dtype.__name__}")
                raise


@pytest.mark.slow_after(1)
@pytest.mark.filterwarnings(
    "ignore:(quantized_state stores|stochastic_rounding does) nothing", "ignore:scatter inputs have incompatible types"
)
@pytest.mark.parametrize("name", [*REPRESENTATIVE, *REST])
def test_every_wrapper_keeps_the_dtypes_of_the_state_that_init_made(name):
    check_dtypes(name, lambda: make(name))


def promoting():
    """An optimizer whose update returns its moment in float32."""
    init = lambda params: jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float16), params)
    return optax.GradientTransformation(
        init, lambda grads, state, params=None: (grads, jax.tree.map(jnp.add, grads, state))
    )


LOW_ADAM, LOW_RATE = optax.adamw(1e-3, b1=0.0, mu_dtype=BF16), jnp.array(1e-3, BF16)
# Optimizers that keep arrays in 16 bit by themselves, each with the name whose arguments `update` takes.
OWN = {
    "promoting": ("sgd", promoting),
    "inject_hyperparams": ("adamw", lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=LOW_RATE)),
    "schedule_free": ("adamw", lambda: optax.contrib.schedule_free(LOW_ADAM, 1e-3, state_dtype=BF16)),
    "MultiSteps": ("adamw", lambda: optax.MultiSteps(LOW_ADAM, 2).gradient_transformation()),
    "apply_if_finite": ("adamw", lambda: optax.apply_if_finite(LOW_ADAM, 2)),
    "hyperparam_dtype": ("adamw", lambda: optax.inject_hyperparams(optax.adamw, hyperparam_dtype=BF16)(SCHEDULE)),
} | {
    f"{name}({p}=bfloat16)": (name, functools.partial(make, name, **{p: BF16}))
    for name, f in FACTORIES.items()
    for p in inspect.signature(f).parameters
    if "dtype" in p
}


@pytest.mark.slow_after(1)
@pytest.mark.filterwarnings(
    "ignore:(quantized_state stores|stochastic_rounding does) nothing", "ignore:scatter inputs have incompatible types"
)
@pytest.mark.parametrize("case", OWN)
def test_every_wrapper_keeps_the_16_bit_dtypes_that_the_optimizer_itself_has(case):
    check_dtypes(*OWN[case])


@pytest.mark.slow
@pytest.mark.parametrize("name", FACTORIES)
def test_applied_steps_are_those_of_the_plain_optimizer(name):
    start = lambda tx: jax.jit(lambda params: (params, tx.init(params)))(fresh_params(name, jnp.float32))
    train = lambda tx, grads: trainer(name, tx)(jax.tree.map(jnp.copy, start(tx)), grads)[1]
    bad, good = batches(name in PER_EXAMPLE)
    params, states = at(jnp.array([1, 3, 4]), train(jamp.loss_scaled(make(name)), bad))
    # The compiler may contract another product in either.
    assert_close((params, states.inner_state), at(slice(3), train(make(name), good)), rtol=1e-4, atol=1e-6)


def test_every_transformation_of_optax_is_covered():
    assert len(FACTORIES) >= 105
    assert {*REPRESENTATIVE, *EXTRA_ARGS} <= set(FACTORIES)


@pytest.mark.slow
def test_a_line_search_skips_a_batch_that_overflows_if_its_gradient_is_new():
    loss_fn = lambda w, x: jnp.mean((x @ w - 1.0) ** 2)
    x = jax.random.normal(jax.random.key(0), (32, 8))
    tx, w = jamp.loss_scaled(optax.lbfgs(), jamp.StaticLossScale(1.0)), jnp.zeros(8)

    def step(w, state, x):
        value, grad = jamp.value_and_grad(loss_fn, state)(w, x)
        search = {"value": value, "grad": grad, "value_fn": lambda w: loss_fn(w, x)}
        updates, state = tx.update(grad, state, w, **search)
        return optax.apply_updates(w, updates), state

    w, state = step(w, tx.init(w), x)
    same, state = step(w, state, x.at[0, 0].set(jnp.inf))
    assert_equal(same, w)
    assert not jamp.get_grads_finite(state)
    w, state = step(w, state, x)
    assert jamp.get_grads_finite(state)
    assert loss_fn(w, x) < loss_fn(same, x)


@pytest.mark.parametrize("name", FACTORIES)
def test_all_large_arrays_in_the_states_of_optimizers_with_moments_are_known(name):
    like = jax.tree.map(lambda x: jnp.zeros((64, 64)), PARAMS)
    state = jax.eval_shape(make(name).init, fresh_params(name, jnp.float32, like))
    assert unknown_fields(state, lambda x: hasattr(x, "shape") and len(x.shape) > 1) == []
