"""The models whose gradients `benchmarks.float8` compiles: one for each way to write a model in JAX.

Each function returns a loss of `(params, batch)`, and the shapes of both. All sizes are multiples of 128, but for the
197 tokens of the ViT. A framework that is not installed is an ImportError.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import jamp
from benchmarks import mixture, models
from benchmarks.float8.decoders import decoder, levanter_layer, maxtext_layer
from benchmarks.models import Shape, cross_entropy, dense, layer_norm, problem

Model = tuple[Callable[..., Array], Any, Any]

LAYERS, WIDTH, HEADS, TOKENS, BATCH = 3, 512, 4, 512, 8
CLASSES = 1152  # no other axis has this size, so that a product of the head is known by it


def tokens() -> Any:
    """The shapes of a batch of sentences, and of the words that follow."""
    return (jax.ShapeDtypeStruct((BATCH, TOKENS), jnp.int32),) * 2


def mixer() -> Model:
    """An MLP-Mixer of 256 patches."""

    def init(key: Array) -> Any:
        keys = iter(jax.random.split(key, 4 * LAYERS + 2))
        linear = lambda n, m: {"w": jax.random.normal(next(keys), (n, m)) * n**-0.5, "b": jnp.zeros(m)}
        norm = lambda: {"scale": jnp.ones(WIDTH), "bias": jnp.zeros(WIDTH)}
        mix = lambda n, m: {"norm": norm(), "up": linear(n, m), "down": linear(m, n)}
        blocks = [{"tokens": mix(256, 256), "channels": mix(WIDTH, 4 * WIDTH)} for _ in range(LAYERS)]
        return {"patches": linear(768, WIDTH), "blocks": blocks, "norm": norm(), "head": linear(WIDTH, CLASSES)}

    def mlp(p: Any, x: Array) -> Array:
        return dense(p["down"], jax.nn.gelu(dense(p["up"], x, None)), None)

    def loss(params: Any, batch: Any) -> Array:
        images, targets = batch
        patches = images.reshape(-1, 16, 16, 16, 16, 3).swapaxes(2, 3).reshape(-1, 256, 768)
        x = dense(params["patches"], patches, None)
        for p in params["blocks"]:
            y = layer_norm(p["tokens"]["norm"], x, None).swapaxes(1, 2)
            x = x + mlp(p["tokens"], y).swapaxes(1, 2)
            x = x + mlp(p["channels"], layer_norm(p["channels"]["norm"], x, None))
        x = layer_norm(params["norm"], x, None).mean(1)
        return cross_entropy(dense(params["head"], x, None), targets)

    shapes = jax.ShapeDtypeStruct((128, 256, 256, 3), jnp.float32), jax.ShapeDtypeStruct((128,), jnp.int32)
    return loss, jax.eval_shape(init, jax.random.key(0)), shapes


def linen_model(dtype: Any = None, dot_general_cls: Any = None, remat: bool = False) -> Any:
    """A transformer in Flax Linen. With a dtype and a class of products, as flax.linen.fp8_ops asks for.

    With `remat`, the backward pass computes all of a block again but products, as an expert would ask for.
    """
    from flax import linen as nn

    options = {"dtype": dtype, "dot_general_cls": dot_general_cls}

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Array, mask: Array) -> Array:
            attention = nn.MultiHeadDotProductAttention(
                HEADS, dtype=dtype, qkv_dot_general_cls=dot_general_cls, out_dot_general_cls=dot_general_cls
            )
            x = x + attention(nn.LayerNorm(dtype=dtype)(x), mask=mask)
            y = nn.Dense(4 * WIDTH, **options)(nn.LayerNorm(dtype=dtype)(x))
            return x + nn.Dense(WIDTH, **options)(nn.gelu(y))

    policy = jax.checkpoint_policies.dots_saveable
    make_block = nn.remat(Block, policy=policy) if remat else Block

    class Transformer(nn.Module):
        @nn.compact
        def __call__(self, words: Array) -> Array:
            x = nn.Embed(CLASSES, WIDTH, dtype=dtype)(words)
            x = x + self.param("positions", nn.initializers.normal(0.02), (TOKENS, WIDTH)).astype(x.dtype)
            for _ in range(LAYERS):
                x = make_block()(x, nn.make_causal_mask(words))
            return nn.Dense(CLASSES, name="head", **options)(nn.LayerNorm(dtype=dtype)(x))

    return Transformer()


def linen_loss(model: Any) -> Model:
    """The loss of a Linen model as a function of all its variables: fp8_ops keeps a state beside the parameters."""
    variables = jax.eval_shape(model.init, jax.random.key(0), tokens()[0])
    return lambda variables, batch: cross_entropy(model.apply(variables, batch[0]), batch[1]), variables, tokens()


def linen() -> Model:
    return linen_loss(linen_model())


def nnx() -> Model:
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.norm1, self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
            self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
            self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x: Array, mask: Array) -> Array:
            x = x + self.attention(self.norm1(x), mask=mask)
            return x + self.down(nnx.gelu(self.up(self.norm2(x))))

    class Transformer(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.embed, self.positions = nnx.Embed(CLASSES, WIDTH, rngs=rngs), nnx.Param(jnp.zeros((TOKENS, WIDTH)))
            self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
            self.norm, self.head = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.Linear(WIDTH, CLASSES, rngs=rngs)

        def __call__(self, words: Array) -> Array:
            x = self.embed(words) + self.positions[...]
            for block in self.blocks:
                x = block(x, nnx.make_causal_mask(words))
            return self.head(self.norm(x))

    split: Any = nnx.split(nnx.eval_shape(lambda: Transformer(nnx.Rngs(0))), nnx.Param, ...)
    graph, params, rest = split
    assert not jax.tree.leaves(rest)

    def loss(params: Any, batch: Any) -> Array:
        return cross_entropy(nnx.merge(graph, params, rest)(batch[0]), batch[1])

    return loss, params, tokens()


def equinox() -> Model:
    """One sentence at a time, and `jax.vmap`."""
    import equinox as eqx

    def init(key: Array) -> Any:
        keys = iter(jax.random.split(key, 3 * LAYERS + 2))
        linear = lambda n, m: eqx.nn.Linear(n, m, key=next(keys))
        norm = lambda: eqx.nn.LayerNorm(WIDTH)
        attention = lambda: eqx.nn.MultiheadAttention(HEADS, WIDTH, key=next(keys))
        mlp = lambda: {"up": linear(WIDTH, 4 * WIDTH), "down": linear(4 * WIDTH, WIDTH)}
        blocks = [{"attention": attention(), "norm1": norm(), "norm2": norm()} | mlp() for _ in range(LAYERS)]
        embed = {"embed": eqx.nn.Embedding(CLASSES, WIDTH, key=next(keys)), "positions": jnp.zeros((TOKENS, WIDTH))}
        return embed | {"blocks": blocks, "norm": norm(), "head": linear(WIDTH, CLASSES)}

    def apply(model: Any, words: Array) -> Array:
        x = jax.vmap(model["embed"])(words) + model["positions"]
        for p in model["blocks"]:
            y = jax.vmap(p["norm1"])(x)
            x = x + p["attention"](y, y, y, mask=jnp.tril(jnp.ones((TOKENS, TOKENS), bool)))
            x = x + jax.vmap(lambda y, p=p: p["down"](jax.nn.gelu(p["up"](p["norm2"](y)))))(x)
        return jax.vmap(lambda y: model["head"](model["norm"](y)))(x)

    model = eqx.filter_eval_shape(init, jax.random.key(0))
    params, static = eqx.partition(model, lambda x: isinstance(x, jax.ShapeDtypeStruct))

    def loss(params: Any, batch: Any) -> Array:
        model = eqx.combine(params, static)
        return cross_entropy(jax.vmap(partial(apply, model))(batch[0]), batch[1])

    return loss, params, tokens()


def haiku() -> Model:
    import haiku as hk

    norm = lambda x: hk.LayerNorm(-1, True, True)(x)

    def net(words: Array) -> Array:
        positions = hk.get_parameter("positions", (TOKENS, WIDTH), init=jnp.zeros)
        x = hk.Embed(CLASSES, WIDTH)(words) + positions
        mask, w_init = jnp.tril(jnp.ones((1, 1, TOKENS, TOKENS), bool)), hk.initializers.VarianceScaling()
        for _ in range(LAYERS):
            y = norm(x)
            x = x + hk.MultiHeadAttention(HEADS, WIDTH // HEADS, w_init=w_init)(y, y, y, mask)
            x = x + hk.Linear(WIDTH)(jax.nn.gelu(hk.Linear(4 * WIDTH)(norm(x))))
        return hk.Linear(CLASSES)(norm(x))

    model = hk.without_apply_rng(hk.transform(net))
    params = jax.eval_shape(model.init, jax.random.key(0), tokens()[0])
    return lambda params, batch: cross_entropy(model.apply(params, batch[0]), batch[1]), params, tokens()


def experts(form: Any, **options: Any) -> Model:
    loss, params, batch = problem(mixture, Shape(LAYERS, WIDTH, HEADS, CLASSES, TOKENS), BATCH, False)
    return partial(loss, mixture=form, **options), params, batch


def pointwise() -> Model:
    """An isotropic ConvNeXt: patches, depthwise convolutions, and MLPs of 1 x 1 convolutions."""
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
    block = {"depth": shape(7, 7, 1, WIDTH), "up": shape(1, 1, WIDTH, 4 * WIDTH), "down": shape(1, 1, 4 * WIDTH, WIDTH)}
    params = {"patches": shape(16, 16, 3, WIDTH), "blocks": [block] * LAYERS, "head": shape(WIDTH, CLASSES)}

    def loss(params: Any, batch: Any) -> Array:
        x = models.conv(params["patches"], batch[0], 16)
        for p in params["blocks"]:
            y = jax.lax.conv_general_dilated(
                x, p["depth"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=WIDTH
            )
            y = models.rms_norm(y, jnp.ones(WIDTH))
            x = x + models.conv(p["down"], jax.nn.gelu(models.conv(p["up"], y, 1)), 1)
        return cross_entropy(x.mean((1, 2)) @ params["head"], batch[1])

    return loss, params, (shape(32, 224, 224, 3), jax.ShapeDtypeStruct((32,), jnp.int32))


MODELS: dict[str, Callable[[], Model]] = {
    "GPT, unrolled": lambda: problem(models, Shape(LAYERS, WIDTH, 8, CLASSES, TOKENS), BATCH, False),
    "GPT, scanned": lambda: problem(models, Shape(LAYERS, WIDTH, 8, CLASSES, TOKENS), BATCH, True),
    "ViT": lambda: problem(models, Shape(LAYERS, WIDTH, 8, CLASSES, 196, 16), 16, False),
    "MLP-Mixer": mixer,
    "Linen transformer": linen,
    "NNX transformer": nnx,
    "Equinox transformer": equinox,
    "Haiku transformer": haiku,
    "Linen transformer, dtype=bfloat16": lambda: linen_loss(linen_model(jnp.bfloat16)),
    "MaxText's decoder, bfloat16": lambda: decoder(maxtext_layer),
    "Levanter's decoder, bfloat16": lambda: decoder(levanter_layer),
    "mixture, ragged": lambda: experts(mixture.ragged),
    "mixture, einsums": lambda: experts(mixture.einsums),
    "mixture, ragged, bfloat16 by hand": lambda: experts(mixture.ragged, dtype=jnp.bfloat16),
    "ConvNet of patches and 1 x 1": pointwise,
}


def wrapped(make: Callable[[], Model], **options: Any) -> Model:
    """A model under autocast, which leaves one in bfloat16 by hand as it is."""
    loss, params, batch = make()
    return jamp.autocast(loss, **options), params, batch


def linen_fp8_ops(remat: bool = False) -> Model:
    from flax.linen import Fp8DirectDotGeneralOp

    return linen_loss(linen_model(jnp.bfloat16, Fp8DirectDotGeneralOp, remat))


def linen_qwix(remat: bool = False, **options: Any) -> Model:
    import qwix

    dtypes = {"weight_qtype": jnp.float8_e4m3fn, "act_qtype": jnp.float8_e4m3fn, "bwd_qtype": jnp.float8_e5m2}
    rule = qwix.QtRule(module_path=".*", **dtypes, **options)
    model = linen_model(jnp.bfloat16, remat=remat)
    return linen_loss(qwix.quantize_model(model, qwix.QtProvider([rule])))


# The options of autocast.
GRADIENTS: dict[str, dict[str, Any]] = {
    "bfloat16": {"compute_dtype": jnp.bfloat16},
    "float8": {"compute_dtype": jamp.Float8()},
    "float8, per row": {"compute_dtype": jamp.Float8(granularity="row")},
    "float8, all products": {"compute_dtype": jamp.Float8(min_size=16), "rules": {"dot_general": "compute"}},
    "int8": {"compute_dtype": jamp.Int8()},
}
# The ways to train the Linen transformer in float8, and the lines that each changes in the model and the train step,
# without `dtype=` in the modules.
PEERS: dict[str, tuple[int, Callable[[], Model]]] = {
    "dtype=bfloat16": (0, lambda: linen_loss(linen_model(jnp.bfloat16))),
    "dtype=bfloat16, remat": (1, lambda: linen_loss(linen_model(jnp.bfloat16, remat=True))),
    "jamp.autocast, bfloat16": (1, lambda: wrapped(linen, **GRADIENTS["bfloat16"])),
    "jamp.Float8": (1, lambda: wrapped(linen, **GRADIENTS["float8"])),
    "jamp.Float8, all products": (1, lambda: wrapped(linen, **GRADIENTS["float8, all products"])),
    "dtype=bfloat16 and jamp.Float8": (1, lambda: wrapped(PEERS["dtype=bfloat16"][1], **GRADIENTS["float8"])),
    "flax.linen.fp8_ops": (6, linen_fp8_ops),
    "flax.linen.fp8_ops, remat": (7, lambda: linen_fp8_ops(remat=True)),
    "qwix, one scale for each tensor": (2, lambda: linen_qwix(disable_channelwise_axes=True)),
    "qwix, one scale for each tensor, remat": (3, lambda: linen_qwix(remat=True, disable_channelwise_axes=True)),
    "qwix, a scale for each channel": (2, linen_qwix),
    "qwix, a scale for each channel, remat": (3, lambda: linen_qwix(remat=True)),
}
