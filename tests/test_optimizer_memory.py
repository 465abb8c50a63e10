"""Split masters and quantized states: the bits of both, and the optimizers around and inside them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings, strategies as st
from jaxprs import equations, normal
from steps import stepper
from trees import assert_equal, bits

import jamp
from jamp._jaxprs.primitives import EXACT
from jamp._optimizer_state import codes as block_codes, moments
from jamp._optimizer_state.codes import BlockCodes, decode
from jamp._optimizer_state.rounding import next_count, random_bits, random_words
from jamp._optimizer_state.split_masters import join_master, split_master, upper_half

BF16 = jnp.bfloat16
promotes = pytest.mark.promotes("optax.apply_updates, and Optax's optimizers")
of_bits = lambda x: np.asarray(x, np.uint32).view(np.float32)


def encode(x, block_size, never_negative, step=0):
    """The codes of an array in a step."""
    return block_codes.encode(x, block_size, never_negative, random_bits(random_words(0, jnp.int32(step)), "w"))


def stored(tree):
    """The arrays of codes in a state, by path."""
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path): x for path, x in leaves if x.dtype in (jnp.int8, jnp.uint8)}


# Split masters


def test_every_float32_splits_and_joins_exactly_and_its_bfloat16_is_the_nearest():
    high, low = np.arange(2**16, dtype=np.uint32), np.uint32([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1234, 0xEDCB])
    u = (high[:, None] << 16 | low).ravel()
    params, low_bits = jax.jit(split_master)(of_bits(u))
    is_nan = np.isnan(of_bits(u))
    assert not np.any(np.asarray(params).view(np.uint32)[~is_nan] & 0xFFFF)
    assert not np.any(np.asarray(low_bits)[is_nan])
    with np.errstate(invalid="ignore"):
        params = np.asarray(params).astype(BF16)
    joined = np.asarray(jax.jit(join_master)(params, low_bits))
    assert_equal(joined.view(np.uint32)[~is_nan], u[~is_nan])
    assert_equal(np.isnan(joined), is_nan)
    with np.errstate(invalid="ignore"):
        nearest = np.asarray(of_bits(u).astype(BF16))
    is_tie = (u & 0xFFFF) == 0x8000
    assert_equal(np.isnan(np.float32(params)), is_nan)
    assert_equal(np.asarray(params)[~is_tie & ~is_nan].view(np.uint16), nearest[~is_tie & ~is_nan].view(np.uint16))
    away = np.asarray(params)[is_tie & ~is_nan].view(np.uint16)
    assert_equal(away, np.uint16((u[is_tie & ~is_nan] >> 16) + 1))  # with the exponent's carry, to inf at the end


def test_the_low_bits_are_cast_from_a_select_for_ptxas_13_0():
    """It makes the cast of a register that holds a float a conversion of the float. Seen on an H100."""
    jaxpr = jax.make_jaxpr(split_master)(jnp.ones(3)).jaxpr
    casts = [eqn for eqn in equations(jaxpr) if eqn.outvars[0].aval.dtype == jnp.uint16]
    made = {eqn.outvars[0]: eqn for eqn in jaxpr.eqns}
    for eqn in casts:
        assert "select_n" in str(made[eqn.invars[0]])
    assert len(casts) == 1


def test_low_bits_of_another_step_move_a_master_by_at_most_a_spacing():
    """As where the parameter was flushed to 0, or lost digits in the addition of an update."""
    params = np.arange(2**16, dtype=np.uint16).view(BF16)
    low = np.uint16([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    joined = np.asarray(jax.jit(join_master)(params[:, None], low[None])).view(np.uint32)
    wide = np.broadcast_to(np.float32(params)[:, None], joined.shape)
    apart = np.abs(joined.astype(np.int64) - wide.view(np.uint32))
    is_number = np.isfinite(wide)
    assert not np.isnan(joined.view(np.float32))[is_number].any()
    assert np.isfinite(joined.view(np.float32))[is_number & (np.abs(wide) < 3.3e38)].all()
    assert np.max(apart[is_number]) < 2**16  # in units of the last place of float32


def test_a_master_that_xla_computes_twice_and_rounds_differently_is_one_of_the_two():
    rng = np.random.default_rng(0)
    first = rng.integers(2**24, 0x7F000000, 10**5, np.uint32) | rng.integers(0, 2, 10**5, np.uint32) << 31
    second = (first + rng.integers(-100, 101, first.size)).astype(np.uint32)
    low = first.astype(np.uint16)
    join = lambda bits, low: np.asarray(
        jax.jit(join_master)(np.asarray(jax.jit(upper_half)(of_bits(bits), low)).astype(BF16), low)
    )
    assert_equal(join(second, low), of_bits(first))
    # One of the two is 0: the result is of their size. One is inf: the other is the largest number.
    tiny = np.uint32([0x2F00ABCD, 0x2F001234, 0xAF00ABCD])
    for upper, low in ((tiny, 0 * tiny), (0 * tiny, tiny)):
        found = join(upper, low.astype(np.uint16))
        assert np.all(np.abs(found - of_bits(upper)) <= 2.0**-8 * np.abs(of_bits(tiny)))
    inf, largest = np.uint32([0x7F800000]), np.uint32([0x7F7FFFFF])
    assert not np.isnan(join(inf, largest.astype(np.uint16))).any()
    assert not np.isnan(join(largest, inf.astype(np.uint16))).any()


def train(tx, params, steps, seed=0):
    """Masters, parameters and the number of ties after each step on a loss that the parameters change."""
    target = jax.tree.map(lambda p: normal(*p.shape, seed=seed + p.ndim), params)
    loss = lambda p: sum(jax.tree.leaves(jax.tree.map(lambda x, t: jnp.sum((x.astype(t.dtype) - t) ** 2), p, target)))

    def step(carry, _):
        p, state = carry
        updates, state = tx.update(jax.grad(loss)(p), state, p)
        p = optax.apply_updates(p, updates)
        whole = state if isinstance(state, jamp.MasterParamsState) else jamp.interop.join_masters(state, p)
        ties = jax.tree.map(lambda m: jnp.sum(jax.lax.bitcast_convert_type(m, jnp.uint32) & 0xFFFF == 0x8000), whole[0])
        return (p, state), (whole.master_params, p, ties)

    return jax.jit(lambda c: jax.lax.scan(step, c, None, length=steps)[1])((params, tx.init(params)))


@pytest.mark.slow
@promotes
def test_a_run_equals_that_with_whole_masters_up_to_its_first_tie():
    params = {"w": normal(60, 50, seed=2).astype(BF16), "b": normal(30, seed=3), "v": jnp.full(50, 0.01, BF16)}
    with jax.disable_jit():  # XLA may compute a master twice, and round it differently.
        runs = [train(jamp.master_params(optax.adamw(1e-3), split=split), params, 30) for split in (False, True)]
    (whole, old, ties), (split, new, _) = jax.device_get(runs)
    ties = np.sum(jax.tree.leaves(ties), 0)
    first = int(np.argmax(ties > 0)) if ties.any() else len(ties)
    assert 3 <= first < len(ties)  # both cases are seen
    for mine, theirs in ((split, whole), (new, old)):
        assert bits(jax.tree.map(lambda x: x[:first], mine)) == bits(jax.tree.map(lambda x: x[:first], theirs))
    off = [np.max(np.abs(np.float32(split[k]) - whole[k])) for k in params]
    assert 0 < max(off) < 1e-3  # and after it stay close
    # Compiled, up to the last places of float32 in each step, and with bfloat16 parameters that are the same.
    runs = [train(jamp.master_params(optax.adamw(1e-3), split=split), params, first) for split in (False, True)]
    (whole, old, _), (split, new, _) = jax.device_get(runs)
    assert bits(new) == bits(old)
    for k in params:
        np.testing.assert_allclose(split[k], whole[k], rtol=first * 2.0**-22, atol=first * 2.0**-30)


@promotes
def test_schedule_free_with_split_masters_ends_some_last_places_from_whole_ones():
    """Each is a program of its own, and XLA rounds what it fuses in its own way."""
    params = normal(32, 160).astype(BF16)
    grads = jax.random.normal(jax.random.key(1), (20, 32, 160))
    ends = []
    for split in (False, True):
        tx = jamp.master_params(optax.contrib.schedule_free_adamw(1e-2), split=split)
        step, p, state = stepper(tx), params, tx.init(params)
        for g in grads:
            p, state = step(p, state, g)
        masters = (jamp.interop.join_masters(state, p) if split else state).master_params
        ends.append(np.asarray(masters).view(np.int32).astype(np.int64))
    assert np.max(np.abs(ends[0] - ends[1])) < 100


@promotes
def test_split_masters_convert_to_whole_ones_and_reject_what_they_cannot_hold():
    tx, split = (jamp.master_params(optax.adam(1e-3), split=s) for s in (False, True))
    wide = {"w": normal(40, 30), "b": normal(30, seed=1)}
    like = {"w": wide["w"].astype(BF16), "b": wide["b"]}
    params, state = jamp.interop.split_masters(tx.init(wide), like)
    assert [x.dtype for x in params.values()] == [jnp.float32, BF16][:: -1 if list(params) == ["w", "b"] else 1]
    assert_equal(jamp.interop.join_masters(state, params), tx.init(wide))
    assert jax.tree.map(jnp.shape, split.init(like)) == jax.tree.map(jnp.shape, state)
    assert isinstance(state.low_bits["b"], optax.MaskedNode)  # float32 parameters are their own masters


@promotes
def test_a_parameter_of_another_dtype_than_its_state_was_made_for_is_an_error():
    """As of a checkpoint loaded in float32, or of `p + u` by hand: its low bits would be lost without a word."""
    tx = jamp.master_params(optax.sgd(1e-4), split=True)
    params = {"w": normal(8, 4).astype(BF16), "b": normal(4, seed=1)}
    ones = jax.tree.map(jnp.ones_like, params)
    state = tx.init(params)
    for _ in range(5):
        updates, state = tx.update(ones, state, params)
        params = optax.apply_updates(params, updates)
    wide, narrow = (params | {k: params[k].astype(dtype)} for k, dtype in (("w", jnp.float32), ("b", BF16)))
    around = jamp.loss_scaled(tx)
    for bad, match in ((wide, r"\['w'\] .*join_masters"), (narrow, r"\['b'\] .*split_masters")):
        for call in (
            lambda bad: tx.update(ones, state, bad),
            lambda bad: jax.jit(tx.update)(ones, state, bad),
            lambda bad: jamp.interop.join_masters(state, bad),
            lambda bad: around.update(ones, jamp.interop.wrap_state(state), bad),
        ):
            with pytest.raises(ValueError, match=match):
                call(bad)
    # The cures: an exact cast, and new low bits for a parameter that is now narrower.
    masters = jamp.interop.join_masters(state, params).master_params
    back = wide | {"w": wide["w"].astype(BF16)}
    assert_equal(jamp.interop.join_masters(state, back).master_params, masters)
    whole = jamp.MasterParamsState(masters, state.inner_state)
    params, state = jamp.interop.split_masters(whole, narrow)
    assert_equal(jamp.interop.join_masters(state, params).master_params, masters)
    tx.update(ones, state, params)


# The codes


floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
arrays = st.lists(floats, min_size=32, max_size=32).map(lambda x: np.float32(x).reshape(2, 16))


def multiples(never_negative):
    """The multiple of the unit that each code from 0 on stands for, f64: straight lines between powers of two."""
    k = np.arange(7.0)
    if never_negative:  # 4 is 4, and from there on a quarter of an octave of places is an octave
        places, values = np.exp2(k + 2)[:, None] * [1, 1.25, 1.5, 1.75], np.exp2(4 * k + 2)[:, None] * [1, 2, 4, 8]
        return np.interp(np.arange(256), [0, *places.ravel(), 512], [0, *values.ravel(), 2.0**30])
    places, values = np.exp2(k + 1)[:, None] * [1, 1.5], np.exp2(2 * k + 1)[:, None] * [1, 2]
    return np.interp(np.arange(128), [0, *places.ravel()], [0, *values.ravel()])


def units(scales):
    return np.float64(np.asarray(scales).view(np.float32))


@settings(max_examples=80, deadline=None, derandomize=True)
@given(arrays, st.booleans(), st.sampled_from([4, 8, 16, 128]))
def test_a_code_is_one_of_the_two_next_to_a_number_and_stays_itself(x, never_negative, size):
    x, table = np.abs(x) if never_negative else x, multiples(never_negative)
    codes = encode(x, size, never_negative)
    found = np.asarray(decode(codes), np.float64)
    assert codes.scales.shape == (2, -(-16 // min(size, 16)))
    again = encode(np.float32(found), size, never_negative, step=1)
    assert_equal(again, codes)
    for start in range(0, 16, min(size, 16)):
        block, got = np.float64(x[:, start : start + size]), found[:, start : start + size]
        unit = units(codes.scales)[:, start // size, None]
        largest = np.abs(block).max(1, keepdims=True)
        wanted = np.clip(largest / table[-1], 2.0**-126, np.finfo(np.float32).max / table[-1])
        assert np.all(np.abs(unit / wanted - 1) < 2.0**-17)
        below = np.clip(np.searchsorted(table, np.abs(block) / unit * (1 + 1e-6)) - 1, 0, None)
        ways = [unit * table[np.clip(below + up, 0, len(table) - 1)] * np.sign(block) for up in (0, 1)]
        tiny = 2.0**-126  # what a device may flush
        is_near = np.min([np.abs(got - way) for way in ways], 0) <= 1e-6 * np.abs(got) + tiny
        # A number that a code represents, up to the rounding of the unit, may be on either side of it.
        assert np.all(is_near | (np.abs(got - block) <= 1e-5 * np.abs(block)))
        if never_negative:
            assert np.all(got[block >= 2.0**-126] > 0)


def test_what_every_code_stands_for_is_stored_as_that_code_at_any_scale():
    largest = jnp.exp(jnp.linspace(-80, 80, 4001))[:, None]
    for never_negative, codes in (
        (True, jnp.arange(256, dtype=jnp.uint8)),
        (False, jnp.arange(-127, 128, dtype=jnp.int8)),
    ):
        stored = BlockCodes(jnp.broadcast_to(codes, (4001, codes.size)), encode(largest, 256, never_negative).scales)
        # Exactly these multiples of the unit, in any order of multiplication: they have few significant bits.
        exact = np.sign(np.int32(codes)) * multiples(never_negative)[np.abs(np.int32(codes))] * units(stored.scales)
        assert_equal(decode(stored), np.float32(exact))
        assert_equal(np.float64(np.float32(exact)), exact)
        for step in range(4):
            assert_equal(encode(decode(stored), 256, never_negative, step=step), stored)


def test_codes_are_computed_by_operations_with_the_same_bits_on_every_device():
    """By integers and exact operations on floats, without a root or a power. One division for each scale."""
    integers = {"bitcast_convert_type", "shift_left", "shift_right_logical", "xor", "or"}
    around = {"cond", "platform_index", "jit"}
    x, random = jnp.ones((64, 256)), random_bits(random_words(0, jnp.int32(0)), "w")
    for never_negative in (False, True):
        encoded = jax.make_jaxpr(lambda x, n=never_negative: block_codes.encode(x, 128, n, random))(x).jaxpr
        decoded = jax.make_jaxpr(decode)(block_codes.encode(x, 128, never_negative, random)).jaxpr
        for jaxpr, divisions in ((encoded, [(64, 2)]), (decoded, [])):
            eqns = list(equations(jaxpr))
            assert {eqn.primitive.name for eqn in eqns} <= EXACT | integers | around
            assert [eqn.outvars[0].aval.shape for eqn in eqns if eqn.primitive.name == "div"] == divisions


def test_a_number_above_the_largest_of_its_block_gets_the_largest_code():
    """The passes of a step for scales and for codes may round differently. A code that wraps is another number."""
    random = random_bits(random_words(0, jnp.int32(0)), "w")
    for never_negative, most in ((False, 127), (True, 255)):
        largest = jnp.exp(jnp.linspace(-60, 80, 4001))[:, None]
        scales = block_codes.encode(largest, 16, never_negative, random).scales
        for ulps in (-4, -1, 1, 4, 64, 2**20):
            x = jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(largest, jnp.int32) + ulps, jnp.float32)
            codes = block_codes.encode(x, 16, never_negative, random, scales).codes
            assert codes.min() >= most - 1
            if not never_negative:
                below = np.int32(block_codes.encode(-x, 16, never_negative, random, scales).codes)
                assert -128 < below.min() <= below.max() <= 1 - most


@pytest.mark.slow
def test_on_average_a_code_is_the_number_and_random_bits_differ_by_step():
    x = jnp.abs(normal(512, 128)) + 0.1
    for never_negative in (False, True):
        runs = jnp.stack([decode(encode(x, 128, never_negative, step=k)) for k in range(64)])
        mean, spread = runs.mean(0) / x - 1, (runs / x).std(0)
        assert float(jnp.abs(mean.mean())) < 2e-4
        assert float(jnp.mean(jnp.abs(mean) < 5 * jnp.maximum(spread, 1e-3) / 8)) > 0.98  # of skewed samples
    equal = jnp.full((64, 128), 0.3).at[:, 0].set(1 + jnp.arange(64) / 64)
    first, second = (np.float32(encode(equal, 128, True, step=k).codes[:, 1:]) for k in range(2))
    up = [x - x.mean(1, keepdims=True) for x in (first, second)]
    assert np.std(up[0]) > 0.1
    pairs = (up[0], up[1]), (up[0][:, 1:], up[0][:, :-1])
    assert max(abs(np.corrcoef(x.ravel(), y.ravel())[0, 1]) for x, y in pairs) < 0.06  # of steps, and of places


@pytest.mark.parametrize("start", [0, 2**31 - 600])
def test_codes_move_where_a_scale_stands_still_and_after_2_to_the_31_steps(start):
    """Without the step in the random bits, the same number gets the same bits forever."""
    x = jax.random.uniform(jax.random.key(0), (64, 128)).at[:, 0].set(1.0)

    def step(carry, _):
        codes, count = carry
        count = next_count(count)
        return (encode((decode(codes) * 0.999).at[:, 0].set(1.0), 128, True, count), count), None

    run = jax.jit(lambda carry: jax.lax.scan(step, carry, None, length=1000)[0])
    codes, count = run((encode(x, 128, True, start), jnp.int32(start)))
    assert int(count) == (start + 1000 + 2**31) % 2**32 - 2**31  # it wraps around
    # An error is at most the largest spacing of the codes, 4 / 255, with half of it as its deviation, and decays.
    deviation = 2 / 255 * (1 / (1 - 0.999**2)) ** 0.5
    found, wanted = decode(codes)[:, 1:].mean(), x[:, 1:].mean() * 0.999**1000
    assert abs(float(found - wanted)) < 6 * deviation / (64 * 127) ** 0.5
    assert float(found) < 0.25  # and it was 0.5


@promotes
def test_the_step_in_the_random_bits_is_counted_kept_on_a_skip_and_shared():
    tx = jamp.loss_scaled(jamp.quantized_state(optax.sgd(0.1, momentum=0.9)))
    params = {"w": normal(64, 64)}
    state = tx.init(params)
    count = lambda state: np.asarray(state.inner_state.rounding_count).tolist()
    assert count(state) == int(jamp.interop.quantize_state(optax.EmptyState()).rounding_count) == 0
    step = stepper(tx)
    after, state = step(params, state, params)
    _, skipped = step(after, state, {"w": params["w"] * jnp.nan})
    assert (count(state), count(skipped)) == (1, 1)
    both = jax.jit(jax.vmap(lambda p: tx.update(p, tx.init(p), p)[1]))(
        jax.tree.map(lambda x: jnp.stack([x, x]), params)
    )
    assert count(both) == [1, 1]
    codes = both.inner_state.inner_state[0].trace.codes["w"]
    assert_equal(codes[0], codes[1])
    # The same step of another count rounds otherwise, and of the same count, as after a restart, does not.
    again = lambda n: step(after, state._replace(inner_state=state.inner_state._replace(rounding_count=n)), params)
    codes = [again(jnp.int32(n))[1].inner_state.inner_state[0].trace.codes["w"] for n in (1, 1, 2)]
    assert_equal(codes[0], codes[1])
    assert 0 < np.mean(codes[0] != codes[2]) < 0.7
    with jax.numpy_rank_promotion("raise"):
        jax.eval_shape(tx.update, params, state, params)


def test_inf_nan_zero_and_the_smallest_numbers():
    for never_negative in (False, True):
        x = jnp.ones((4, 16)).at[0, 3].set(jnp.inf).at[1, 3].set(jnp.nan).at[2].set(0).at[3, 0].set(1e-40)
        found = np.asarray(decode(encode(x, 16, never_negative)))
        assert not np.isfinite(found[:2, 3]).any()
        assert not np.isfinite(found[:2]).any()
        assert_equal(found[2], np.zeros(16, np.float32))
        largest = jnp.full((1, 16), jnp.finfo(jnp.float32).max)
        np.testing.assert_allclose(decode(encode(largest, 16, never_negative)), largest, rtol=2.0**-17)
    smallest = jnp.full((1, 16), 1e-37).at[0, 0].set(1.0)
    assert np.all(np.asarray(decode(encode(smallest, 16, True))) >= 2.0**-126)


def test_a_negative_zero_is_0_in_a_state_that_is_converted_and_in_a_users_own():
    x = {
        "w": jnp.where(jnp.arange(16 * 256).reshape(16, 256) % 2 == 0, -0.0, 1.0).at[0].set(-0.0).at[1, 5].set(jnp.nan)
    }
    own = lambda path, x: True
    states = [optax.ScaleByRmsState(x), {"nu": x}]
    found = [jamp.interop.quantize_state(state, never_negative=own) for state in states]
    plain = optax.GradientTransformation(lambda p: {"nu": p}, lambda g, s, p=None: (g, {"nu": g}))
    tx = jamp.quantized_state(plain, never_negative=own)
    found += [tx.init(x), tx.update(x, tx.init(x))[1]]
    for state in found:
        nu = jax.tree.leaves(jamp.interop.dequantize_state(state))[0]
        assert not np.isfinite(nu[1, :128]).any()
        np.testing.assert_allclose(nu[2:], np.abs(x["w"])[2:], rtol=0.07)


# Which arrays are stored


def test_every_tree_in_a_state_of_optax_is_a_moment_or_known_not_to_be_one():
    kinds = {}
    for module in (optax, optax.contrib):
        kinds |= {name: x for name, x in vars(module).items() if isinstance(x, type) and hasattr(x, "_fields")}
    named = {name: set(fields) for name, fields in moments.FIELDS.items() if name in kinds}
    # The last two are not exported, or not by Optax 0.2.5.
    assert moments.FIELDS.keys() - named.keys() <= {"*", "MadgradState", "ScaleByRmsWithCountState"}
    assert all(fields <= set(kinds[name]._fields) for name, fields in named.items())
    # Not in the table, and so whole: states inside, steps, gradients.
    whole = {
        "inner_state", "inner_opt_state", "inner_states", "skip_state", "base_optimizer_state", "fast_state",
        "opt_state", "adv_state", "cache", "fast", "measurements", "measure_states",
        "step_sizes", "prev_updates", "updates", "grad", "grad_acc", "g", "scale", "reward",
        "subgradients", "diff_params_memory", "diff_updates_memory",
    }  # fmt: skip
    for name, kind in kinds.items():
        for field, annotation in kind.__annotations__.items():
            is_tree = "ArrayTree" in str(annotation) or annotation in (optax.Updates, optax.Params)
            is_listed = field in named.get(name, ()) or field in moments.FIELDS["*"] or field in whole
            assert is_listed or not is_tree, f"Is {name}.{field} a moment? jamp._optimizer_state.moments does not say."


PARAMS = {"w": normal(64, 256) / 8, "e": normal(130, 40, seed=1) / 8, "b": jnp.zeros(256)}
OPTIMIZERS = {
    "adamw": (lambda: optax.adamw(1e-2), 4),
    "amsgrad": (lambda: optax.amsgrad(1e-2), 6),
    "adafactor": (lambda: optax.adafactor(1e-2, min_dim_size_to_factor=128), 2),
    "adan": (lambda: optax.adan(1e-2), 6),
    "lion": (lambda: optax.lion(1e-3), 2),
    "sgd": (lambda: optax.sgd(1e-2, momentum=0.9), 2),
    "rmsprop": (lambda: optax.rmsprop(1e-2), 2),
    "centered rmsprop": (lambda: optax.rmsprop(1e-2, centered=True), 0),
    "ema": (lambda: optax.chain(optax.ema(0.9), optax.scale(-1e-2)), 2),
    "muon": (lambda: optax.contrib.muon(1e-2), 2),
    "ademamix": (lambda: optax.contrib.ademamix(1e-2), 6),
    "schedule-free": (lambda: optax.contrib.schedule_free_adamw(1e-2), 2),
    "prodigy": (lambda: optax.contrib.prodigy(1.0), 4),
    "hyperparameters": (lambda: optax.inject_hyperparams(optax.adam)(1e-2), 4),
    "micro-batches": (lambda: optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(), 4),
    "partition": (
        lambda: optax.partition({"a": optax.adam(1e-2), "s": optax.sgd(1e-2)}, {"w": "a", "e": "s", "b": "a"}),
        2,
    ),
    "masked": (lambda: optax.masked(optax.adam(1e-2), {"w": True, "e": False, "b": True}), 2),
}


# Each is like another one: their moments have the same kinds.
LIKE_ANOTHER = {"amsgrad", "adan", "sgd", "rmsprop", "ema", "ademamix", "prodigy", "hyperparameters"}


@pytest.mark.slow_after(4)
@promotes
@pytest.mark.filterwarnings("ignore:quantized_state stores nothing")  # of centered RMSprop
@pytest.mark.parametrize("which", [pytest.param(x, marks=[pytest.mark.slow] * (x in LIKE_ANOTHER)) for x in OPTIMIZERS])
def test_an_optimizer_steps_as_in_float32_and_its_moments_are_bytes(which):
    make, count = OPTIMIZERS[which]
    plain, low = make(), jamp.quantized_state(make())
    state = low.init(PARAMS)
    assert len(stored(state)) == count
    is_square = lambda name: any(
        f".{field}.codes[" in name for field in ("nu", "nu_max", "n", "exp_avg_sq", *["v"] * (which == "adafactor"))
    )
    assert all((x.dtype == jnp.uint8) == is_square(key) for key, x in stored(state).items())
    restored = jamp.interop.dequantize_state(state)
    assert jax.tree.structure(restored) == jax.tree.structure(plain.init(PARAMS))
    target = lambda x, k: jnp.sin(7 * k + jnp.arange(x.size)).reshape(x.shape)
    loss = lambda p, k: sum(jnp.sum((x - target(x, k)) ** 2) for x in p.values())

    def run(tx):
        def step(carry, k):
            p, state = carry
            updates, state = tx.update(jax.grad(loss)(p, k), state, p)
            return (optax.apply_updates(p, updates), state), None

        return jax.lax.scan(step, (PARAMS, tx.init(PARAMS)), jnp.float32(jnp.arange(30) % 3))[0]

    (found, after), (exact, _) = jax.jit(lambda: (run(low), run(plain)))()
    assert jax.tree.structure(after) == jax.tree.structure(state)
    moved = jax.tree.map(lambda x, p: jnp.linalg.norm(x - p), exact, PARAMS)
    for key in PARAMS:
        assert float(jnp.linalg.norm(found[key] - exact[key])) <= (0.1 if count else 0) * float(moved[key]) + 1e-7


@promotes
def test_optax_maps_the_arrays_of_a_state_with_their_parameters():
    params = {"w": jnp.ones((64, 256)), "k": jnp.ones((3, 3, 64, 128)), "b": jnp.ones(8), "s": jnp.ones(())}
    names = {name: name for name in params}
    for inner in (
        optax.adamw(1e-3),
        optax.lion(1e-3),
        optax.sgd(0.1, momentum=0.9),
        optax.rmsprop(0.1),
    ):
        for wrap in (
            jamp.quantized_state,
            lambda tx: jamp.loss_scaled(jamp.stochastic_rounding(jamp.quantized_state(tx))),
        ):
            tx = wrap(inner)
            state = tx.init(params)
            mapped = optax.tree.map_params(tx, lambda x, name: name, state, names, transform_non_params=lambda _: None)
            found = jax.tree.leaves_with_path(mapped)
            assert all(path[-1].key == name for path, name in found)
            assert len(found) == len(params) * len({path[:-1] for path, _ in found})
            moments = [
                x
                for x in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, BlockCodes))
                if isinstance(x, BlockCodes)
            ]
            assert len(found) == 2 * len(params) * len(moments) > 0
            # What stands for no scales takes next to no memory, and is no empty array, which Orbax does not save.
            for moment in moments:
                assert {x.dtype.name for x in (moment.scales["w"], moment.scales["k"])} == {"uint32"}
                assert {moment.scales["b"].shape, moment.scales["s"].shape} == {(8,), ()}
    kept = jamp.quantized_state(optax.adam(1e-3), keep=lambda path, x: True).init(params).inner_state[0].mu
    assert kept.scales["k"].shape == (3, 3, 64, 1)


@promotes
def test_a_users_own_state_stays_whole_unless_it_says_what_it_holds_and_keep_keeps():
    own = optax.GradientTransformation(
        lambda p: {"nu": jax.tree.map(jnp.zeros_like, p)},
        lambda g, s, p=None: (g, {"nu": jax.tree.map(lambda n, x: 0.9 * n + x * x, s["nu"], g)}),
    )
    tx = optax.chain(own, optax.adam(1e-3))
    quantize = jamp.interop.quantize_state
    names = lambda **how: set(stored(jamp.quantized_state(tx, **how).init(PARAMS)))
    usual = names()
    assert len(usual) == 4
    assert not any("['nu']" in name for name in usual)
    of_nu = lambda path, x: True if any(getattr(key, "key", None) == "nu" for key in path) else None
    found = stored(jamp.quantized_state(tx, never_negative=of_nu).init(PARAMS))
    assert len(found) == 6
    assert {x.dtype.name for name, x in found.items() if "['nu']" in name} == {"uint8"}
    assert len(names(keep=lambda path, x: x.shape == (64, 256))) == 2
    assert names(block_size=32) == usual
    for bad in (0, -1, 2.0, True, 100):
        for make in (lambda bad: jamp.quantized_state(tx, block_size=bad), lambda bad: quantize((), block_size=bad)):
            with pytest.raises(ValueError, match=f"power.*={bad}"):
                make(bad)


@promotes
def test_bytes_a_parameter_and_a_step_that_changes_nothing():
    params = {"w": jnp.ones((256, 1024), BF16)}
    size = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree)) / params["w"].size
    ways = {
        6.07: jamp.stochastic_rounding(jamp.quantized_state(optax.adamw(1e-3))),
        8.07: jamp.master_params(jamp.quantized_state(optax.adamw(1e-3)), split=True),
    }
    for most, tx in ways.items():
        assert most - 0.02 < size(params) + size(params) + size(tx.init(params)) < most
        tx = jamp.loss_scaled(tx)
        step = stepper(tx)
        p, state = step(params, tx.init(params), jax.tree.map(lambda x: normal(*x.shape).astype(BF16), params))
        skipped = step(p, state, jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), params))
        assert bits((skipped[0], skipped[1].inner_state)) == bits((p, state.inner_state))
    frozen = jamp.quantized_state(optax.apply_if_finite(optax.adam(1e-3), 5))
    step = stepper(frozen)
    p, state = step(PARAMS, frozen.init(PARAMS), PARAMS)
    same = step(p, state, jax.tree.map(lambda x: x * jnp.nan, PARAMS))
    assert bits(same[1].inner_state.inner_state) == bits(state.inner_state.inner_state)


@pytest.mark.slow
@promotes
@pytest.mark.filterwarnings("ignore:quantized_state stores nothing")
@pytest.mark.parametrize("mu_dtype", [None, BF16])
def test_moments_in_bfloat16_stay_and_conditional_wrappers_work(mu_dtype):
    params = jax.tree.map(lambda p: p.astype(BF16) if mu_dtype is None else p, PARAMS)
    adam = optax.adam(1e-2, mu_dtype=mu_dtype)
    plain = adam.update(params, adam.init(params), params)
    for wrap in (jamp.quantized_state, lambda tx: jamp.quantized_state(optax.apply_if_finite(tx, 5))):
        tx = wrap(adam)
        state = tx.init(params)
        assert len(stored(state)) == (0 if mu_dtype is None else 2)  # of nu
        updates, after = jax.jit(optax.apply_if_finite(tx, 5).update)(params, optax.apply_if_finite(tx, 5).init(params))
        assert jax.tree.map(jnp.result_type, after.inner_state) == jax.tree.map(jnp.result_type, state)
        assert jax.tree.map(jnp.result_type, updates) == jax.tree.map(jnp.result_type, plain[0])


def test_a_moment_that_optax_renamed_is_a_warning(monkeypatch):
    new = {name: kind for name, kind in moments.FIELDS["ScaleByAdamState"].items() if name != "nu"}
    monkeypatch.setitem(moments.FIELDS, "ScaleByAdamState", new)  # as if an older jamp met a newer Optax
    adam, params = optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation(), jnp.ones((64, 128))
    with pytest.warns(UserWarning, match=r"leaves ScaleByAdamState\.nu in float32"):
        jamp.quantized_state(adam).init(params)
    jamp.quantized_state(adam, never_negative=lambda path, x: None).init(params)
    jamp.quantized_state(optax.chain(optax.trace(0.9), optax.adam(1e-3))).init(params[0])  # too small


def test_a_state_that_optax_renamed_is_a_warning_beside_one_that_is_stored():
    class ScaleByAdamsState(NamedTuple):
        count: jax.Array
        mu: dict
        nu: dict

    ScaleByAdamsState.__module__ = "optax._src.transform"
    adam = optax.scale_by_adam()
    renamed = optax.GradientTransformation(lambda params: ScaleByAdamsState(*adam.init(params)), adam.update)
    with pytest.warns(UserWarning, match=r"leaves ScaleByAdamsState\.mu, ScaleByAdamsState\.nu in float32"):
        jamp.quantized_state(optax.chain(optax.trace(0.9), renamed)).init({"w": jnp.zeros((64, 128))})


def test_moments_that_are_all_16_bit_are_a_warning():
    low = jnp.ones((64, 128), jnp.bfloat16)
    for tx, params in ((optax.adamw(1e-3), low), (optax.lion(1e-3, mu_dtype=jnp.bfloat16), low.astype(jnp.float32))):
        with pytest.warns(UserWarning, match="master_params"):
            jamp.quantized_state(tx).init(params)
    inner = jamp.quantized_state(optax.adamw(1e-3))
    for tx in (jamp.master_params(inner, split=True), jamp.master_params(inner), jamp.stochastic_rounding(inner)):
        tx.init(low)
    inner.init([low, low.astype(jnp.float32)])
    inner.init(low[0])  # too small for eight bits anyway


@promotes
def test_a_state_with_large_arrays_of_which_none_is_a_known_moment_is_a_warning():
    params, ema = jnp.ones((64, 128)), lambda params: {"average": params}
    own = optax.GradientTransformation(ema, lambda grads, state, params=None: (grads, state))
    for tx in (own, optax.contrib.momo(), optax.rmsprop(1e-3, centered=True)):
        with pytest.warns(UserWarning, match="never_negative="):
            jamp.quantized_state(tx).init(params)
        jamp.quantized_state(tx).init(params[0])  # too small
        jamp.quantized_state(tx, keep=lambda path, x: True).init(params)  # as the user says
    jamp.quantized_state(own, never_negative=lambda path, x: False).init(params)
    jamp.quantized_state(optax.sgd(1e-3)).init(params)


def test_an_inner_optimizer_is_called_twice_only_for_codes_and_other_bytes_stay():
    calls = []
    count = optax.stateless(lambda updates, params: calls.append(1) or updates)
    tx = jamp.quantized_state(optax.chain(count, optax.sgd(0.1, momentum=0.9)))
    params = {"w": jnp.ones((64, 256)), "b": jnp.ones(8)}
    for p, times in ((params, 2), ({"b": params["b"]}, 1)):
        calls.clear()
        text = jax.jit(tx.update).lower(p, tx.init(p), p).as_text()
        assert len(calls) == times
        barriers = [line for line in text.splitlines() if "optimization_barrier" in line]
        for behind in ("64x256xi8", "64x2xui32"):  # codes and scales: else XLA would merge the two
            assert any(behind in line for line in barriers) is (times == 2)
    trace = optax.TraceState({"w": jnp.ones((64, 256)), "k": jnp.ones(8, jnp.int8), "step": 3})
    again = jamp.interop.dequantize_state(jamp.interop.quantize_state(trace)).trace
    np.testing.assert_allclose(again.pop("w"), trace.trace.pop("w"), rtol=0.02)
    assert_equal(again, trace.trace)


def test_rows_in_groups_of_8_have_the_codes_that_they_have_alone():
    x = normal(256, 400) * jnp.exp(normal(256, 1, seed=1))
    whole = encode(x, 128, False)
    assert (
        "tensor<32x8x4x128xf32>" in jax.jit(encode, static_argnums=(1, 2)).lower(x, 128, False).as_text()
    )  # as a TPU keeps it
    assert_equal(encode(x[:7], 128, False), jax.tree.map(lambda y: y[:7], whole))
    assert_equal(decode(jax.tree.map(lambda y: y[:7], whole)), decode(whole)[:7])


@pytest.mark.slow
@promotes
def test_small_elements_beside_an_outlier_move_at_the_share_of_the_speed_that_the_page_says():
    adam, keep_nu = optax.adamw(1e-3), lambda path, x: ".nu['embedding']" in jax.tree_util.keystr(path)
    speeds = {"1e-3": 1.0, "1e-4": 0.81, "1e-5": 0.08, "1e-6": 0.01}
    grads = {"embedding": jnp.concatenate([jnp.full((8, 128), float(x)).at[:, 0].set(1.0) for x in speeds])}

    def moved(tx):
        def step(carry, _):
            updates, state = tx.update(grads, carry[1], carry[0])
            return (optax.apply_updates(carry[0], updates), state), None

        params = jax.tree.map(jnp.zeros_like, grads)
        start = params, tx.init(params)
        w = jax.jit(lambda carry: jax.lax.scan(step, carry, length=1000)[0][0])(start)["embedding"]
        return w[:, 1:].reshape(len(speeds), -1).mean(axis=1)

    in_float32 = moved(adam)
    np.testing.assert_allclose(moved(jamp.quantized_state(adam)) / in_float32, list(speeds.values()), rtol=0.1)
    # On average: the first moments of the smallest elements are seldom not rounded to 0.
    np.testing.assert_allclose(moved(jamp.quantized_state(adam, keep=keep_nu)), in_float32, rtol=0.15)


@pytest.mark.slow
@promotes
def test_a_spike_and_rows_without_gradients_leave_no_inf_and_decay():
    tx, exact = jamp.quantized_state(optax.adam(1e-3, eps=0.0)), optax.adam(1e-3, eps=0.0)

    def run(tx):
        def step(state, k):
            g = jax.random.normal(jax.random.key(k), (128, 64)) * jnp.where(k == 100, 1e3, 1.0)
            g = jnp.where((jnp.arange(128) % 8 == k % 64)[:, None], g, 1e-10)  # rare tokens
            updates, state = tx.update(g, state)
            return state, jnp.max(jnp.abs(updates))

        optimized = {"xla_backend_optimization_level": 1}  # It runs longer than it compiles.
        loop = jax.jit(lambda s: jax.lax.scan(step, s, jnp.arange(1500)), compiler_options=optimized)
        return loop(tx.init(jnp.ones((128, 64))))

    (state, sizes), (whole, wanted) = run(tx), run(exact)
    assert np.isfinite(wanted).all()
    assert np.isfinite(sizes).all()
    assert float(jnp.max(sizes / wanted)) < 4  # as one rounding down from the second code to the first, 2**-4
    nu, true = jamp.interop.dequantize_state(state)[0].nu, whole[0].nu
    assert 0.8 < float(jnp.mean(nu) / jnp.mean(true)) < 1.25


@pytest.mark.slow
@promotes
def test_states_survive_export_vmap_and_donation():
    tx = jamp.quantized_state(optax.adam(1e-3))
    state = tx.init(PARAMS)
    step = lambda g, s: tx.update(g, s)[1]
    exported = jax.export.export(
        jax.jit(lambda *leaves: jax.tree.leaves(step(PARAMS, jax.tree.unflatten(jax.tree.structure(state), leaves))))
    )(*jax.tree.leaves(state))
    after = exported.call(*jax.tree.leaves(state))
    assert_equal(after, jax.tree.leaves(jax.jit(step)(PARAMS, state)))
    two = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), PARAMS)
    both = jax.jit(jax.vmap(step))(two, jax.vmap(tx.init)(two))
    assert_equal(jax.tree.map(lambda x: x[0], both), jax.jit(step)(PARAMS, state))
    jax.jit(step, donate_argnums=1)(PARAMS, tx.init(PARAMS))
    both = jamp.stochastic_rounding(tx, state_dtype=BF16).init(PARAMS).inner_state.inner_state[0].nu
    assert (both.scales["w"].dtype, both.codes["b"].dtype) == (jnp.uint32, BF16)  # scales are no moments
    named = optax.tree.map_params(tx, lambda x: "param", state, transform_non_params=lambda x: "-")
    assert named.inner_state[0].nu.codes["w"] == named.inner_state[0].nu.scales["w"] == "param"
    assert named.inner_state[0].count == "-"


@promotes
def test_joined_masters_can_be_donated_with_the_parameters():
    params = {"low": jnp.ones((4, 4), BF16), "wide": jnp.ones((4, 4))}
    state = jamp.master_params(optax.sgd(0.1), split=True).init(params)
    whole, tx = jamp.interop.join_masters(state, params), jamp.master_params(optax.sgd(0.1))

    def step(params, state):
        updates, state = tx.update(jax.tree.map(jnp.ones_like, params), state, params)
        return optax.apply_updates(params, updates), state

    params, whole = jax.jit(step, donate_argnums=(0, 1))(params, whole)
    assert_equal(whole.master_params, jax.tree.map(lambda p: jnp.full(p.shape, 0.9), params))


def test_masters_are_split_for_bfloat16_only():
    state = jamp.master_params(optax.sgd(0.1)).init(jnp.ones(3))
    with pytest.raises(ValueError, match="master_params"):
        jamp.interop.split_masters(state, jnp.ones(3, jnp.float16))
    with pytest.raises(TypeError, match="types"):
        jamp.interop.split_masters(state, np.dtype("float32"))
    for types in (jax.ShapeDtypeStruct((3,), BF16), BF16):
        assert jamp.interop.split_masters(state, types)[0].dtype == BF16


def test_the_state_of_a_chain_is_an_error_that_names_the_element():
    params = jnp.ones(3, BF16)
    for split, convert in ((False, jamp.interop.split_masters), (True, jamp.interop.join_masters)):
        tx = optax.chain(optax.clip(1.0), jamp.master_params(optax.sgd(0.1), split=split))
        opt_state = tx.init(params)
        with pytest.raises(TypeError, match=r"opt_state\[1\]"):
            convert(opt_state, params)
        convert(opt_state[1], params)
        with pytest.raises(TypeError, match="optimizer is"):
            convert(opt_state[:1], params)


@pytest.mark.slow
def test_a_block_size_may_be_a_number_of_numpy():
    with pytest.raises(ValueError, match="power"):
        jamp.quantized_state(optax.sgd(0.1, momentum=0.9), block_size=np.int64(100))
    params = jnp.ones((128, 64))
    states = [jamp.quantized_state(optax.sgd(0.1, momentum=0.9), block_size=n).init(params) for n in (64, np.int64(64))]
    assert_equal(*states)


def test_the_number_of_blocks_tells_every_power_of_two():
    for n in range(1, 300):
        for size in (2**k for k in range(10)):
            assert block_codes._block_size(n, -(-n // size)) == min(size, n)
