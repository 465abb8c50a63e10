"""What the accuracy study trains: a classifier of handwritten digits and a small language model, in plain JAX."""

import functools
import itertools
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

import jamp
from benchmarks.models import attend_written_out, conv, rms_norm, train_step, wide
from benchmarks.record import Rows, show

Loss = Callable[[Any, Any], tuple[jax.Array, jax.Array]]
CONTEXT, HEADS = 64, 4


@dataclass(frozen=True)
class Task:
    """`make_loss(body, head, cross_entropy)(params, batch)` gives mean cross entropy and accuracy, f32[] both."""

    name: str
    init: Callable[[jax.Array], Any]  # of a key
    make_loss: Callable[[DTypeLike, DTypeLike, Loss], Loss]
    data: Any
    get_batch: Callable[[Any, jax.Array], Any]  # of the data and a key
    judged: Any  # the batch on which the table's loss is measured; None: on the one held out
    held_out: Any  # a batch that is never trained on
    learning_rate: float
    steps: int
    every: int  # steps between two evaluations
    decay: bool = True  # of the learning rate, after the warm-up
    micro_batches: int = 1  # by which the loss is divided, as under gradient accumulation

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

    data, steps = (train, get_batch, None, spread(test, 4 if quick else 128)), (4, 2) if quick else (600, 30)
    return Task("language model", init_lm, lm_loss, *data, 3e-3, *steps, micro_batches=512)


def init_lm(key: jax.Array, layers: int = 2, width: int = 64, vocabulary: int = 256) -> Any:
    """float32 parameters: 12 * layers * width**2 + (vocabulary + CONTEXT) * width, plus norms."""
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


def lm_loss(body: DTypeLike, head: DTypeLike, cross_entropy: Loss) -> Loss:
    def loss_fn(params: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        low = jamp.cast_floating(params, body)
        x = low["embed"][inputs] + low["position"]
        for block in low["blocks"]:
            qkv = (rms_norm(x, block["norm1"]) @ block["qkv"]).reshape(*x.shape[:2], HEADS, -1)
            attended = attend_written_out(*jnp.split(qkv, 3, axis=-1), causal=True)
            x = x + attended.reshape(x.shape) @ block["out"]
            x = x + jax.nn.gelu(rms_norm(x, block["norm2"]) @ block["up"]) @ block["down"]
        x, last = jamp.cast_floating((x, {"norm": params["norm"], "embed": params["embed"]}), head)
        return cross_entropy(rms_norm(x, last["norm"]) @ last["embed"].T, labels)

    return loss_fn


def cross_entropy(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    # The loss is float32 in every run: a float16 ends at 65504, where the loss scale begins.
    losses = optax.softmax_cross_entropy_with_integer_labels(wide(logits), labels)
    return losses.mean(), jnp.mean(logits.argmax(-1) == labels)


def digits(quick: bool, batch: int | None = None) -> Task:
    """The network and the data of examples/digits.py, which trains on all 898 images in each step."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    halves = train_test_split(images / 16, labels, test_size=0.5, stratify=labels, random_state=0)
    x, test_x, y, test_y = (jnp.asarray(half, half.dtype.char.replace("d", "f").replace("l", "i")) for half in halves)

    def get_batch(data: Any, key: jax.Array) -> Any:
        return jax.tree.map(lambda a: a[jax.random.permutation(key, len(y))[:batch]], data) if batch else data

    name = "digits in batches" if batch else "digits"
    data, steps = ((x, y), get_batch, (x, y), (test_x, test_y)), (4, 2) if quick else (2000, 50)
    return Task(name, init_digits, mlp_loss, *data, 1e-2, *steps, decay=False)


def overflowing(quick: bool) -> tuple[Task, Task]:
    """The digits with a batch in a hundred times 64, and with a network of 16 hidden layers."""
    task, sizes = digits(quick, batch=128), (64, *[128] * (2 if quick else 16), 10)

    def get_batch(data: Any, key: jax.Array) -> Any:
        x, y = task.get_batch(data, key)
        return x * jnp.where(jax.random.randint(jax.random.fold_in(key, 1), (), 0, 100) == 0, 64.0, 1.0), y

    deep = replace(task, name="16 hidden layers", init=lambda key: init_digits(key, sizes), learning_rate=1e-3)
    return replace(task, name="digits with spikes", get_batch=get_batch), deep


def convolutional(quick: bool) -> Task:
    """Three convolutions and a linear layer, on the images of the digits."""

    def init(key: jax.Array) -> Any:
        he, sizes = jax.nn.initializers.he_normal(), (1, 8, 16, 16)
        shapes = [(3, 3, n, m) for n, m in itertools.pairwise(sizes)] + [(sizes[-1], 10)]
        keys = jax.random.split(key, len(shapes))
        return [{"w": he(k, shape), "b": jnp.zeros(shape[-1])} for k, shape in zip(keys, shapes, strict=True)]

    def make_loss(body: DTypeLike, head: DTypeLike, cross_entropy: Loss) -> Loss:
        def loss_fn(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
            x = batch[0].reshape(-1, 8, 8, 1)
            for layer in params[:-1]:
                x = jax.nn.relu(conv(layer["w"], x, 1) + layer["b"])
            return cross_entropy(x.mean((1, 2)) @ params[-1]["w"] + params[-1]["b"], batch[1])

        return loss_fn

    task = replace(digits(quick, batch=64), name="convolutional net", init=init, make_loss=make_loss)
    return replace(task, learning_rate=3e-3, steps=4 if quick else 600, every=2 if quick else 30)


def init_digits(key: jax.Array, sizes: tuple[int, ...] = (64, 128, 128, 128, 10)) -> Any:
    he = jax.nn.initializers.he_normal()
    layers = zip(jax.random.split(key, len(sizes) - 1), sizes[:-1], sizes[1:], strict=True)
    return [{"w": he(k, (n, m)), "b": jnp.zeros(m)} for k, n, m in layers]


def mlp_loss(body: DTypeLike, head: DTypeLike, cross_entropy: Loss) -> Loss:
    def loss_fn(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        x, hidden = jamp.cast_floating((batch[0], params[:-1]), body)
        for layer in hidden:
            x = jax.nn.relu(x @ layer["w"] + layer["b"])
        x, last = jamp.cast_floating((x, params[-1]), head)
        return cross_entropy(x @ last["w"] + last["b"], batch[1])

    return loss_fn


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
