"""Every wrapper beside float32 for 3,000 steps, on gradients that let a state stand still, decay or swing.

Rounding is stochastic, so each error has mean 0 and a known size, and bounds follow. The elements of a group of rows
are independent: the mean over `n` of them is within six standard deviations of one, divided by the root of `n`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxprs import normal
from steps import together, with_masters

import jamp

BF16 = jnp.bfloat16
STEPS, ROWS, WIDTH = 3000, 16, 64  # rows of a group; a row is a block of `quantized_state`
GROUPS = ("constant", "zero after a while", "clipped", "one column constant", "rare")
SHAPE = len(GROUPS) * ROWS, WIDTH

# Each moves a parameter by about 0.3 in all where the gradient is constant. With it are the decay rates of the moments
# by field, and a first gradient that brings the slowest at once to where a gradient of 1 keeps it.
OPTIMIZERS = {
    "momentum": (lambda: optax.sgd(1e-5, momentum=0.9), {"trace": 0.9}, 10.0),
    "adamw": (lambda: optax.adamw(1e-4, b2=0.99), {"mu": 0.9, "nu": 0.99}, 10.0),
    "rmsprop": (lambda: optax.rmsprop(1e-4, decay=0.99), {"nu": 0.99}, 10.0),
    "lion": (lambda: optax.lion(1e-4), {"mu": 0.99}, 100.0),
    "ademamix": (lambda: optax.contrib.ademamix(1e-5), {"m1": 0.9, "m2": 0.9999, "nu": 0.999}, 1000**0.5),
}
WRAPPERS = {
    "float32": lambda tx: tx,
    "loss_scaled": jamp.loss_scaled,
    "masters": with_masters,
    "split masters": lambda tx: jamp.loss_scaled(jamp.master_params(tx, split=True)),
    "8-bit": lambda tx: jamp.loss_scaled(jamp.quantized_state(tx)),
    "split masters, 8-bit": lambda tx: jamp.master_params(jamp.quantized_state(tx), split=True),
    "rounded": lambda tx: jamp.loss_scaled(jamp.stochastic_rounding(tx)),
    "rounded, bfloat16 state": lambda tx: jamp.stochastic_rounding(tx, state_dtype=BF16),
    "rounded, 8-bit": lambda tx: jamp.stochastic_rounding(jamp.quantized_state(tx)),
}
# The largest distance between two neighbours of a stored moment, as a share of the largest moment of its block. And as
# a share of the moment itself, from a tenth of the largest mean on and from a hundredth of the largest mean square on.
SPACING = {"8-bit": (4 / 255, 0.05), "bfloat16 state": (2.0**-7, 2.0**-7)}


def gradients(k, first):
    """Of a step. In each element they are a fixed number times what all of its row have, so that shares stay."""
    size = (0.5 + jax.random.uniform(jax.random.key(1), SHAPE) / 2) * jnp.sign(normal(*SHAPE, seed=2))
    constant, zero, clipped, column, rare = jnp.split(size, len(GROUPS))
    stops = k < 500
    swing = jax.random.normal(jax.random.fold_in(jax.random.key(3), k), clipped.shape)
    groups = [
        constant,
        jnp.where(stops, zero, 0.0),
        jnp.clip(clipped + 4 * swing, -1.0, 1.0),  # most are cut
        # The largest of a block stands still, and with it its scale, while the others decay.
        jnp.where(jnp.arange(WIDTH) == 0, jnp.where(k == 0, first, 1.0), jnp.where(stops, column, 0.0)),
        jnp.where((k % 50 == jnp.arange(ROWS) % 50)[:, None], rare, 0.0),
    ]
    return jnp.concatenate(groups)


def run(make, first, names):
    """For each wrapper the parameters, the moments at the end, the path of float32, and the largest of its moments."""
    start = ((0.5 + jax.random.uniform(jax.random.key(4), SHAPE) / 2) * jnp.sign(normal(*SHAPE, seed=5))).astype(BF16)
    txs = {name: WRAPPERS[name](make()) for name in names}
    tx = together(txs)
    is_wide = lambda name: name in ("float32", "loss_scaled", "8-bit")
    params = {name: start.astype(jnp.float32) if is_wide(name) else start for name in txs}
    sizes = lambda state: jax.tree.map(lambda x: jnp.abs(x) if jnp.shape(x) == SHAPE else x, state["float32"])

    def step(carry, k):
        params, state, path, largest = carry
        updates, state = tx.update(dict.fromkeys(txs, gradients(k, first)), state, params)
        new = optax.apply_updates(params, updates)
        path = path + jnp.abs(new["float32"] - params["float32"])
        return (new, state, path, jax.tree.map(jnp.maximum, largest, sizes(state))), None

    state = tx.init(params)
    carry = params, state, jnp.zeros(SHAPE), sizes(state)
    optimized = {"xla_backend_optimization_level": 1}  # It runs longer than it compiles.
    loop = jax.jit(lambda c: jax.lax.scan(step, c, jnp.arange(STEPS))[0], compiler_options=optimized)
    return jax.device_get(loop(carry))


def inner_of(state, params):
    """The state of the plain optimizer, and the parameters: masters, if there are some."""
    if isinstance(state, jamp.LossScaledState):
        return inner_of(state.inner_state, params)
    if hasattr(state, "low_bits"):
        state = jamp.interop.join_masters(state, params)
    if isinstance(state, jamp.MasterParamsState):
        return inner_of(state.inner_state, state.master_params)
    if isinstance(state, jamp.StochasticRoundingState):
        return inner_of(state.inner_state, params)
    if isinstance(state, jamp.QuantizedState):
        return inner_of(jamp.interop.dequantize_state(state), params)
    return state, np.float32(params)


def mean_error(found, exact):
    """By group: the mean over its elements of what one is too large, with the sign of the exact one."""
    apart = (np.float32(found) - exact) * np.where(exact < 0, -1, 1)
    return np.abs(apart.reshape(len(GROUPS), -1).mean(1))


def check(which, names):
    make, decays, first = OPTIMIZERS[which]
    params, state, path, largest = run(make, first, names)
    exact = {name: optax.tree.get(state["float32"], name) for name in decays}
    of_groups = lambda x: np.abs(x).reshape(len(GROUPS), -1)
    root, moved, size = (ROWS * WIDTH) ** 0.5, of_groups(path).mean(1), of_groups(params["float32"]).max(1)
    for name in names[1:]:
        inner, found = inner_of(state[name], params[name])
        spacing, at_small = next((SPACING[key] for key in SPACING if name.endswith(key)), (0.0, 0.0))
        spread, bias = 0.0, 0.0  # of an update, as shares of it
        for field, decay in decays.items():
            # The error of a step has a variance of at most a quarter of the spacing's square, and decays as the moment.
            steps = min(STEPS, 1 / (1 - decay**2)) ** 0.5
            scale = of_groups(optax.tree.get(largest, field)).max(1)
            wrong = mean_error(optax.tree.get(inner, field), exact[field])
            assert np.all(wrong <= (6 * spacing / 2 * steps / root + 1e-4) * scale), (name, field, wrong / scale)
            # An update is proportional to the moment, or to a root of its inverse.
            is_square = field == "nu"
            spread += at_small / 2 * steps * (0.5 if is_square else 1)
            bias += 3 / 8 * (at_small / 2 * steps) ** 2 if is_square else 0
        if which == "lion" and spacing:
            spread, bias = 2.0, 0.0  # Any sign of an update may be wrong.
        bound = (6 * spread / root + bias) * moved + STEPS * 2.0**-23 * size
        if name.startswith("rounded"):  # A step moves up with a probability that is its share of the spacing.
            bound += 6 * (2.0**-7 * size * moved) ** 0.5 / root
        wrong = mean_error(found, params["float32"])
        if which == "lion" and name.endswith("8-bit"):
            # A mean below half of the first code becomes 0, and then has no sign. In float32 it has one forever.
            wrong[GROUPS.index("one column constant")] = 0
        assert np.all(wrong <= bound), (name, wrong / moved, bound / moved)


@pytest.mark.slow
@pytest.mark.promotes("optax")
def test_every_wrapper_around_adamw_stays_beside_float32():
    check("adamw", list(WRAPPERS))


OTHERS = [name for name in OPTIMIZERS if name != "adamw"]


@pytest.mark.slow
@pytest.mark.promotes("optax")
def test_8_bit_moments_stay_beside_float32():
    """Of an optimizer with the sign of a moment. The next test has those of the others too."""
    check("lion", ["float32", "8-bit"])


@pytest.mark.slow
@pytest.mark.promotes("optax")
@pytest.mark.parametrize("which", OTHERS)
def test_every_wrapper_stays_beside_float32(which):
    check(which, list(WRAPPERS))
