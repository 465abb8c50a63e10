"""Log-probabilities of a bfloat16 decoder beside float32's, with and without a float32 head.

    python -m benchmarks.accuracy.head --json docs/benchmarks/head.json

GPT-2's layers, 4 of width 256, learn the words of Python's standard library in float32. Then the program that computes
in bfloat16 by hand, with weights in bfloat16, is compared with float32 on the same weights: the root mean square, over
the tokens of files that are held out, of the difference of the next token's log-probability.
"""

import os
import re
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jamp
from benchmarks import models
from benchmarks.accuracy.windows import spread, windows
from benchmarks.record import parser, processor, record, show, write

TOKENS = 64
# By name: the rules of `jamp.autocast`, None for the program as it is.
WAYS: dict[str, Any] = {
    "bfloat16 as written": None,
    "head: accumulate": {"dot_general[head]": "accumulate"},
    "head: float32": {"dot_general[head]": "float32"},
}


def words(vocabulary: int) -> tuple[jax.Array, jax.Array]:
    """The most frequent words and signs as numbers, and 0 for others: of nine files of ten, and of every tenth."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    split = lambda some: re.findall(r"\w+|[^\w\s]", "\n".join(file.read_text(errors="ignore") for file in some))
    train, test = split(file for i, file in enumerate(files) if i % 10), split(files[::10])
    numbers = {word: i + 1 for i, (word, _) in enumerate(Counter(train).most_common(vocabulary - 1))}
    train_and_test = (jnp.asarray([numbers.get(word, 0) for word in text], jnp.int32) for text in (train, test))
    return next(train_and_test), next(train_and_test)


def compare(vocabulary: int, steps: int, seed: int) -> list[dict[str, Any]]:
    shape = models.Shape(4, 256, 4, vocabulary, TOKENS, scanned=True)
    (train, test), tx = words(vocabulary), optax.adam(optax.warmup_cosine_decay_schedule(0.0, 1e-3, steps // 10, steps))
    keys = jax.random.split(jax.random.key(seed))
    params = models.init(keys[0], shape)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, key: jax.Array) -> Any:
        batch = windows(train, jax.random.randint(key, (8,), 0, len(train) - TOKENS), TOKENS)
        grads = jax.grad(models.loss_fn)(params, (batch[:, :-1], batch[:, 1:]), shape=shape)
        return models.updated(tx, grads, params, state)

    state = tx.init(params)
    for key in jax.random.split(keys[1], steps):
        params, state = step(params, state, key)
    weights, batch = jamp.cast_floating(params, jnp.bfloat16), spread(test, 64, TOKENS)

    def log_probs(dtype: Any, params: Any) -> jax.Array:
        logits = models.logits(params, batch[:, :-1], shape, dtype).astype(jnp.float32)
        return jnp.take_along_axis(jax.nn.log_softmax(logits), batch[:, 1:, None], -1)[..., 0]

    run = partial(jax.jit, compiler_options={"xla_allow_excess_precision": False})
    exact = run(partial(log_probs, None))(jamp.cast_floating(weights, jnp.float32))
    rows = []
    for name, rules in WAYS.items():
        fun = partial(log_probs, jnp.bfloat16)
        found = run(jamp.autocast(fun, jnp.bfloat16, rules=rules) if rules else fun)(weights)
        error = float(jnp.sqrt(jnp.mean((found - exact) ** 2)))
        rows.append(
            {"name": name, "vocabulary": vocabulary, "seed": seed, "error": error, "loss": float(-exact.mean())}
        )
        show(rows[-1])
    return rows


def main() -> None:
    form = parser("benchmarks.accuracy.head", __doc__)
    options = form.parse_args()
    cases = [(128, 4)] if options.quick else [(1024, 100), (32768, 100)]
    seeds = range(1 if options.quick else 3)
    rows = [row for size, steps in cases for seed in seeds for row in compare(size, steps, seed)]
    write(options.json, record("benchmarks.accuracy.head", options.quick, f"cpu, {processor()}") | {"rows": rows})


if __name__ == "__main__":
    main()
