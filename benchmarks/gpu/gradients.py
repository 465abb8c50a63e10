"""Gradients of GPT-2, of two layers of a Llama and of a large head, with SGD in place."""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jamp
from benchmarks import models
from benchmarks.gpu.measure import Send, Way, measure
from benchmarks.memory.large_models import fused_attention
from benchmarks.memory.llama import rms_norm, rotate
from benchmarks.memory.vocabulary import LARGEST, SMALL, ways as ways_of_head
from benchmarks.models import SHAPES, cast, cross_entropy, sgd_step

BF16, POLICIES = jnp.bfloat16, jax.checkpoint_policies
REMAT = {"dots_saveable": POLICIES.dots_saveable, "each block again": POLICIES.nothing_saveable}
# With XLA's default flags, the autotuner tries Triton kernels for each float8 product, and compiles for minutes.
WITHOUT_TRITON = {"xla_gpu_enable_triton_gemm": False}


def gpt2(quick: bool, send: Send) -> None:
    """With attention written out, and by cuDNN's kernel."""
    shape, batch = replace(SHAPES["GPT-2 124 M"], scanned=True), 8
    if quick:
        shape, batch = replace(shape, layers=2, width=64, heads=4, classes=128, tokens=64), 1
    loss = partial(models.loss_fn, shape=shape)
    fused = partial(loss, attend=fused_attention(BF16))

    def make() -> Any:
        params, args = models.made(shape, batch)
        return params, (args,)

    ways = by_hand(loss) | {"float32": loss} | autocast(loss, 1.0, 0.5, 0.1)
    if jax.default_backend() == "gpu":
        ways |= {
            f"{name}, cuDNN's attention": fun for name, fun in (by_hand(fused) | autocast(fused, 1.0, 0.5)).items()
        }
        del ways["by hand, again, cuDNN's attention"]
    else:
        print("left out: cuDNN's attention, which needs a GPU")
    timed = [Way(name, partial(sgd_step, fun), make) for name, fun in ways.items()]
    measure({"model": "GPT-2 124 M, 8 x 1024"}, timed, quick, send)


def by_hand(loss: Any) -> dict[str, Any]:
    """In bfloat16, twice without and once with each policy of `jax.checkpoint`."""
    loss = partial(loss, dtype=BF16)
    policies = {f"by hand, {name}": partial(loss, policy=policy) for name, policy in REMAT.items()}
    return {"by hand": loss, "by hand, again": loss} | policies


def autocast(loss: Any, *budgets: float) -> dict[str, Any]:
    return {f"autocast, budget {budget}": jamp.autocast(loss, BF16, memory_budget=budget) for budget in budgets}


