"""NumPyro: a variational autoencoder with Flax networks in `SVI`, as in its example, with an Orbax checkpoint."""

import tempfile
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import orbax.checkpoint as ocp
from numpyro.contrib.module import flax_module
from numpyro.infer import SVI, Trace_ELBO

import jamp
from tests.clients.data import text_batches

MARGIN = 0.002
LATENT, WIDTH = 32, 256
BATCHES = [np.unpackbits(text.astype(np.uint8), axis=1) for text in text_batches(100, batch=256, length=15)]


class Encoder(nn.Module):
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        x = nn.softplus(nn.Dense(WIDTH, dtype=self.dtype)(x))
        x = nn.softplus(nn.Dense(WIDTH, dtype=self.dtype)(x))
        return nn.Dense(LATENT, dtype=self.dtype)(x), jnp.exp(nn.Dense(LATENT, dtype=self.dtype)(x))


class Decoder(nn.Module):
    dtype: Any = None

    @nn.compact
    def __call__(self, z):
        z = nn.softplus(nn.Dense(WIDTH, dtype=self.dtype)(z))
        z = nn.softplus(nn.Dense(WIDTH, dtype=self.dtype)(z))
        return nn.Dense(128, dtype=self.dtype)(z)


def model(bits, weight, dtype=None):
    decode = flax_module("decoder", Decoder(dtype), input_shape=(1, LATENT))
    with numpyro.plate("batch", len(bits)), numpyro.handlers.scale(scale=weight):
        z = numpyro.sample("z", dist.Normal(jnp.zeros(LATENT), 1).to_event(1))
        numpyro.sample("bits", dist.Bernoulli(logits=decode(z)).to_event(1), obs=bits)


def guide(bits, weight, dtype=None):
    encode = flax_module("encoder", Encoder(dtype), input_shape=(1, 128))
    loc, scale = encode(bits.astype(jnp.float32))
    with numpyro.plate("batch", len(bits)), numpyro.handlers.scale(scale=weight):
        numpyro.sample("z", dist.Normal(loc, scale).to_event(1))


class Run:
    def __init__(self, way):
        elbo, tx, dtype = Trace_ELBO(), optax.adam(1e-3), jnp.float32
        if way == "float16":
            elbo.loss = jamp.scaled(jamp.autocast(elbo.loss, jnp.float16))
            tx = jamp.skip_nonfinite(tx)
        elif way == "bfloat16":
            elbo.loss = jamp.autocast(elbo.loss, jnp.bfloat16)
        elif way == "8 bit":
            elbo.loss = jamp.autocast(elbo.loss, jamp.Float8())
        elif way == "bfloat16 parameters":
            tx, dtype = jamp.stochastic_rounding(tx), jnp.bfloat16
        self.svi = SVI(model, guide, tx, elbo)
        self.state = self.svi.init(jax.random.PRNGKey(0), BATCHES[0], 1.0)
        if dtype == jnp.bfloat16:
            params = jamp.cast_floating(self.svi.get_params(self.state), dtype)
            self.state = self.svi.init(jax.random.PRNGKey(0), BATCHES[0], 1.0, init_params=params)
        self.update = jax.jit(self.svi.update)

    def step(self, i, weight=1.0):
        self.state, loss = self.update(self.state, BATCHES[i], weight)
        return float(loss) / len(BATCHES[i])

    def saved(self):
        """The parameters and Adam's state."""
        _, (params, opt_state) = self.state.optim_state
        return params, opt_state.inner_state


def train(way):
    run = Run(way)
    return [run.step(i) for i in range(100)]


def overflow():
    run = Run("float16")
    run.step(0)
    before = run.saved()
    run.step(1, np.inf)
    return before, run.saved(), jamp.metrics(run.state)["overflow_steps"]


def checkpoint():
    run, other = Run("float16"), Run("float16")
    for i in range(3):
        run.step(i)
    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(Path(folder) / "state", run.state)  # NumPyro has no checkpoints of its own
        checkpointer.wait_until_finished()
        other.state = checkpointer.restore(Path(folder) / "state", other.state)
    for i in range(3, 6):
        run.step(i), other.step(i)
    return run.state, other.state


def metrics():
    run = Run("float16")
    for i in range(3):
        run.step(i, np.inf if i == 1 else 1.0)
    return jamp.metrics(run.state)  # NumPyro has no loggers: what you hand to yours


def reported():
    run, bits = Run("float32"), np.concatenate(BATCHES)
    params, loss = run.svi.get_params(run.state), run.svi.loss.loss
    of = lambda dtype: lambda params: loss(jax.random.PRNGKey(0), params, model, guide, bits, 1.0, dtype=dtype)
    return {"float32": (params, of(None)), "bfloat16": (params, of(jnp.bfloat16))}
