"""Random programs of 32 x 32 arrays for the `dot` that they are given, and what autocast means by a product."""

import random

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax import lax, nn
from jaxprs import carried, params as params_of
from pairs import wide

import jamp

N = 32
KEY, ROWS = jax.random.key(7), np.arange(N, dtype=np.int32) * 5 % N // 2  # rows of which some are the same
POLICIES = [None, jax.checkpoint_policies.dots_saveable, jax.checkpoint_policies.everything_saveable]


def by_hand(dtype):
    """The product of autocast: operands and result are rounded, and nothing else.

    By default XLA leaves out a cast to 16 bit that a cast back follows, but not a `reduce_precision`.
    """
    info = jnp.finfo(dtype)
    dot = lambda x, y: lax.reduce_precision(jnp.matmul(x.astype(dtype), y.astype(dtype)), info.nexp, info.nmant)
    return lambda x, y: dot(x, y).astype(wide(dtype))


def reference(dtype, accumulate=False):
    """The same with its derivative: each of its products casts for itself, so that their sums are not rounded.

    With `accumulate`, the value is float32 as it was accumulated, and the gradient that of the rounded product.
    """
    accumulated = lambda x, y: jnp.matmul(x.astype(dtype), y.astype(dtype), preferred_element_type=jnp.float32)
    rounded = jax.custom_jvp(by_hand(dtype))
    dot = jax.custom_jvp(accumulated) if accumulate else rounded
    for fun in {dot, rounded}:
        fun.defjvp(lambda p, t, fun=fun: (fun(*p), rounded(t[0], p[1]) + rounded(p[0], t[1])))
    return dot


def kl(p, q):
    return jnp.exp(p) * (p - q)


FLOAT32 = np.finfo(np.float32)


def filled(constant):
    """A select, a pad and a clamp with a constant, and whether they are equal to it."""

    def fun(dot, x, w):
        ends = jnp.finfo(x.dtype)
        c, far = (float(np.clip(y, ends.min, ends.max)) for y in (constant, 1.5 * constant))
        selected = jnp.where(np.tri(N, dtype=bool), dot(x, w), c)
        padded = lax.pad(dot(x[:-2], w), jnp.asarray(c, x.dtype), ((1, 1, 0), (0, 0, 0)))
        clamped = lax.clamp(min(far, c), dot(x, w.T), max(far, c))
        return sum(jnp.where(y == c, x, jnp.tanh(y)) for y in (selected, padded, clamped))

    return fun


centered = lambda x: x - x.mean(-1, keepdims=True)
LEAVES = {
    "product": lambda dot, x, w: dot(x, w),
    "two products": lambda dot, x, w: dot(jnp.tanh(dot(x, w)), w.T) + dot(x, w),
    "read often": lambda dot, x, w: (lambda h: sum(dot(h, v) for v in (w, w.T, w[::-1])))(dot(x, w)),
    "of itself": lambda dot, x, w: dot(x, x.T) / N**0.5,
    "attention": lambda dot, x, w: dot(nn.softmax(dot(x, dot(x, w).T)), x),
    "heads": lambda dot, x, w: dot(dot(x, w).reshape(4, 8, N), w).reshape(N, N),
    "pieces": lambda dot, x, w: sum(dot(y, w[:16]) for y in jnp.split(dot(x, w), 2, -1)),
    "norm": lambda dot, x, w: centered(x) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-2),
    "softmax": lambda dot, x, w: 8 * nn.softmax(x),
    "kl": lambda dot, x, w: 9 * kl(nn.log_softmax(dot(x, w)), nn.log_softmax(dot(x, w) + x / 4)),
    "picked": lambda dot, x, w: nn.logsumexp(dot(x, w), -1, keepdims=True) - dot(x, w)[ROWS],
    "gelu": lambda dot, x, w: nn.gelu(x),
    "relu": lambda dot, x, w: nn.relu(dot(x, w)) + x,
    "square": lambda dot, x, w: x * jnp.tanh(x),
    "where": lambda dot, x, w: jnp.where(np.eye(N, dtype=bool), 0.0, dot(x, w)),
    "masked": lambda dot, x, w: nn.softmax(jnp.where(np.tri(N, dtype=bool), dot(x, w), -jnp.inf)) + x,
    "sum": lambda dot, x, w: x + x.sum(0) / N,
    "largest": lambda dot, x, w: x - dot(x, w).max(-1, keepdims=True) / 2,
    "running": lambda dot, x, w: jnp.cumsum(dot(x, w), 0) / 6,
    "sorted": lambda dot, x, w: jnp.sort(dot(x, w), -1) + x,
    "turned": lambda dot, x, w: dot(x, w).T,
    "rows": lambda dot, x, w: dot(x, w)[ROWS] - x,
    "joined": lambda dot, x, w: jnp.concatenate([dot(x, w)[16:], dot(x, w)[:16]]),
    "padded": lambda dot, x, w: jnp.pad(dot(x, w)[1:, :-2], ((0, 1), (2, 0))),
    "bias": lambda dot, x, w: dot(x, w) + w[0],
    "residual": lambda dot, x, w: x + dot(nn.silu(dot(x, w)), w) / 2,
    "dropout": lambda dot, x, w: jnp.where(jax.random.bernoulli(KEY, 0.9, x.shape), x / 0.9, 0.0),
    # Constants that 16 bit does not hold, and one that float32 does not.
    **{f"filled with {c}": filled(c) for c in (257.3, 1e5, 123456.7, -1e9, 1e300, -1e38, float(FLOAT32.min))},
    "precise": lambda dot, x, w: jamp.full_precision(jnp.matmul)(dot(x, w), w),
}


