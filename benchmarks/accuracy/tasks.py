"""What the accuracy studies train: a classifier of handwritten digits and a small language model, in plain JAX."""

import functools
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.models import attend_written_out, rms_norm, train_step
from benchmarks.record import Rows, show

Loss = Callable[[Any, Any], tuple[jax.Array, jax.Array]]
CONTEXT, HEADS = 64, 4


@dataclass(frozen=True)
class Task:
    """`loss(params, batch)` gives mean cross entropy and accuracy, f32[] both."""

    name: str
    init: Callable[[jax.Array], Any]  # of a key
    loss: Loss
    data: Any
    get_batch: Callable[[Any, jax.Array], Any]  # of the data and a key
    held_out: Any  # a batch that is never trained on
    learning_rate: float
    steps: int
    decay: bool = True  # of the learning rate, after the warm-up

    def optimizer(self) -> optax.GradientTransformation:
        warm_up = 0.0, self.learning_rate, self.steps // 20
        schedule = optax.warmup_cosine_decay_schedule(*warm_up, self.steps)
        if not self.decay:
            schedule = optax.warmup_constant_schedule(*warm_up)
        return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))


def halves(files: Iterable[Path]) -> tuple[jax.Array, jax.Array]:
    """The bytes of some files to train on, and those of every tenth file, u8[n] each."""
    ordered = sorted(files)
    read = lambda some: jnp.asarray(np.frombuffer(b"\n".join(file.read_bytes() for file in some), np.uint8))
    return read(file for i, file in enumerate(ordered) if i % 10), read(ordered[::10])


def windows(text: jax.Array, starts: jax.Array, tokens: int = CONTEXT) -> jax.Array:
    """So many bytes and the one that follows, i32[n, tokens + 1]."""
    return text[starts[:, None] + jnp.arange(tokens + 1)].astype(jnp.int32)


def spread(text: jax.Array, count: int, tokens: int = CONTEXT) -> jax.Array:
    """Windows at equal distances."""
    return windows(text, jnp.linspace(0, len(text) - tokens - 1, count).astype(jnp.int32), tokens)


def language_model(quick: bool) -> Task:
    """Next byte of Python's standard library: a decoder with GPT-2's initialisation and tied embeddings."""
    train, test = halves(Path(os.__file__).parent.glob("*.py"))

    def get_batch(text: jax.Array, key: jax.Array) -> jax.Array:
        return windows(text, jax.random.randint(key, (8 if quick else 16,), 0, len(text) - CONTEXT))

    held_out = spread(test, 4 if quick else 128)
    return Task("language model", init_lm, lm_loss, train, get_batch, held_out, 3e-3, 4 if quick else 600)


def init_lm(key: jax.Array) -> Any:
    """float32 parameters: 12 * layers * width**2 + (vocabulary + CONTEXT) * width, plus norms."""
    layers, width, vocabulary = 2, 64, 256
    keys = iter(jax.random.split(key, 4 * layers + 2))
    normal = lambda *shape, std=0.02: std * jax.random.normal(next(keys), shape)
    into_stream = functools.partial(normal, std=0.02 / (2 * layers) ** 0.5)

    def block() -> dict[str, jax.Array]:
        attention = {"qkv": normal(width, 3 * width), "out": into_stream(width, width), "norm1": jnp.ones(width)}
        mlp = {"up": normal(width, 4 * width), "down": into_stream(4 * width, width), "norm2": jnp.ones(width)}
        return attention | mlp

    blocks = [block() for _ in range(layers)]
    embeddings = {"embed": normal(vocabulary, width), "position": normal(CONTEXT, width)}
    return embeddings | {"blocks": blocks, "norm": jnp.ones(width)}


def lm_loss(params: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    x = params["embed"][inputs] + params["position"]
    for block in params["blocks"]:
        qkv = (rms_norm(x, block["norm1"]) @ block["qkv"]).reshape(*x.shape[:2], HEADS, -1)
        attended = attend_written_out(*jnp.split(qkv, 3, axis=-1), causal=True)
        x = x + attended.reshape(x.shape) @ block["out"]
        x = x + jax.nn.gelu(rms_norm(x, block["norm2"]) @ block["up"]) @ block["down"]
    return cross_entropy(rms_norm(x, params["norm"]) @ params["embed"].T, labels)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean(), jnp.mean(logits.argmax(-1) == labels)


def digits(quick: bool) -> Task:
    """The network and the data of examples/digits.py, which trains on all 898 images in each step."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    halves = train_test_split(images / 16, labels, test_size=0.5, stratify=labels, random_state=0)
    x, test_x, y, test_y = (jnp.asarray(half, half.dtype.char.replace("d", "f").replace("l", "i")) for half in halves)

    train, test, get_batch = (x, y), (test_x, test_y), lambda data, key: data
    return Task("digits", init_digits, mlp_loss, train, get_batch, test, 1e-2, 4 if quick else 2000, decay=False)


def init_digits(key: jax.Array) -> Any:
    he, sizes = jax.nn.initializers.he_normal(), (64, 128, 128, 128, 10)
    layers = zip(jax.random.split(key, len(sizes) - 1), sizes[:-1], sizes[1:], strict=True)
    return [{"w": he(k, (n, m)), "b": jnp.zeros(m)} for k, n, m in layers]


def mlp_loss(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    x = batch[0]
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return cross_entropy(x @ params[-1]["w"] + params[-1]["b"], batch[1])


def trained(task: Task, loss: Loss, tx: optax.GradientTransformation, params: Any, key: jax.Array) -> Any:
    """The parameters at the end of a run without loss scaling."""

    def step(carry: Any, key: jax.Array) -> tuple[Any, None]:
        return train_step(lambda *args: loss(*args)[0], tx, False, carry, task.get_batch(task.data, key)), None

    keys = jax.random.split(jax.random.fold_in(key, 2), task.steps)
    return jax.lax.scan(step, (params, tx.init(params)), keys)[0][0]


def held_out(task: Task, way: str, run: Callable[[jax.Array], Any], seeds: int) -> Rows:
    """A row for each seed: `run(key)` gives loss and accuracy on the data held out."""
    compiled, rows = jax.jit(run).lower(jax.random.key(0)).compile(), []
    for seed in range(seeds):
        loss, right = map(float, compiled(jax.random.key(seed)))
        rows.append({"task": task.name, "way": way, "seed": seed, "loss": loss, "accuracy": right})
        show(rows[-1])
    return rows
