"""A decoder of eight layers, whose products have lines and scopes of their own. A planted one needs its digits."""

import inspect

import jax
import jax.numpy as jnp

LAYERS, WIDTH, HEADS, TOKENS, VOCABULARY = 8, 64, 2, 64, 64
PRODUCTS = "query", "key", "value", "output", "up", "down"


def init(seed):
    keys = iter(jax.random.split(jax.random.key(seed), 2 + LAYERS * len(PRODUCTS)))
    normal = lambda *shape: jax.random.normal(next(keys), shape) / shape[0] ** 0.5
    wide = {"up": (WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WIDTH)}
    layers = [{name: normal(*wide.get(name, (WIDTH, WIDTH))) for name in PRODUCTS} for _ in range(LAYERS)]
    return {"embed": normal(VOCABULARY, WIDTH) * VOCABULARY**0.5, "layers": layers, "head": normal(WIDTH, VOCABULARY)}


def batch(seed, size=2):
    return jax.random.randint(jax.random.key(1000 + seed), (size, TOKENS + 1), 0, VOCABULARY)


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def loss_with(planted, size, params, tokens):
    """The loss. The operand of the planted product, (5, "up"), has a feature of a large size in all tokens.

    Its part of the result is subtracted again, as a bias may do, so that the function is the one without it.
    """

    def operand(x, i, w, name):
        if planted != (i, name):
            return x, 0.0
        return x.at[..., 3].set(size), size * jax.lax.stop_gradient(w[3])

    x = params["embed"][tokens[:, :-1]]
    mask = jnp.tril(jnp.ones((TOKENS, TOKENS), bool))
    heads = lambda x: x.reshape(*x.shape[:-1], HEADS, -1)
    for i, p in enumerate(params["layers"]):
        with jax.named_scope(f"h_{i}"):
            h = norm(x)
            with jax.named_scope("query"):
                y, bias = operand(h, i, p["query"], "query")
                q = y @ p["query"] - bias  # query
            with jax.named_scope("key"):
                y, bias = operand(h, i, p["key"], "key")
                k = y @ p["key"] - bias  # key
            with jax.named_scope("value"):
                y, bias = operand(h, i, p["value"], "value")
                v = y @ p["value"] - bias  # value
            with jax.named_scope("attend"):
                scores = jnp.einsum("bthd,bshd->bhts", heads(q), heads(k)) / (WIDTH / HEADS) ** 0.5
                a = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(jnp.where(mask, scores, -1e9)), heads(v))
            with jax.named_scope("output"):
                y, bias = operand(a.reshape(x.shape), i, p["output"], "output")
                x = x + y @ p["output"] - bias  # output
            with jax.named_scope("up"):
                y, bias = operand(norm(x), i, p["up"], "up")
                h = jax.nn.gelu(y @ p["up"] - bias)  # up
            with jax.named_scope("down"):
                y, bias = operand(h, i, p["down"], "down")
                x = x + y @ p["down"] - bias  # down
    with jax.named_scope("head"):
        logits = norm(x) @ params["head"]
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1))


def line(name):
    """The source of a product, as a row has it."""
    lines, first = inspect.getsourcelines(loss_with)
    (found,) = [first + i for i, text in enumerate(lines) if text.rstrip().endswith(f"# {name}")]
    return f"decoders.py:{found} "