def stacked(inner):
    def fun(dot, x, w):
        def step(c, y):
            new = inner(dot, c, w)
            return (c + new) / 2, (dot(new, w), y - new)

        c, (products, others) = lax.scan(step, x, jnp.stack([dot(x, w), x]))
        return c + products.mean(0) - others[0] / 4

    return fun


def branches(inner):
    return lambda dot, x, w: lax.cond(
        x[0, 0] < 1e6, lambda h, x: h + inner(dot, x, w), lambda h, x: h - x, dot(x, w), x
    )


def switched(inner):
    return lambda dot, x, w: lax.switch(1, [lambda x: dot(x, w), lambda x: inner(dot, x, w), lambda x: 2 * x], x)


def with_rule(inner):
    def fun(dot, x, w):
        own = jax.custom_vjp(lambda x, w: inner(dot, x, w))
        own.defvjp(lambda x, w: jax.vjp(lambda x, w: inner(dot, x, w), x, w), lambda pull_back, g: pull_back(g))
        return own(dot(x, w), w)

    return fun


def with_tangent(inner):
    def fun(dot, x, w):
        own = jax.custom_jvp(lambda x, w: inner(dot, x, w))
        own.defjvp(lambda p, t: jax.jvp(lambda x, w: inner(dot, x, w), p, t))
        return own(x, w) + dot(x, w)

    return fun


def forces(inner):
    energy = lambda dot, x, w: jnp.sum(inner(dot, x, w) ** 2) / N
    return lambda dot, x, w: x - jax.grad(energy, 1)(dot, x, w) / 4


def halves(inner):
    def fun(dot, x, w):
        one = lambda y: inner(dot, jnp.concatenate([y, y]), w)[:16]
        return jax.vmap(one)(x.reshape(2, 16, N)).reshape(N, N)

    return fun


def stages(inner):
    """Values that belong together cross the construct."""

    def fun(dot, x, w, wrap):
        h, total = wrap(lambda x, w: (h := dot(x, w) * 3, nn.logsumexp(h, -1, keepdims=True)))(x, w)
        return wrap(lambda h, total, x: dot(jnp.exp(h - total), w) + inner(dot, x, w))(h, total, x)

    return fun


def remat(policy):
    return lambda inner: lambda dot, x, w: jax.checkpoint(lambda x, w: inner(dot, x, w), policy=policy)(x, w)


