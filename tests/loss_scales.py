"""Any loss scale, and the states that it goes through."""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from hypothesis import strategies as st

import jamp


@partial(jax.jit, static_argnums=0)
def run(config, state, finite):
    """The states after every step, from one scan."""

    def step(state, ok):
        state = config.update(state, ok)
        return state, state

    return jax.lax.scan(step, state, finite)[1]


@st.composite
def bounds(draw):
    """An initial scale between a floor and a ceiling."""
    exponents = st.floats(-126, 127) | st.integers(-3, 20).map(float)
    low, init, high = sorted(2.0 ** draw(exponents) for _ in range(3))
    return {"min_scale": low, "init_scale": init, "max_scale": draw(st.sampled_from([high, math.inf]))}


@st.composite
def dynamic(draw):
    return jamp.DynamicLossScale(
        **draw(bounds()),
        growth_factor=draw(st.sampled_from([1.01, 1.5, 2.0, 3.0, 1e30])),
        backoff_factor=draw(st.sampled_from([0.99, 0.75, 0.5, 1 / 3, 1e-30])),
        growth_interval=draw(st.integers(1, 6)),
        hysteresis=draw(st.integers(1, 4)),
        hysteresis_refill=draw(st.sampled_from(["growth", "finite"])),
    )


@st.composite
def adaptive(draw):
    return jamp.AdaptiveLossScale(
        **draw(bounds()),
        scale_factor=draw(st.sampled_from([1.01, 1.5, 2, 3.0, 1e30])),
        min_window=draw(st.integers(1, 5)),
        max_window=draw(st.integers(6, 9)),
        initial_window=draw(st.none() | st.integers(0, 9)),
        windows=draw(st.none() | st.lists(st.integers(0, 5), min_size=1, max_size=4)),
    )


static = st.builds(jamp.StaticLossScale, st.floats(1e-30, 1e30) | st.integers(1, 2**40))


class HalvingState(NamedTuple):
    loss_scale: jax.Array


class Halving:
    """A user's own loss scale: halves at an overflow and never grows."""

    def init(self):
        return HalvingState(jnp.float32(8.0))

    def update(self, state, grads_finite):
        return HalvingState(jnp.where(grads_finite, 1.0, 0.5) * state.loss_scale)
