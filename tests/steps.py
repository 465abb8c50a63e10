"""Steps of Optax transformations on given gradients, many transformations in one compilation."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from trees import assert_close, bits

import jamp


class Variable:
    """A pytree like one of Flax NNX, which knows its collection by its type."""

    def __init__(self, value):
        self.value = value

    def __init_subclass__(cls):
        keyed = lambda x: (((jax.tree_util.GetAttrKey("value"), x.value),), None)
        jax.tree_util.register_pytree_with_keys(cls, keyed, lambda _, children: cls(*children))


OVERWRITTEN = type("_overwrite_with_gradient", (Variable,), {})
PARAMS = {"w": jnp.array([0.5, -0.0, 4.0]), "b": jnp.array([-0.0, 1.0])}
GOOD = {"w": jnp.array([1.0, -2.0, 0.5]), "b": jnp.array([0.25, 3.0])}
INF = GOOD | {"b": jnp.array([0.25, jnp.inf])}
NAN = GOOD | {"w": jnp.array([1.0, jnp.nan, 0.5])}

NO_GRADIENTS = {
    "int": jnp.int32([3]),
    "uint": jnp.uint8([255]),
    "bool": jnp.array([True]),
    "key": jax.random.key(0),
    "float0": np.zeros(2, jax.dtypes.float0),
    "none": None,
    "masked": optax.MaskedNode(),
    "object": object(),
    "string": "inf",
}


def with_masters(inner, *args, **kwargs):
    """`loss_scaled` around `master_params`, for 16-bit parameters."""
    return jamp.loss_scaled(jamp.master_params(inner), *args, **kwargs)


def together(txs):
    """One transformation of a dict of gradients, which steps each value with a transformation of its own."""
    txs = {name: optax.with_extra_args_support(tx) for name, tx in txs.items()}

    def update(grads, state, params, **extra_args):
        results = {k: tx.update(grads[k], state[k], params[k], **extra_args) for k, tx in txs.items()}
        return {k: updates for k, (updates, _) in results.items()}, {k: state for k, (_, state) in results.items()}

    return optax.GradientTransformationExtraArgs(lambda p: {k: tx.init(p[k]) for k, tx in txs.items()}, update)


def stepper(tx):
    """A compiled step on given gradients."""

    @jax.jit
    def step(params, state, grads, **extra_args):
        updates, state = tx.update(grads, state, params, **extra_args)
        return optax.apply_updates(params, updates), state

    return step


def runner(txs):
    """A function that runs each of the transformations on the same batches: `(params, state)` after each, by name."""
    tx = together(txs)
    step, each = stepper(tx), lambda x: dict.fromkeys(txs, x)

    def run(*batches, **extra_args):
        carry = each(PARAMS), tx.init(each(PARAMS))
        carries = [carry := step(*carry, each(grads), **extra_args) for grads in batches]
        return {k: [(params[k], state[k]) for params, state in carries] for k in txs}

    return run


def skipped(history):
    """Which steps of a history were skipped, such as "0110"."""
    return "".join("01"[not jamp.get_grads_finite(state)] for _, state in history)


def check_skips(tx, good=GOOD, bad=(INF, NAN), params=PARAMS, rtol=1e-6):
    """A finite step under `loss_scaled` is the plain one; a skipped one changes nothing, after whatever steps."""
    wrapped = jamp.loss_scaled(tx)
    step, plain_step = stepper(wrapped), stepper(tx)
    carry, expected = (params, wrapped.init(params)), (params, tx.init(params))
    for _ in range(2):
        kept = bits((carry[0], carry[1].inner_state))
        for grads in bad:
            carry = step(*carry, grads)
            assert bits((carry[0], carry[1].inner_state)) == kept
            assert not carry[1].grads_finite
        carry, expected = step(*carry, good), plain_step(*expected, good)
        assert_close((carry[0], carry[1].inner_state), expected, rtol)
        assert carry[1].grads_finite
    assert step._cache_size() == 1
