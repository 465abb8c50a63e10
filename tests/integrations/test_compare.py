"""`compare` on layers of Linen, NNX and Equinox and the same written by hand, healthy and with one fault."""

from pathlib import Path

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jamp
import jamp.debug

WIDTH, HEADS, LENGTH = 16, 2, 8
KEYS = jax.random.split(jax.random.key(0), 4)
X = jax.random.normal(KEYS[0], (2, LENGTH, WIDTH))


def noisy(tree):
    leaves, structure = jax.tree.flatten(tree)
    noise = [0.1 * jax.random.normal(jax.random.fold_in(KEYS[1], i), x.shape) for i, x in enumerate(leaves)]
    return jax.tree.unflatten(structure, map(jnp.add, leaves, noise))


class LinenLayer(nn.Module):
    @nn.compact
    def __call__(self, x):
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2]))
        x = x + nn.MultiHeadDotProductAttention(HEADS, name="attention")(nn.LayerNorm(name="before")(x), mask=mask)
        h = nn.gelu(nn.Dense(WIDTH, name="up")(nn.LayerNorm(name="after")(x)))
        return x + nn.Dense(WIDTH, name="down")(h)


class NnxLayer(nnx.Module):
    def __init__(self, rngs):
        self.before, self.after = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up, self.down = (nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2))
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)

    def __call__(self, x):
        mask = nnx.make_causal_mask(jnp.ones(x.shape[:2]))
        x = x + self.attention(self.before(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.after(x))))


class EquinoxLayer(eqx.Module):
    before: eqx.nn.LayerNorm
    after: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, p):
        shape = {"query": (WIDTH, -1), "key": (WIDTH, -1), "value": (WIDTH, -1), "out": (-1, WIDTH)}

        def linear(p, shape=(0, 0)):
            kernel = p["kernel"] if shape == (0, 0) else p["kernel"].reshape(shape)
            made = eqx.nn.Linear(*kernel.shape, key=KEYS[0])
            return eqx.tree_at(lambda m: (m.weight, m.bias), made, (kernel.T, p["bias"].reshape(-1)))

        made = eqx.nn.MultiheadAttention(
            HEADS, WIDTH, use_query_bias=True, use_key_bias=True, use_value_bias=True, use_output_bias=True, key=KEYS[0]
        )
        parts = lambda m: (m.query_proj, m.key_proj, m.value_proj, m.output_proj)
        self.attention = eqx.tree_at(parts, made, tuple(linear(p["attention"][name], shape[name]) for name in shape))
        self.before, self.after = (
            eqx.tree_at(
                lambda m: (m.weight, m.bias), eqx.nn.LayerNorm(WIDTH, eps=1e-6), (p[name]["scale"], p[name]["bias"])
            )
            for name in ("before", "after")
        )
        self.up, self.down = linear(p["up"]), linear(p["down"])

    def __call__(self, x):
        h = jax.vmap(self.before)(x)
        x = x + self.attention(h, h, h, jnp.tri(LENGTH, dtype=bool))
        return x + jax.vmap(self.down)(jax.nn.gelu(jax.vmap(self.up)(jax.vmap(self.after)(x))))


def by_hand(p, x, fault=""):
    """The same layer. Each fault has a line with its name at the end."""

    def norm(x, p):
        centered = x - x.mean(-1, keepdims=True)
        variance = jnp.square(centered).mean(-1, keepdims=True)
        epsilon = 1e-6
        if fault == "epsilon":
            return centered / jnp.sqrt(variance + 1e-5) * p["scale"] + p["bias"]  # epsilon
        return centered / jnp.sqrt(variance + epsilon) * p["scale"] + p["bias"]

    def attention(x, p):
        q, k, v = (
            jnp.einsum("btd,dhe->bhte", x, p[n]["kernel"]) + p[n]["bias"][:, None] for n in ("query", "key", "value")
        )
        scores = jnp.einsum("bhqe,bhke->bhqk", q, k)
        scores = scores * (0.3 if fault == "scale" else (WIDTH // HEADS) ** -0.5)  # scale
        i = jnp.arange(LENGTH)
        mask = i[:, None] >= i
        if fault == "mask":
            mask = i[:, None] + 1 >= i  # mask
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e9), -2 if fault == "axis" else -1)  # axis
        out = jnp.einsum("bhqk,bhke->bqhe", weights, v)
        if fault == "heads":
            out = jnp.einsum("bhqk,bhke->bhqe", weights, v).reshape(out.shape)  # heads
        return jnp.einsum("bqhe,hed->bqd", out, p["out"]["kernel"]) + p["out"]["bias"]

    a = attention(norm(x, p["before"]), p["attention"])
    x = x + (a * 0.98 if fault == "factor" else a)  # factor
    h = norm(x, p["before" if fault == "parameter" else "after"]) @ p["up"]["kernel"] + p["up"]["bias"]
    h = jax.nn.relu(h) if fault == "activation" else jax.nn.gelu(h)  # activation
    h = h @ p["down"]["kernel"]
    return x + h if fault == "bias" else x + h + p["down"]["bias"]  # bias


PARAMS = jax.jit(lambda: noisy(LinenLayer().init(KEYS[2], X)["params"]))()


def nnx_layer(p, x):
    layer = NnxLayer(nnx.Rngs(0))
    graph, state = nnx.split(layer, nnx.Param)
    nnx.replace_by_pure_dict(state, p)
    return nnx.merge(graph, state)(x)


