"""autocast against careful casts by hand: products of 16-bit operands, everything else in float32.

Each function is written once, for the `dot` that it is given. The truth is float64.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax, nn
from jaxprs import normal
from pairs import wide
from programs import by_hand

import jamp

N = 32
X, Y, W, V = (normal(N, N, seed=seed, scale=scale) for seed, scale in enumerate([1, 1, N**-0.5, N**-0.5]))
LONG, SMALL = normal(4096, 16, seed=5), normal(16, 16, seed=6, scale=16**-0.5)
STEPS, IDS = LONG[:512] + 0.5, np.int32(np.arange(4096) // 1024)
LABELS, EYE, MASK = np.arange(N) * 5 % N, np.eye(N, dtype=bool), Y < 1
HOT = EYE[LABELS]

centered = lambda h, axis: h - h.mean(axis, keepdims=True)
norm = lambda h, axis=-1: centered(h, axis) * lax.rsqrt(h.var(axis, keepdims=True) + 1e-5)
unit = lambda h: h / jnp.sqrt((h * h).sum(-1, keepdims=True))
pick = lambda h: jnp.where(HOT, h, 0).sum(-1)
own = lambda h: jnp.where(EYE, h, 0).sum(-1)
distances = lambda h: ((h[:, None] - h[None]) ** 2).sum(-1)
scan = lambda step, xs: lax.scan(lambda h, x: (h := step(h, x), h), jnp.zeros_like(xs[0]), xs)[1].mean(0)
angles = lambda x: jnp.asarray(132.0 * np.arange(N)[:, None] * np.ones(N // 2), x.dtype) * frequencies(x)
frequencies = lambda x: jnp.asarray(1e-4 ** (np.arange(N // 2) / (N // 2)), x.dtype)
attention = lambda dot, x, w, v, mask: dot(nn.softmax(mask(dot(dot(x, w), x.T) / N**0.5)), dot(x, v))
expanded = lambda dot, h: (h * h).sum(-1)[:, None] + (h * h).sum(-1) - 2 * dot(h, h.T)
spectral = lambda dot, x, w: dot(x, w) / jnp.linalg.norm(dot(unit(dot(dot(x[:1], w.T), w)), w.T))
pool = lambda h: lax.reduce_window(h, -jnp.inf, lax.max, (1024, 1), (1, 1), "SAME")
added = lambda h, xs: scan(lambda _, x: jnp.tanh(h + x), xs)
kl = lambda p, q: (jnp.exp(p) * (p - q)).sum(-1)


def rotary(x):
    (a, b), at = jnp.split(x, 2, -1), angles(x)
    return jnp.concatenate([a * jnp.cos(at) - b * jnp.sin(at), a * jnp.sin(at) + b * jnp.cos(at)], -1)


def experts(dot, x, w, v):
    best, which = lax.top_k(nn.softmax(4 * dot(x, w[:, :8])), 2)
    gates = (nn.one_hot(which, 8, dtype=x.dtype) * (best / best.sum(-1, keepdims=True))[..., None]).sum(1)
    return (gates[..., None] * nn.gelu(dot(x, v).reshape(N, 8, -1))).sum(1)


OF_A_PRODUCT = {
    "layer norm": norm,
    "group norm": lambda h: norm(h.reshape(N, 4, -1)).reshape(N, N),
    "batch norm": lambda h: norm(h, 0),
    "rms norm": lambda h: h * lax.rsqrt((h * h).mean(-1, keepdims=True) + 1e-6),
    "l2 norm": unit,
    "norm of values near 300": lambda h: jnp.linalg.norm(300 + h, axis=-1),
    "softmax of large logits": lambda h: nn.softmax(100 * h),
    "temperature": lambda h: nn.softmax(h / 0.01),
    "logsumexp": lambda h: nn.logsumexp(30 * h, -1),
    "log-sigmoid": lambda h: nn.log_sigmoid(8 * h),
    "log(1 - sigmoid)": lambda h: jnp.log(1 - nn.sigmoid(3 * h)),
    "binary cross entropy": lambda h: optax.sigmoid_binary_cross_entropy(5 * h, jnp.asarray(HOT, h.dtype)),
    "cross entropy": lambda h: nn.logsumexp(5 * h, -1) - pick(5 * h),
    "focal": lambda h: -(nn.sigmoid(jnp.where(HOT, -h, h)) ** 2) * nn.log_sigmoid(jnp.where(HOT, h, -h)),
    "label smoothing": lambda h: -((jnp.asarray(HOT, h.dtype) * 0.9 + 0.1 / N) * nn.log_softmax(h)).sum(-1),
    "huber": lambda h: optax.huber_loss(3 * h, jnp.ones_like(h)),
    "dice": lambda h: 1 - (2 * pick(nn.sigmoid(h)) + 1) / (nn.sigmoid(h).sum(-1) + 2),
    "variance": lambda h: (h + 10).var(-1),
    "std": lambda h: (h + 10).std(0),
    "softplus": lambda h: nn.softplus(4 * h),
    "mish": nn.mish,
    "gelu": nn.gelu,
    "silu": nn.silu,
    "cumulative sum": lambda h: jnp.cumsum(h + 1, 0),
    "distances": lambda h: distances(1 + h / 100),
    "polynomial": lambda h: 1 + h * (0.5 + h * (0.25 + h * (0.125 + h * 0.0625))),
    "power": lambda h: (h - 1) ** 4,
}
CASES = {name: (lambda dot, x, w, f=f: f(dot(x, w)), X, W) for name, f in OF_A_PRODUCT.items()} | {
    "masked softmax": (lambda *xs: attention(*xs, lambda s: jnp.where(MASK, s, jnp.finfo(s.dtype).min)), X, W, V),
    "mask of -1e9": (lambda *xs: attention(*xs[:-1], lambda s: s + xs[-1]), X, W, V, jnp.where(MASK, 0.0, -1e9)),
    "attention pooling": (lambda dot, x, w: dot(nn.softmax(dot(x, w)[:, :1], 0).T, x), LONG, SMALL),
    "mean of a long sequence": (lambda dot, x, w: (dot(x, w) + 1).mean(0), LONG, SMALL),
    "kl": (lambda dot, x, w, v: kl(nn.log_softmax(3 * dot(x, w)), nn.log_softmax(3 * dot(x, v))), X, W, V),
    "swiglu": (lambda dot, x, w, v: dot(nn.silu(dot(x, w)) * dot(x, v), w), X, W, V),
    "cosine similarity": (lambda dot, x, y, w: optax.cosine_similarity(dot(x, w), dot(y, w)), X, X + Y / 10, W),
    "gated scan": (
        lambda dot, xs, w: scan(lambda h, a: h + nn.sigmoid(a) * (jnp.tanh(a) - h), dot(xs, w)),
        STEPS,
        SMALL,
    ),
    "recurrent": (lambda dot, xs, w: scan(lambda h, x: 0.9 * h + jnp.tanh(dot(w, h) + x) / 10, xs), STEPS, SMALL),
    "moving average": (lambda dot, xs, w: scan(lambda h, x: 0.99 * h + 0.01 * x, dot(xs, w)), STEPS, SMALL),
    "expanded distances": (lambda dot, x, w: expanded(dot, x + dot(x, w) / 100), X, W),
    "rotary": (lambda dot, x, w: dot(rotary(dot(x, w)), rotary(x).T) / N**0.5, X, W),
    "sinusoidal": (lambda dot, x, w: dot(x + jnp.tile(jnp.sin(angles(x)), 2), w), X, W),
    "experts": (experts, X, W, V),
    "weight norm": (lambda dot, x, w, g: dot(x, g * unit(w.T).T), X, W, Y[0]),
    "spectral": (spectral, X, W),
    "gather": (lambda dot, x, w, v: dot(dot(x, w)[IDS], v).mean(0), SMALL, SMALL, W[:16, :16]),
    "broadcast": (lambda dot, x, w, v: dot(jnp.tile(dot(x, w), (512, 1)), v).mean(0), SMALL, SMALL, W[:16, :16]),
    "copies": (lambda dot, x, w, v: dot(jnp.concatenate([dot(x, w)] * 256), v).mean(0), SMALL, SMALL, W[:16, :16]),
    "cummax": (lambda dot, x, w: lax.cummax(dot(x, w)).mean(0), LONG, SMALL),
    "windows": (lambda dot, x, w: pool(dot(x, w)).mean(0), LONG, SMALL),
    "constant of a loop": (lambda dot, xs, x, w: added(dot(x, w)[0], xs), LONG, SMALL, SMALL),
    "residual": (lambda dot, x, w, v: x + dot(nn.gelu(dot(norm(x), w)), v), X, W, V),
}
custom = jax.custom_vjp(lambda s: 1.0 * s)
custom.defvjp(lambda s: (1.0 * s, None), lambda _, g: (g,))
LARGEST = {  # of each row, which is on the diagonal
    "a mask": own,
    "indices": lambda s: s[np.arange(N), np.arange(N)],
    "diagonal": jnp.diagonal,
    "sort": lambda s: jnp.sort(s, -1)[:, -1],
    "top_k": lambda s: lax.top_k(s, 1)[0][:, 0],
    "reduce_window": lambda s: lax.reduce_window(s, -jnp.inf, lax.max, (1, N), (1, 1), "VALID")[:, 0],
    "scatter": lambda s: own(s.at[0, 1].set(0.0)),
    "cond": lambda s: lax.cond(s[0, 0] > -1e9, own, lambda s: -s[0], s),
    "scan": lambda s: own(2 * lax.map(lambda row: 0.5 * row, s)),
    "remat": jax.checkpoint(own),
    "custom_vjp": lambda s: own(custom(s)),
}


def contrastive(dot, x, y, w, largest, late):
    """Two terms that nearly cancel, each of which reads the scores in its own way."""
    scores = dot(unit(dot(x, w)), unit(dot(y, w)).T / (1 if late else 0.07)) / (0.07 if late else 1)
    return nn.logsumexp(scores, -1) - largest(scores)


for late, name in [(late, name) for late in (True, False) for name in LARGEST]:
    fun = functools.partial(contrastive, largest=LARGEST[name], late=late)
    CASES[f"contrastive, {name} of scores" + " over a temperature" * late] = fun, X, X + Y / 10, W
QUICK = ["mask of -1e9", "constant of a loop", "contrastive, indices of scores over a temperature"]
QUICK += ["contrastive, sort of scores", "contrastive, scatter of scores over a temperature"]


def evaluate(fun, *args):
    """Results and their gradient."""
    weigh = lambda out: (out * jnp.asarray(np.cos(np.arange(out.size)), out.dtype).reshape(out.shape)).sum()
    grad = jax.grad(lambda args: (weigh(out := fun(*args)), out), has_aux=True)
    return [np.float64(x) for x in jax.tree.leaves(jax.jit(grad)(args)[::-1])]


@functools.cache
def truth(name):
    fun, *args = CASES[name]
    with jax.enable_x64(True):
        return evaluate(functools.partial(fun, jnp.matmul), *map(np.float64, args))


def error(found, true):
    return np.linalg.norm(found - true) / np.linalg.norm(true)


@pytest.mark.slow_after(4)
@pytest.mark.promotes("optax")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(
            name,
            dtype,
            marks=[pytest.mark.slow]
            * (name not in QUICK[: len(QUICK) if dtype == jnp.bfloat16 else 2] or dtype == jnp.float16),
        )
        for name in CASES
        for dtype in (jnp.bfloat16, jnp.float16, jnp.float32)
    ],
)
def test_autocast_is_as_accurate_as_careful_casts_by_hand(name, dtype):
    fun, *args = CASES[name]
    with jax.enable_x64(wide(dtype) == np.float64):
        given = [wide(dtype).type(x) for x in args]
        careful = evaluate(functools.partial(fun, by_hand(dtype)), *given)
        mine = evaluate(jamp.autocast(functools.partial(fun, jnp.matmul), dtype), *given)
    for i, (c, m, t) in enumerate(zip(careful, mine, truth(name), strict=True)):
        assert np.isfinite(m).all() or not np.isfinite(c).all(), i
        assert error(m, t) <= 2 * error(c, t) + jnp.finfo(dtype).eps / 2, i


def table(dtype):
    """The errors of each function's value and gradient: all in 16 bit, careful casts, autocast."""
    for name, (fun, *args) in CASES.items():
        dot = lambda x, y: jnp.matmul(x.astype(dtype), y.astype(dtype)).astype(jnp.float32)
        plain, low = functools.partial(fun, jnp.matmul), [jnp.asarray(x, dtype) for x in args]
        ways = (
            evaluate(plain, *low),
            evaluate(functools.partial(fun, dot), *args),
            evaluate(jamp.autocast(plain, dtype), *args),
        )
        cells = [" / ".join(f"{error(x, t):.1e}" for x, t in zip(way[:2], truth(name), strict=False)) for way in ways]
        print("|", " | ".join([name, *cells]), "|", flush=True)


if __name__ == "__main__":
    table(jnp.bfloat16)
