"""inf and NaN at many places of arrays of many shapes, in every wrapper: seen, skipped, and no bit changed.

XLA:CPU's maximum drops NaN in arrays of some shapes and not of others.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxprs import normal
from steps import together
from trees import bits

import jamp
from jamp._optimizer_state.codes import decode, encode
from jamp._optimizer_state.rounding import random_bits, random_words

# From one vector on. XLA:CPU reduces rows of 128 and of 256 in other ways than the rest.
SHAPES = [
    *[(16,), (127,), (128,), (4096,), (5000,), (1, 16), (3, 128), (8, 100), (64, 64), (64, 256), (72, 200), (96, 129)],
    *[(128, 128), (128, 1024), (130, 384), (256, 256), (512, 128), (2, 8, 128), (4, 128, 128), (3, 5, 7, 32)],
]  # fmt: skip
VALUES = (np.nan, -np.nan, np.inf, -np.inf)
KINDS = ((lambda x: x, False), (jnp.square, True))  # of moments: signed, and never negative
PLACES = {"first": lambda n: 0, "middle": lambda n: n // 2 + 1, "last": lambda n: n - 1}


def spoilt(x, place, value):
    x = np.array(x)
    x.reshape(-1)[PLACES[place](x.size)] = value
    return x


@pytest.mark.slow
@pytest.mark.parametrize("is_jitted", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_block_that_holds_inf_or_nan_is_stored_as_that_and_no_other_is(is_jitted):
    def both(arrays):
        random = random_bits(random_words(0, jnp.int32(1)), "w")
        return [decode(encode(f(x), 128, is_square, random)) for x in arrays for f, is_square in KINDS]

    # Eagerly each shape is two programs of its own.
    arrays = [np.asarray(normal(*shape)) for shape in (SHAPES if is_jitted else SHAPES[3::8])]
    run = jax.jit(both) if is_jitted else both
    cases = itertools.product(PLACES, VALUES) if is_jitted else [("middle", np.nan), ("last", np.inf)]
    for place, value in cases:
        bad = [spoilt(x, place, value) for x in arrays]
        for i, found in enumerate(run(bad)):
            x = bad[i // 2]
            blocks = np.abs(np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % min(128, x.shape[-1]))]))
            has = ~np.isfinite(blocks.reshape(*x.shape[:-1], -1, min(128, x.shape[-1])))
            wanted = np.repeat(has.any(-1), min(128, x.shape[-1]), -1)[..., : x.shape[-1]]
            np.testing.assert_array_equal(~np.isfinite(found), wanted, f"{x.shape} {place} {value}")


TX = optax.chain(optax.clip_by_global_norm(1e6), optax.sgd(1e-2, momentum=0.9))
WRAPPERS = {
    "loss_scaled": lambda tx: tx,
    "masters": jamp.master_params,
    "split masters": functools.partial(jamp.master_params, split=True),
    "8-bit": jamp.quantized_state,
    "split masters, 8-bit": lambda tx: jamp.master_params(jamp.quantized_state(tx), split=True),
    "rounded": jamp.stochastic_rounding,
    "rounded, bfloat16 state": functools.partial(jamp.stochastic_rounding, state_dtype=jnp.bfloat16),
    "rounded, 8-bit": lambda tx: jamp.stochastic_rounding(jamp.quantized_state(tx)),
}


def check_skips(shapes):
    params = {f"{shape}": normal(*shape) for shape in shapes}
    low = jamp.cast_floating(params, jnp.bfloat16)
    tx = together({name: jamp.loss_scaled(wrap(TX)) for name, wrap in WRAPPERS.items()})
    params = {name: params if name in ("loss_scaled", "8-bit") else low for name in WRAPPERS}

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(dict.fromkeys(WRAPPERS, grads), state, params)
        return optax.apply_updates(params, updates), state

    good = {f"{shape}": np.asarray(normal(*shape, seed=1)) for shape in shapes}
    params, state = step(params, tx.init(params), good)
    inner = lambda state: {name: s.inner_state for name, s in state.items()}
    kept = bits((params, inner(state)))
    for leaf, place, value in itertools.product(good, PLACES, (np.nan, np.inf)):
        after, changed = step(params, state, good | {leaf: spoilt(good[leaf], place, value)})
        assert not any(bool(jamp.get_grads_finite(s)) for s in changed.values()), (leaf, place, value)
        assert bits((after, inner(changed))) == kept, (leaf, place, value)
    assert bits(step(params, state, good)) != bits((params, state))


@pytest.mark.promotes("optax")
def test_a_step_with_inf_or_nan_is_skipped_and_changes_no_bit():
    check_skips([(127,), (128, 128)])


@pytest.mark.slow
@pytest.mark.promotes("optax")
def test_a_step_with_inf_or_nan_is_skipped_and_changes_no_bit_in_all_shapes():
    check_skips(SHAPES)


@pytest.mark.promotes("optax")
def test_without_a_skip_a_nan_reaches_the_8_bit_moments_and_the_next_update():
    tx, params = jamp.quantized_state(optax.sgd(1e-2, momentum=0.9)), jnp.ones((128, 128))
    update, state = jax.jit(tx.update), tx.init(params)
    for place in PLACES:
        _, after = update(spoilt(params, place, np.nan), state, params)
        assert not np.isfinite(jamp.interop.dequantize_state(after)[0].trace).all()
        assert not jamp.all_finite(update(params, after, params)[0])