LAYERS = {
    "Linen": lambda p, x: LinenLayer().apply({"params": p}, x),
    "NNX": nnx_layer,
    "Equinox": lambda p, x: jax.vmap(EquinoxLayer(p))(x),
}
FAULTS = {
    "epsilon": "1e-05",
    "scale": "0.3",
    "mask": "add(_, 1) only there",
    "axis": "reduce_max ",
    "heads": "the same elements in another order",
    "factor": "mul(_, 0.98) only there",
    "parameter": "['after']['scale']",
    "activation": " only ",
    "bias": "['down']['bias']",
}


def named(found):
    """The first differences: the first one, and what the other function has instead of it."""
    return [x for x in found.differences[:2] if not x.only or x.only == "there" or x is found.differences[0]]


slow_if = lambda is_slow: [pytest.mark.slow] * is_slow
# Every fault in NNX, and two in each of the others.
QUICK = {"Linen": ("heads",), "NNX": ("mask",), "Equinox": ("parameter",)}
CASES = [
    pytest.param(x, fault, marks=slow_if(fault not in QUICK[x]))
    for x in LAYERS
    for fault in FAULTS
    if x == "NNX" or fault in (*QUICK[x], "factor")
]


@pytest.mark.promotes("Flax and Equinox")
@pytest.mark.slow
@pytest.mark.parametrize("framework", LAYERS)
def test_a_layer_and_the_same_by_hand_agree_in_every_dtype(framework):
    layer = LAYERS[framework]
    assert not jamp.debug.compare(layer, by_hand)(PARAMS, X)
    found = jamp.debug.compare(jamp.autocast(layer, jnp.bfloat16), by_hand)(PARAMS, X)
    assert not found
    assert found.dtype == "bfloat16"


@pytest.mark.slow
@pytest.mark.promotes("Flax and Equinox")
@pytest.mark.parametrize(("framework", "fault"), CASES)
def test_the_line_of_a_fault_in_a_layer_is_named(framework, fault):
    found = jamp.debug.compare(LAYERS[framework], lambda p, x: by_hand(p, x, fault))(PARAMS, X)
    assert found
    assert any(FAULTS[fault] in x.operation for x in named(found)), str(found)
    if fault != "parameter":  # The line of the norm, which both norms share.
        source = Path(__file__).read_text().splitlines()
        here = 1 + next(i for i, text in enumerate(source) if text.endswith(f"# {fault}"))
        assert any(f"test_compare.py:{here} " in x.other_source for x in named(found)), str(found)


@pytest.mark.slow
@pytest.mark.promotes("Flax and Equinox")
def test_a_healthy_model_of_12_layers_with_finite_masks_raises_no_alarm():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            for i in range(12):
                x = LinenLayer(name=f"h_{i}")(x)
            return jnp.mean(nn.LayerNorm()(x) ** 2)

    model = Model()
    params = noisy(model.init(KEYS[3], X))
    found = jamp.debug.compare(model.apply, jamp.autocast(model.apply, jnp.float16))(params, X)
    assert not found
    assert len(found.rows) > 200


def product(p, x):
    return x @ p["w"] + p["b"]


def product_as_a_sum(p, x):
    return jnp.sum(x[:, None] * p["w"].T, -1) + p["b"]


def gate(p, x):
    return x + jax.nn.sigmoid(x * p["g"]) * x


def attention(p, x):
    scores = jnp.where(jnp.tri(len(x), dtype=bool), (x @ p["w"]) @ x.T / x.shape[-1] ** 0.5, -1e9)
    return jax.nn.softmax(scores) @ x


def attention_in_blocks(p, x):
    """With a running maximum and sum, as fused attention."""
    query, places = x @ p["w"] * x.shape[-1] ** -0.5, jnp.arange(len(x))

    def add(state, block):
        top, total, out = state
        keys, at = block
        scores = jnp.where(places[:, None] >= at, query @ keys.T, -jnp.inf)
        new = jnp.maximum(top, scores.max(-1, keepdims=True))
        weights, old = jnp.exp(scores - new), jnp.exp(top - new)
        return (new, total * old + weights.sum(-1, keepdims=True), out * old + weights @ keys), None

    empty = jnp.full((len(x), 1), -jnp.inf), jnp.zeros((len(x), 1)), jnp.zeros_like(x)
    (_, total, out), _ = jax.lax.scan(add, empty, (x.reshape(4, -1, x.shape[-1]), places.reshape(4, -1)))
    return out / total


@pytest.mark.slow
def test_a_gradient_without_a_correct_digit_raises_no_alarm():
    """Some are 0 but for rounding, in float64 too. An earlier `compare` took this for a difference."""
    width = 12
    keys = iter(jax.random.split(jax.random.key(148), 16))
    normal = lambda *shape: jax.random.normal(next(keys), shape)
    make = lambda: {"w": normal(width, width) / width**0.5, "b": normal(width), "g": 1 + normal(width) / 4}
    params = [make() for _ in range(5)]
    x = 10 * normal(8, width)

    def gradient(*layers):
        def loss(params, x):
            for layer, p in zip(layers, params, strict=True):
                x = layer(p, x)
            return jnp.mean(jnp.tanh(x) ** 2)

        return jax.grad(loss)

    here = gradient(product, gate, attention_in_blocks, attention, attention_in_blocks)
    there = gradient(product_as_a_sum, gate, *[attention_in_blocks] * 3)
    assert not jamp.debug.compare(jamp.autocast(here, jnp.bfloat16), there)(params, x)
