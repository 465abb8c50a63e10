"""FlowJAX: a coupling flow in `fit_to_data`, and in `flowjax.train.step`, with the checkpoints of Equinox."""

import tempfile
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import paramax
from flowjax.distributions import Normal
from flowjax.flows import coupling_flow
from flowjax.train import fit_to_data, step
from flowjax.train.losses import MaximumLikelihoodLoss

import jamp
from tests.clients.data import line_batches

MARGIN = 0.005
IMPOSSIBLE = {"bfloat16 parameters": "eqx.apply_updates makes the parameters float32"}
DIM = 8
DATA = np.concatenate([np.column_stack(batch) for batch in line_batches(2, width=DIM - 1)])


def make_flow(dtype=jnp.float32):
    key, base = jax.random.key(0), Normal(jnp.zeros(DIM))
    flow = coupling_flow(key, base_dist=base, flow_layers=4, nn_width=256, nn_depth=2)
    return jamp.cast_floating(flow, dtype)


def of_way(way):
    loss_fn, tx = MaximumLikelihoodLoss(), optax.adam(2e-4)
    if way == "float16":
        loss_fn = jamp.scaled(jamp.autocast(loss_fn, jnp.float16))
        tx = jamp.loss_scaled(tx, jamp.StaticLossScale(1.0))
    elif way == "bfloat16":
        loss_fn = jamp.autocast(loss_fn, jnp.bfloat16)
    elif way == "8 bit":
        loss_fn = jamp.autocast(loss_fn, jamp.Float8())
    return loss_fn, tx


def train(way):
    """One batch an epoch, because FlowJAX averages the loss over an epoch."""
    loss_fn, tx = of_way(way)
    _, losses = fit_to_data(
        jax.random.key(1),
        make_flow(),
        DATA,
        loss_fn=loss_fn,
        optimizer=tx,
        max_patience=100,
        val_prop=0.25,
        batch_size=len(DATA),
        show_progress=False,
    )
    return losses["train"]


class Run:
    """A loop around FlowJAX's `step`, because `fit_to_data` keeps the state of the optimizer to itself."""

    def __init__(self):
        self.loss_fn, self.tx = of_way("float16")
        frozen = lambda leaf: isinstance(leaf, paramax.NonTrainable)
        self.params, self.static = eqx.partition(make_flow(), eqx.is_inexact_array, is_leaf=frozen)
        self.opt_state = self.tx.init(self.params)

    def step(self, factor=1.0):
        self.params, self.opt_state, _ = step(
            self.params, self.static, factor * DATA, optimizer=self.tx, opt_state=self.opt_state, loss_fn=self.loss_fn
        )


def overflow():
    run = Run()
    run.step()
    before = run.params, run.opt_state.inner_state
    run.step(np.inf)
    return before, (run.params, run.opt_state.inner_state), jamp.metrics(run.opt_state)["overflow_steps"]


def checkpoint():
    run, other = Run(), Run()
    for _ in range(3):
        run.step()
    with tempfile.TemporaryDirectory() as folder:
        eqx.tree_serialise_leaves(Path(folder) / "state.eqx", (run.params, run.opt_state))
        like = other.params, other.opt_state
        other.params, other.opt_state = eqx.tree_deserialise_leaves(Path(folder) / "state.eqx", like)
    for _ in range(3):
        run.step(), other.step()
    return (run.params, run.opt_state), (other.params, other.opt_state)


def metrics():
    run = Run()
    for factor in (1.0, np.inf, 1.0):
        run.step(factor)
    return jamp.metrics(run.opt_state)  # FlowJAX has no loggers: what you hand to yours
