"""Every wrapper given a state that is not its own: an error that names the cure, or the right step."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jaxprs import normal
from steps import with_masters
from trees import assert_equal

import jamp

ADAM = optax.adam(1e-3)
HALF = {"w": normal(64, 256).astype(jnp.bfloat16), "b": jnp.ones(256, jnp.bfloat16)}
FULL = jamp.cast_floating(HALF, jnp.float32)
split = lambda tx: jamp.master_params(tx, split=True)

# Around whatever they wrap. The state is that of the wrapper alone.
WRAPPERS = {
    "loss_scaled": jamp.loss_scaled,
    "loss_scaled, unscale": lambda tx: jamp.loss_scaled(tx, unscale=True),
    "loss_scaled, static": lambda tx: jamp.loss_scaled(tx, jamp.StaticLossScale()),
    "master_params": jamp.master_params,
    "split masters": split,
    "stochastic_rounding": jamp.stochastic_rounding,
    "quantized_state": jamp.quantized_state,
    "quantized_state, 64": lambda tx: jamp.quantized_state(tx, block_size=64),
}
# What comes back from a file or from other code.
OTHERS = {
    "plain": ADAM.init,
    "a chain's": lambda p: optax.chain(optax.clip(1.0), jamp.quantized_state(ADAM)).init(p),
    "loss_scaled(master_params)": with_masters(ADAM).init,
    "loss_scaled(quantized_state)": jamp.loss_scaled(jamp.quantized_state(ADAM)).init,
    "split masters of quantized_state": split(jamp.quantized_state(ADAM)).init,
    "stochastic_rounding(quantized_state)": jamp.stochastic_rounding(jamp.quantized_state(ADAM)).init,
    "quantized_state, 32": jamp.quantized_state(ADAM, block_size=32).init,
    "None": lambda p: None,
    "a list": lambda p: jax.tree.leaves(ADAM.init(p)),
}
CURE = re.compile(r"jamp\.interop|jamp\.convert_loss_scale|tx\.init\(")


def step(tx, state, params=HALF):
    return jax.eval_shape(tx.update, jax.tree.map(jnp.ones_like, params), state, params)


@pytest.mark.slow_after(4)
@pytest.mark.promotes("optax")
@pytest.mark.filterwarnings("ignore:quantized_state stores nothing")
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_state_of_anything_else_is_an_error_that_names_the_cure(name):
    tx = WRAPPERS[name](ADAM)
    params = FULL if "quantized" in name else HALF  # the moments of bfloat16 parameters stay whole
    states = {other: wrap(ADAM).init for other, wrap in WRAPPERS.items()} | OTHERS
    states |= {
        "a dict": lambda p: tx.init(p)._asdict(),
        "a tuple": lambda p: tuple(tx.init(p)),
        "one more around": lambda p: {"opt": tx.init(p)},
    }
    own = tx.init(params)
    for other, make in states.items():
        if other == name:
            assert jax.tree.structure(step(tx, own, params)[1]) == jax.tree.structure(own)
            continue
        state = make(params)
        if type(state) is type(own) and other in OTHERS:
            continue  # This wrapper's part is right, and what is inside is for the optimizer inside to check.
        with pytest.raises((TypeError, ValueError)) as error:
            step(tx, state, params)
        assert CURE.search(str(error.value)), (other, error.value)


@pytest.mark.promotes("optax")
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_state_that_was_cast_is_an_error_where_that_changes_what_it_stands_for(name):
    tx = WRAPPERS[name](ADAM)
    params = FULL if "quantized" in name else HALF
    own = tx.init(params)
    is_bits = lambda x: x.dtype in (jnp.int8, jnp.uint8, jnp.uint16, jnp.uint32)
    casts = {
        "floats to 16 bit": lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x,
        "bits to int32": lambda x: x.astype(jnp.int32) if is_bits(x) else x,
        "bits to float32": lambda x: x.astype(jnp.float32) if is_bits(x) else x,
        "bits to other bits": lambda x: x.astype(jnp.int16) if is_bits(x) else x,
    }
    wrong = {
        **dict.fromkeys(["split masters", "quantized_state", "quantized_state, 64"], set(casts) - {"floats to 16 bit"}),
        "stochastic_rounding": set(),
    }.get(name, {"floats to 16 bit"})
    for cast, change in casts.items():
        state = jax.tree.map(change, own)
        if cast not in wrong:
            step(tx, state, params)  # The state of the optimizer inside is its own.
            continue
        with pytest.raises(TypeError, match=r"tx\.init\(params\)"):
            step(tx, state, params)


@pytest.mark.promotes("optax")
def test_the_cures_give_the_right_state():
    grads = jax.tree.map(lambda p: normal(*p.shape, seed=p.ndim), FULL)
    quantized = {size: jamp.quantized_state(ADAM, block_size=size) for size in (64, 128)}
    states = {size: tx.update(grads, tx.init(FULL), FULL)[1] for size, tx in quantized.items()}
    # Every block size is read right, whatever the transformation.
    exact = ADAM.update(grads, ADAM.init(FULL), FULL)[1]
    for state in states.values():
        found = jamp.interop.dequantize_state(state)
        largest = jnp.max(jnp.abs(exact[0].mu["w"]))
        assert float(jnp.max(jnp.abs(found[0].mu["w"] - exact[0].mu["w"]))) < largest / 64  # a step of the codes
    with pytest.raises(ValueError, match=r"state\[0\]\.mu\['w'\] .*=128, got 64"):
        step(quantized[128], states[64], FULL)
    converted = jamp.interop.quantize_state(jamp.interop.dequantize_state(states[64]), 128)
    step(quantized[128], converted, FULL)
    # Each cure of a message.
    plain = ADAM.init(FULL)
    step(quantized[128], jamp.interop.quantize_state(plain, 128), FULL)
    for make in (jamp.master_params, jamp.stochastic_rounding):
        step(make(ADAM), make(ADAM).init(HALF)._replace(inner_state=plain))
    whole = jamp.master_params(ADAM).init(FULL)
    params, halves = jamp.interop.split_masters(whole, HALF)
    step(split(ADAM), halves, params)
    assert_equal(jamp.interop.join_masters(halves, params), whole)
    step(jamp.master_params(ADAM), jamp.interop.join_masters(halves, params), params)
    step(jamp.loss_scaled(ADAM), jamp.interop.wrap_state(plain), FULL)
    for convert in (jamp.interop.dequantize_state, lambda s: jamp.interop.join_masters(s, HALF)):
        with pytest.raises(TypeError, match="Expected"):
            convert(whole)
    with pytest.raises(TypeError, match="Expected"):
        jamp.interop.split_masters(halves, params)


def test_codes_and_scales_that_do_not_belong_together_are_an_error():
    state = jamp.quantized_state(ADAM).init({"w": jnp.ones((64, 320))})
    moment = state.inner_state[0].mu
    assert jamp.interop.dequantize_state(state)[0].mu["w"].shape == (64, 320)  # in blocks of 128, 128 and 64
    for shape in ((64, 4), (64, 0), (32, 3), (3,), (), (64, 321)):
        other = moment._replace(scales={"w": jnp.ones(shape, jnp.uint32)})
        broken = state._replace(inner_state=(state.inner_state[0]._replace(mu=other), *state.inner_state[1:]))
        with pytest.raises(ValueError, match=r"state\[0\]\.mu\['w'\] has codes of shape \(64, 320\)"):
            jamp.interop.dequantize_state(broken)


def test_a_state_with_the_codes_of_an_older_jamp_is_an_error():
    """They had float32 scales, an `optax.MaskedNode` for an array that stays whole, and stood for other numbers."""
    tx = jamp.quantized_state(ADAM)
    params = {"w": jnp.ones((64, 256)), "b": jnp.ones(8)}
    state = tx.init(params)
    for scales in (
        {"w": jnp.ones((64, 2)), "b": optax.MaskedNode()},
        {"w": jnp.ones((64, 2)), "b": jnp.zeros(8, bool)},
        {"w": jnp.ones((64, 2), jnp.uint32), "b": optax.MaskedNode()},
    ):
        moment = state.inner_state[0].nu._replace(scales=scales)
        old = state._replace(inner_state=(state.inner_state[0]._replace(nu=moment), *state.inner_state[1:]))
        for read in (lambda s: tx.update(params, s, params), jamp.interop.dequantize_state):
            with pytest.raises(TypeError, match=r"\[0\]\.nu.* older jamp"):
                read(old)