WRAPS = {
    "jit": lambda inner: lambda dot, x, w: jax.jit(lambda x, w: inner(dot, x, w))(x, w),
    "jits": lambda inner: lambda dot, x, w: stages(inner)(dot, x, w, jax.jit),
    "remats": lambda inner: lambda dot, x, w: stages(inner)(dot, x, w, jax.checkpoint),
    **{f"remat {i}": remat(policy) for i, policy in enumerate(POLICIES)},
    "cond": branches,
    "switch": switched,
    "scan": stacked,
    "loop": lambda inner: lambda dot, x, w: lax.fori_loop(0, 2, lambda i, x: inner(dot, x, w), x),
    "map": lambda inner: lambda dot, x, w: lax.map(lambda y: inner(dot, y, w), jnp.stack([x, x.T])).mean(0),
    "vmap": halves,
    "custom_vjp": with_rule,
    "custom_jvp": with_tangent,
    "forces": forces,
}


def program(seed):
    """A program, and the names of what it is composed of."""
    rng = random.Random(seed)

    def sequence(length, depth):
        parts = [part(depth) for _ in range(length)]

        def fun(dot, x, w):
            for inner, _ in parts:
                x = inner(dot, x, w)
                x = x / (1 + jnp.sqrt(jnp.mean(x * x)))
            return x

        return fun, [name for _, name in parts]

    def part(depth):
        if depth and rng.random() < 0.5:
            name = rng.choice(sorted(WRAPS))
            inner, names = sequence(rng.randint(1, 2), depth - 1)
            return WRAPS[name](inner), {name: names}
        name = rng.choice(sorted(LEAVES))
        return LEAVES[name], name

    return sequence(rng.randint(2, 4), 2)


def by_operation(fun, *args):
    """Evaluate a function one operation at a time, also in loops, so that XLA fuses none and leaves no rounding out."""
    closed = jax.make_jaxpr(fun)(*args)
    return evaluate(closed.jaxpr, closed.consts, args)


def evaluate(jaxpr, consts, args, operation=None):
    operation = operation or evaluated
    literal = lambda v: isinstance(v, jax.extend.core.Literal)
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    for eqn in jaxpr.eqns:
        found = operation(eqn, [v.val if literal(v) else env[v] for v in eqn.invars])
        env.update(zip(eqn.outvars, found, strict=True))
    return [v.val if literal(v) else env[v] for v in jaxpr.outvars]


def evaluated(eqn, args):
    """The results of an operation, one by one also inside of constructs."""
    params, name = params_of(eqn), eqn.primitive.name
    inner = lambda body, *args: evaluate(getattr(body, "jaxpr", body), getattr(body, "consts", ()), args)
    if name == "scan":
        n, m = carried(eqn).start, carried(eqn).stop
        carry, steps = args[n:m], []
        for i in range(params["length"])[:: -1 if params["reverse"] else 1]:
            found = inner(params["jaxpr"], *args[:n], *carry, *(x[i] for x in args[m:]))
            carry = found[: m - n]
            steps.append(found[m - n :])
        steps = steps[:: -1 if params["reverse"] else 1]
        return [*carry, *(jnp.stack(xs) for xs in zip(*steps, strict=True))]
    if name == "while":
        n, m = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        carry = args[m:]
        while inner(params["cond_jaxpr"], *args[:n], *carry)[0]:
            carry = inner(params["body_jaxpr"], *args[n:m], *carry)
        return carry
    if name == "cond":
        return inner(params["branches"][int(np.clip(args[0], 0, len(params["branches"]) - 1))], *args[1:])
    for key in ("jaxpr", "call_jaxpr"):
        if key in params:
            return inner(params[key], *args)
    if name == "dot_general" and all(x.dtype == jnp.float32 for x in args) and jax.config.read("jax_enable_x64"):
        # As sums of 16-bit numbers in float32, they do not depend on the order.
        params = {**params, "preferred_element_type": np.dtype(np.float64)}
        return [eqn.primitive.bind(*(x.astype(jnp.float64) for x in args), **params).astype(jnp.float32)]
    found = eqn.primitive.bind(*args, **eqn.params)
    return found if eqn.primitive.multiple_results else [found]
