"""Run the matrix products of a plain-JAX, a Linen, an NNX and an Equinox model in 16 bit, with the same change.

    pip install '.[flax,equinox]'
    python examples/autocast_any_model.py

Each model is written for float32 and stays unchanged. Each trains for a few steps on the same toy problem in float32
and under autocast. At the end the program prints the autocast report of the plain-JAX model.
"""

import argparse

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jamp

WIDTH = 64
X = jax.random.normal(jax.random.key(0), (256, 8))
Y = jnp.sin(X.sum(-1, keepdims=True))


def plain_jax():
    keys = jax.random.split(jax.random.key(1), 2)
    params = {
        "w1": jax.random.normal(keys[0], (8, WIDTH)) * 8**-0.5,
        "b1": jnp.zeros(WIDTH),
        "scale": jnp.ones(WIDTH),
        "w2": jax.random.normal(keys[1], (WIDTH, 1)) * WIDTH**-0.5,
    }

    def loss(params, x, y):
        h = x @ params["w1"] + params["b1"]
        h = (h - h.mean(-1, keepdims=True)) * jax.lax.rsqrt(h.var(-1, keepdims=True) + 1e-6) * params["scale"]
        return jnp.mean((jax.nn.gelu(h) @ params["w2"] - y) ** 2)

    return params, loss


def linen():
    model = nn.Sequential([nn.Dense(WIDTH), nn.LayerNorm(), nn.gelu, nn.Dense(1)])
    params = model.init(jax.random.key(1), X)
    return params, lambda params, x, y: jnp.mean((model.apply(params, x) - y) ** 2)


def nnx_module():
    rngs = nnx.Rngs(1)
    model = nnx.Sequential(
        nnx.Linear(8, WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs), nnx.gelu, nnx.Linear(WIDTH, 1, rngs=rngs)
    )
    graph, params = nnx.split(model)
    return params, lambda params, x, y: jnp.mean((nnx.merge(graph, params)(x) - y) ** 2)


def equinox():
    model = eqx.nn.MLP(8, 1, WIDTH, 1, activation=jax.nn.gelu, key=jax.random.key(1))
    params, static = eqx.partition(model, eqx.is_array)
    return params, lambda params, x, y: jnp.mean((jax.vmap(eqx.combine(params, static))(x) - y) ** 2)


def train(params, loss_fn, steps):
    tx = optax.adam(1e-2)

    @jax.jit
    def train_step(params, opt_state):
        loss, grads = jax.value_and_grad(loss_fn)(params, X, Y)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state = tx.init(params)
    for _ in range(steps):
        params, opt_state, loss = train_step(params, opt_state)
    return float(loss)


def train_16_bit(params, loss_fn, steps):
    tx = jamp.loss_scaled(optax.adam(1e-2))  # 1. skips a step that overflows
    loss_fn = jamp.autocast(loss_fn, jnp.float16)  # 2. float16 products

    @jax.jit
    def train_step(params, opt_state):
        loss, grads = jamp.value_and_grad(loss_fn, opt_state)(params, X, Y)  # 3. the loss is scaled inside
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state = tx.init(params)
    for _ in range(steps):
        params, opt_state, loss = train_step(params, opt_state)
    return float(loss)


def main():
    parser = argparse.ArgumentParser(description="Four frameworks in 16 bit, with the same change.")
    parser.add_argument("--steps", type=int, default=20, help="steps of each run")
    steps = parser.parse_args().steps
    print(f"loss after {steps:2} steps  float32  float16 products  FLOPs in 16 bit")
    for make in (plain_jax, linen, nnx_module, equinox):
        params, loss_fn = make()
        share = jamp.autocast_report(jax.grad(loss_fn), jnp.float16)(params, X, Y).share_16_bit
        losses = train(params, loss_fn, steps), train_16_bit(params, loss_fn, steps)
        print(f"{make.__name__:19s}  {losses[0]:9.4f}  {losses[1]:16.4f}  {share:15.1%}")
    params, loss_fn = plain_jax()
    print()
    print(jamp.autocast_report(loss_fn, jnp.float16)(params, X, Y))


if __name__ == "__main__":
    main()
