"""LossScaleStats: counts and extremes against plain Python, saturation, printing, and in metrics."""

from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings, strategies as st
from loss_scales import Halving, adaptive, dynamic, run, static

import jamp
from jamp import DynamicLossScale, LossScaleStats

INT32_MAX = 2**31 - 1
STEPS = 32


@partial(jax.jit, static_argnums=0)
def train(config, finite):
    """The parameter and the optimizer state after every step; the gradient is 1 or, on an overflow, nan."""
    tx = jamp.loss_scaled(optax.sgd(1.0), config)

    def step(carry, ok):
        updates, state = tx.update(jnp.where(ok, 1.0, jnp.nan), carry[1])
        return (carry[0] + updates, state), (carry[0] + updates, state)

    return jax.lax.scan(step, (jnp.float32(0), tx.init(jnp.float32(0))), finite)[1]


def reference(finite, scales):
    """The statistics after every step, in plain Python."""
    for n in range(1, len(finite) + 1):
        steps, seen = finite[:n], scales[: n + 1]
        pairs = list(pairwise(seen))
        yield (
            steps.count(True),
            steps.count(False),
            n if not any(steps) else steps[::-1].index(True),
            sum(new > old for old, new in pairs),
            sum(new < old for old, new in pairs),
            min(seen),
            max(seen),
            np.float32(steps.count(True)) / np.float32(n),
        )


@settings(max_examples=40, deadline=None, derandomize=True)
@given(dynamic() | adaptive() | static | st.builds(Halving), st.lists(st.booleans(), min_size=STEPS, max_size=STEPS))
def test_statistics_of_any_loss_scale_agree_with_plain_python_after_every_step(config, finite):
    params, states = train(config, jnp.array(finite))
    scales = run(config, config.init(), jnp.array(finite)).loss_scale.tolist()
    expected = zip(*reference(finite, [float(config.init().loss_scale), *scales]), strict=True)
    for got, want in zip([*states.stats, states.stats.success_rate], expected, strict=True):
        np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(jamp.get_loss_scale(states), scales)
    np.testing.assert_array_equal(jamp.get_grads_finite(states), finite)
    np.testing.assert_array_equal(params, -np.cumsum(finite))


def test_before_the_first_step_counts_are_0_success_rate_1_and_extremes_the_initial_scale():
    stats = LossScaleStats.init(jnp.float32(8.0))
    assert [x.item() for x in stats] == [0, 0, 0, 0, 0, 8, 8]
    assert float(stats.success_rate) == 1.0


def test_every_count_saturates_at_the_largest_int32():
    full = LossScaleStats(*[jnp.int32(INT32_MAX - 1)] * 5, jnp.float32(2.0), jnp.float32(2.0))
    two, four = jnp.float32(2.0), jnp.float32(4.0)
    for _ in range(2):
        full = full.update(jnp.bool_(False), two, four).update(jnp.bool_(False), four, two)
        full = full._replace(finite_steps=full.update(jnp.bool_(True), two, two).finite_steps)
    assert [int(x) for x in full[:5]] == [INT32_MAX] * 5
    assert float(full.success_rate) == 0.5


def after(config, overflow):
    """The optimizer state after steps that overflow where `overflow` has a 1."""
    tx = jamp.loss_scaled(optax.sgd(0.1), config)
    params = jnp.ones(2)
    state = tx.init(params)
    update = jax.jit(lambda grads, state: tx.update(grads, state, params)[1])
    for c in overflow:
        state = update(jnp.where(c == "1", jnp.inf, jnp.ones(2)), state)
    return state


@pytest.mark.parametrize(
    ("overflow", "expected"),
    [
        # applied, skipped, skipped in a row, increases, decreases, min, max
        ("", [0, 0, 0, 0, 0, 4, 4]),
        ("11", [0, 2, 2, 0, 1, 2, 4]),  # the first is held by the hysteresis
        ("1111", [0, 4, 4, 0, 2, 1, 4]),  # the last finds the scale at the floor
        ("00000000", [8, 0, 0, 2, 0, 4, 10]),  # a growth to the ceiling is one, at the ceiling none
        ("001101", [3, 3, 1, 1, 2, 2, 8]),
    ],
)
def test_increases_and_decreases_count_real_changes(overflow, expected):
    config = DynamicLossScale(4.0, growth_interval=2, hysteresis=2, max_scale=10.0)
    stats = jamp.get_stats(after(config, overflow))
    assert [x.item() for x in stats] == expected