class Llama(NamedTuple):
    """The sizes of layers of Llama 3 8B, with a smaller vocabulary."""

    layers: int = 2
    width: int = 4096
    hidden: int = 14336
    heads: int = 32
    groups: int = 8  # heads of keys and values
    vocabulary: int = 32768
    batch: int = 2
    tokens: int = 4096

    def make(self) -> tuple[Any, Any]:
        """Random float32 parameters, and a batch of words."""
        keys = iter(jax.random.split(jax.random.key(0), 10))
        weight = lambda *size: jax.random.normal(next(keys), size) * size[-2] ** -0.5
        head, layers = self.width // self.heads, self.layers
        sizes = {"q": (self.width, self.width), "k": (self.width, self.groups * head), "out": (self.width, self.width)}
        sizes |= {"v": sizes["k"], "gate": (self.width, self.hidden), "up": (self.width, self.hidden)}
        sizes["down"] = (self.hidden, self.width)
        blocks = {name: weight(layers, *size) for name, size in sizes.items()}
        blocks |= {name: jnp.ones((layers, self.width)) for name in ("norm1", "norm2")}
        embed, output = weight(self.vocabulary, self.width), weight(self.width, self.vocabulary)
        words = jax.random.randint(next(keys), (self.batch, self.tokens), 0, self.vocabulary)
        return {"blocks": blocks, "embed": embed, "head": output, "norm": jnp.ones(self.width)}, (words,)

    def block(self, x: jax.Array, p: Any, dtype: Any) -> tuple[jax.Array, None]:
        y, heads = rms_norm(p["norm1"], x, dtype), (*x.shape[:2], -1, self.width // self.heads)
        q, k, v = ((y @ cast(p[name], dtype)).reshape(heads) for name in ("q", "k", "v"))
        kernel = "cudnn" if jax.default_backend() == "gpu" else "xla"
        q, k, v = (y.astype(BF16) for y in (rotate(q), rotate(k), v))  # all that cuDNN's kernel takes
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=kernel)
        x = x + attended.reshape(x.shape).astype(x.dtype) @ cast(p["out"], dtype)
        y = rms_norm(p["norm2"], x, dtype)
        hidden = jax.nn.silu(y @ cast(p["gate"], dtype)) * (y @ cast(p["up"], dtype))
        return x + hidden @ cast(p["down"], dtype), None

    def loss(self, params: Any, words: jax.Array, dtype: Any = None, policy: Any = None) -> jax.Array:
        """Mean cross entropy of the next word. With a policy, each block is in a `jax.checkpoint`."""
        block = partial(self.block, dtype=dtype)
        block = jax.checkpoint(block, policy=policy) if policy else block
        x, _ = jax.lax.scan(block, cast(params["embed"], dtype)[words], params["blocks"])
        logits = rms_norm(params["norm"], x, dtype) @ cast(params["head"], dtype)
        return cross_entropy(logits, jnp.roll(words, -1, 1))


LLAMA = {"model": "Llama, 2 layers of 4096, cuDNN's attention, 2 x 4096"}


def sizes(quick: bool) -> Llama:
    return Llama(2, 128, 256, 4, 2, 256, 1, 128) if quick else Llama()


def llama(quick: bool, send: Send) -> None:
    model = sizes(quick)
    ways = by_hand(model.loss) | autocast(model.loss, 1.0, 0.5, 0.25)
    measure(LLAMA, [Way(name, partial(sgd_step, fun), model.make) for name, fun in ways.items()], quick, send)


def llama_float8(quick: bool, send: Send) -> None:
    """The same in float8, beside bfloat16 with the same flag."""
    model = sizes(quick)
    bf16, float8 = jamp.autocast(model.loss, BF16), jamp.autocast(model.loss, jamp.Float8())
    ways = {"autocast, with the flag": bf16, "autocast, with the flag, again": bf16, "Float8": float8}
    ways["Float8, all products"] = jamp.autocast(model.loss, jamp.Float8(), rules={"dot_general": "compute"})
    timed = [Way(name, partial(sgd_step, fun), model.make, WITHOUT_TRITON) for name, fun in ways.items()]
    measure(LLAMA, timed, quick, send)


def llama_float8_default_flags(quick: bool, send: Send) -> None:
    """Whether float8 compiles without the flag by now. If so, its time is beside bfloat16's."""
    model = sizes(quick)
    bf16, float8 = jamp.autocast(model.loss, BF16), jamp.autocast(model.loss, jamp.Float8())
    ways = {"autocast": bf16, "autocast, again": bf16, "Float8, default flags": float8}
    measure(LLAMA, [Way(name, partial(sgd_step, fun), model.make) for name, fun in ways.items()], quick, send)


def vocabulary(quick: bool, send: Send) -> None:
    """A cross entropy over the vocabulary of Llama 3, in bfloat16."""
    head = SMALL if quick else LARGEST
    ways = ways_of_head(head.chunks[:2], "where")
    ways = {"whole logits": ways["whole logits"], "whole logits, again": ways["whole logits"]} | ways
    timed = [Way(name, partial(sgd_step, fun), partial(head.make, BF16)) for name, fun in ways.items()]
    measure({"model": "a head of 2560 x 128,256, 32,768 rows"}, timed, quick, send, calls=2)
