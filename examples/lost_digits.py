"""Find the line that makes training in bfloat16 worse, and mend it, in a model with one planted fault.

The model is an attention whose keys have a large part in common. It cancels in the softmax, so in float32 nothing is
wrong. In 16 bit it costs the logits their digits. Nothing overflows and nothing underflows.

1. `jamp.debug.rounding_report` names the line, and its rules mend it.
2. `jamp.debug.compare` compares a decoder that has a cache with the whole model. In the decoder, positions are wrong by
   one from the ninth on. It also draws how float32 and 16 bit part along the model.

    pip install '.[examples]'
    python examples/lost_digits.py

It prints the reports, and writes lost_digits.png. It takes about a minute on a CPU.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp

import jamp
import jamp.debug
import jamp.plot

LAYERS, WIDTH, LENGTH, BATCH, WORDS = 4, 32, 16, 4, 50


def init_params(key):
    keys = jax.random.split(key, 8)
    dense = lambda i, *shape: jax.random.normal(keys[i], shape) * shape[-2] ** -0.5
    layers = {name: dense(i, LAYERS, WIDTH, WIDTH) for i, name in enumerate("qkvo")}
    return {"embed": dense(4, WORDS, WIDTH), "place": dense(5, LENGTH, WIDTH), "layers": layers}


def attention(x, keys, p, offset):
    """The planted fault is `offset`: a constant in all keys, which changes no softmax."""
    scores = (x @ p["q"] + 1) @ (keys @ p["k"] + offset).swapaxes(-1, -2)
    mask = jnp.arange(keys.shape[1]) <= jnp.arange(x.shape[1])[:, None] + keys.shape[1] - x.shape[1]
    return jax.nn.softmax(jnp.where(mask, scores / WIDTH**0.5, -1e9)) @ (keys @ p["v"]) @ p["o"]


def forward(params, tokens, offset=0.0, start=0):
    """Log-probabilities of the next token, f32[batch, length, words]."""
    x = params["embed"][tokens] + params["place"][start + jnp.arange(tokens.shape[1])]
    for i in range(LAYERS):
        with jax.named_scope(f"layer_{i}"):
            p = jax.tree.map(lambda w, i=i: w[i], params["layers"])
            x = x + attention(x, x, p, offset if i == 1 else 0.0)
    with jax.named_scope("head"):
        return jax.nn.log_softmax(x @ params["embed"].T)


def loss_fn(params, tokens, offset=0.0):
    log_probs = forward(params, tokens[:, :-1], offset)
    return -jnp.mean(jnp.take_along_axis(log_probs, tokens[:, 1:, None], -1))


def decode(params, tokens, mistake):
    """As `forward`, but token by token, with a cache of what each layer has read so far."""

    def step(caches, inputs):
        place, token = inputs
        x = params["embed"][token][:, None] + params["place"][place + mistake * (place > 8)]
        for i in range(LAYERS):
            p = jax.tree.map(lambda w, i=i: w[i], params["layers"])
            cache = jax.lax.dynamic_update_slice_in_dim(caches[i], x, place, 1)
            caches = caches.at[i].set(cache)
            scores = (x @ p["q"] + 1) @ (cache @ p["k"]).swapaxes(-1, -2) / WIDTH**0.5
            scores = jnp.where(jnp.arange(LENGTH) <= place, scores, -1e9)
            x = x + jax.nn.softmax(scores) @ (cache @ p["v"]) @ p["o"]
        return caches, jax.nn.log_softmax(x @ params["embed"].T)[:, 0]

    empty = jnp.zeros((LAYERS, len(tokens), LENGTH, WIDTH))
    return jax.lax.scan(step, empty, (jnp.arange(LENGTH), tokens.T))[1].swapaxes(0, 1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Find the line that loses digits.")
    parser.add_argument("--out", type=Path, default=Path("out"), help="the folder for lost_digits.png")
    args = parser.parse_args()
    params = init_params(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (BATCH, LENGTH + 1), 0, WORDS)
    faulty = lambda params, tokens: loss_fn(params, tokens, offset=200.0)

    report = jamp.debug.rounding_report(faulty, jnp.bfloat16)(params, tokens)
    print(report, end="\n\n")
    rules = report.rules(error=0.05)
    fixed = jamp.debug.rounding_report(faulty, jnp.bfloat16, rules=rules)(params, tokens)
    print(f"With rules={rules} the error of the gradients is {fixed.gradient_error:.1e}.")
    sound = jamp.debug.rounding_report(loss_fn, jnp.bfloat16)(params, tokens)
    print(f"Without the fault and without rules it is {sound.gradient_error:.1e}.", end="\n\n")

    print("The decoder and the whole model:")
    print(jamp.debug.compare(lambda *a: decode(*a, mistake=1), forward)(params, tokens[:, :-1]), end="\n\n")
    print("The decoder without its mistake:")
    print(jamp.debug.compare(lambda *a: decode(*a, mistake=0), forward)(params, tokens[:, :-1]), end="\n\n")

    found = {
        f"{dtype}{name}": jamp.debug.compare(f, jamp.autocast(f, dtype))(params, tokens)
        for dtype in ("float16", "bfloat16")
        for name, f in {"": loss_fn, ", with the fault": faulty}.items()
    }
    args.out.mkdir(parents=True, exist_ok=True)
    jamp.plot.differences(found).savefig(args.out / "lost_digits.png")
    print(f"The growth of the differences is in {args.out / 'lost_digits.png'}.")