def test_metrics_hold_the_loss_scale_the_flag_every_field_and_the_success_rate():
    metrics = jamp.metrics(after(DynamicLossScale(4.0), "0001"))
    assert list(metrics) == ["loss_scale", "grads_finite", *LossScaleStats._fields, "success_rate"]
    assert all(isinstance(x, jax.Array) for x in metrics.values())
    assert {k: v.item() for k, v in metrics.items()} == {
        "loss_scale": 2.0,
        "grads_finite": False,
        "finite_steps": 3,
        "overflow_steps": 1,
        "consecutive_overflows": 1,
        "increases": 0,
        "decreases": 1,
        "min_loss_scale": 2.0,
        "max_loss_scale": 4.0,
        "success_rate": 0.75,
    }


def test_update_takes_a_python_bool():
    stats = LossScaleStats.init(jnp.float32(8.0))
    for ok, applied, skipped in ((True, 1, 0), (False, 0, 1)):
        new = stats.update(ok, jnp.float32(8.0), jnp.float32(8.0))
        assert (int(new.finite_steps), int(new.overflow_steps)) == (applied, skipped)


# Printing

READABLE = (
    "3 steps applied, 1 skipped (75.00% applied, 1 skipped in a row); loss scale raised 0 and lowered 1 times, "
    "between 2 and 4"
)


def test_str_is_one_readable_line_on_the_host_too():
    stats = jamp.get_stats(after(DynamicLossScale(4.0), "0001"))
    assert str(stats) == f"{stats}" == str(jax.device_get(stats)) == READABLE


def test_str_is_the_repr_while_the_fields_are_not_concrete():
    stats = LossScaleStats.init(jnp.float32(8.0))
    printed = []
    jax.jit(lambda s: printed.append((str(s), repr(s))))(stats)
    many = jax.vmap(LossScaleStats.init)(jnp.ones(3))
    shapes = jax.eval_shape(LossScaleStats.init, jnp.float32(8.0))
    names = jax.tree.map(lambda _: "leaf", stats)
    nothing = jax.tree.map(lambda _: None, stats)
    printed += [(str(s), repr(s)) for s in (many, shapes, names, nothing)]
    assert len(printed) == 5
    for text, representation in printed:
        assert text == representation
        assert text.startswith("LossScaleStats(finite_steps=")


# What they are


def check_strong(stats):
    for name, x in stats._asdict().items():
        dtype = jnp.float32 if name.endswith("loss_scale") else jnp.int32
        assert (x.shape, x.dtype, x.weak_type) == ((), dtype, False), name
    rate = stats.success_rate
    assert (rate.shape, rate.dtype, rate.weak_type) == ((), jnp.float32, False)


def check_all_strong():
    args = jnp.bool_(True), jnp.float32(8.0), jnp.float32(16.0)
    for init in (LossScaleStats.init, jax.jit(LossScaleStats.init)):
        stats = init(jnp.float32(8.0))
        check_strong(stats)
        check_strong(stats.update(*args))
        check_strong(jax.jit(LossScaleStats.update)(stats, *args))


@pytest.mark.usefixtures("strict")
def test_fields_are_strongly_typed_scalars():
    check_all_strong()


@pytest.mark.usefixtures("x64")
def test_fields_are_strongly_typed_scalars_under_x64():
    check_all_strong()


@pytest.mark.parametrize("init", ["eager", "jit"])
def test_every_array_is_its_own_buffer_so_that_an_optimizer_state_can_be_donated_twice(init):
    tx = jamp.loss_scaled(optax.sgd(0.1), DynamicLossScale(4.0))
    init = tx.init if init == "eager" else jax.jit(tx.init)
    update = jax.jit(lambda grads, state: tx.update(grads, state)[1], donate_argnums=1)
    for _ in range(2):
        state = init(jnp.ones(2))
        buffers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state)]
        assert len(set(buffers)) == len(buffers)
        state = update(jnp.ones(2), update(jnp.full(2, jnp.nan), state))
        assert [x.item() for x in jamp.get_stats(state)] == [1, 1, 0, 0, 1, 2, 4]


def test_the_scale_they_start_from_is_not_theirs():
    scale = jnp.float32(8.0)
    jax.jit(lambda s: s.update(jnp.bool_(True), s.min_loss_scale, s.min_loss_scale), donate_argnums=0)(
        LossScaleStats.init(scale)
    )
    assert float(scale) == 8.0
