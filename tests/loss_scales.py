"""Any loss scale, the states that it goes through, and runs that were recorded from other systems (tests/data).

A loss scale is any object with `init()` and `update(state, grads_finite)`. One that is part of jamp also guarantees:

1. The configuration is a frozen, hashable dataclass of Python numbers, checked at construction. Neither construction
   nor import makes an array.
2. The state is a NamedTuple of strongly typed arrays with a field `loss_scale`, f32[]. Counts are i32[] and saturate.
   No two arrays share a buffer.
3. `update` is pure, works under `jit`, `scan` and `vmap`, and keeps structure, shapes and dtypes.
4. For any values in the state, also inf, NaN and 0, the next update returns a scale inside the bounds.
5. `with_loss_scale(loss_scale)` of the state, if it exists, resets the counts that a new scale makes obsolete.
6. `to_config()` returns a mapping from which `loss_scale_from_config` makes the same loss scale.
7. If another system has this loss scale, a test compares it with a recorded trace of that system.
"""

import dataclasses
import json
import math
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

import jamp

INT32_MAX = 2**31 - 1
TINY = float(np.finfo(np.float32).tiny)
FLOAT32_MAX = float(np.finfo(np.float32).max)


@partial(jax.jit, static_argnums=0)
def run(config, state, finite):
    """The states after every step, from one scan."""

    def step(state, ok):
        state = config.update(state, ok)
        return state, state

    return jax.lax.scan(step, state, finite)[1]


def step_by_step(config, state, finite):
    """The same, one update at a time. To compile a scan for each configuration takes longer."""
    states = [state := config.update(state, ok) for ok in finite]
    return jax.tree.map(lambda *xs: np.stack(xs), *states)


class Rules(jamp.DynamicLossScale):
    """Several configurations in one, with the same ceiling and refill: its numbers are arrays."""

    def __post_init__(self):
        """Check nothing."""

    @classmethod
    def of(cls, configs):
        numbers = {field.name: [getattr(config, field.name) for config in configs] for field in dataclasses.fields(cls)}
        same = {name: numbers.pop(name)[0] for name in ("max_scale", "hysteresis_refill")}
        dtypes = {float: np.float32, int: np.int32}
        return cls(**same, **{name: np.array(x, dtypes[type(x[0])]) for name, x in numbers.items()})


def replay(runs):
    """The states after every step of many runs `(config, state, finite)`. One compilation serves all."""
    length, groups = max(len(finite) for *_, finite in runs), {}
    for i, (config, *_) in enumerate(runs):
        if isinstance(config, jamp.DynamicLossScale):
            key = config.max_scale, config.hysteresis_refill
        else:  # The initial scale and window are read by `init`, and to heal NaN.
            key = dataclasses.replace(config, init_scale=config.min_scale, initial_window=None)
        groups.setdefault(key, []).append(i)
    stack = lambda values: jax.tree.map(lambda *xs: np.stack(xs, -1), *values)
    starts = [stack([runs[i][1] for i in group]) for group in groups.values()]
    pad = lambda finite: np.pad(finite, (0, length - len(finite)))
    finite = [stack([pad(runs[i][2]) for i in group]) for group in groups.values()]
    merged = lambda key, group: Rules.of([runs[i][0] for i in group]) if isinstance(key, tuple) else key
    configs = [merged(*item) for item in groups.items()]
    update = lambda states, ok: [config.update(*x) for config, *x in zip(configs, states, ok, strict=True)]
    scan = jax.jit(lambda states: jax.lax.scan(lambda states, ok: (update(states, ok),) * 2, states, finite)[1])
    found = {}
    for group, states in zip(groups.values(), jax.device_get(scan(starts)), strict=True):
        found |= {i: jax.tree.map(lambda x, i=i, j=j: x[: len(runs[i][2]), j], states) for j, i in enumerate(group)}
    return [found[i] for i in range(len(runs))]


def from_start(config, finite):
    return config, config.init(), finite


def flags(overflow):
    """Whether each step was finite, of a string of 0 (finite) and 1 (overflow)."""
    return np.array([c == "0" for c in overflow])


# Recorded runs


def recorded(name):
    return json.loads((Path(__file__).parent / "data" / name).read_text())


def expand(rle, number=np.float32):
    """The values of run lengths, `[[8.0, 3], ...]` or `"20*59 30 1*3"`."""
    if isinstance(rle, str):
        rle = [(x, int(n or 1)) for x, _, n in (part.partition("*") for part in rle.split())]
    return np.repeat([number(x) for x, _ in rle], [n for _, n in rle])


TORCH = recorded("torch_updates.json")["traces"]


def torch_config(trace):
    return jamp.DynamicLossScale(**trace["config"], min_scale=TINY, max_scale=math.inf)


def torch_tracker(trace):
    """The growth tracker by step, where it is recorded."""
    tracker = trace.get("growth_tracker_at") or {i: int(c, 36) for i, c in enumerate(trace["growth_tracker"])}
    return {int(step): count for step, count in tracker.items()}


def mindspore_finite(trace):
    return flags(bin(int(trace["overflow_hex"], 16))[3:])


def mindspore_counts(trace):
    """The integers that MindFormers' cell holds after every step, by its names of them."""
    names = {"scale_window": "scale_window", "list_index": "list_index"}
    names |= {"scale_window_up_count": "up_count", "scale_window_down_count": "down_count"}
    lengths = expand(trace["last_overflow_iter"], int)
    return {name: expand(trace[short], int) for name, short in names.items()} | {
        "current_iterator_step": np.arange(trace["steps"]) + 2,
        "last_overflow_iterator_step": np.repeat([0, *np.cumsum(lengths)[:-1] + 1], lengths),
    }


# Any loss scale


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
