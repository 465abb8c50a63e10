"""Kauldron: a regression with `kd.train.Trainer`, its Grain pipeline, checkpointer, metrics and writer."""

import dataclasses
import tempfile
from unittest import mock

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from kauldron import kd
from kauldron.train import metric_writer, train_step

import jamp
from tests.clients.data import line_batches

MARGIN = 0.03
NOTE = {"bfloat16 parameters": "other random initial parameters"}
DATA = [
    {"x": x, "y": np.float32(y[None])} for xs, ys in line_batches(100, batch=128) for x, y in zip(xs, ys, strict=True)
]


class Network(nn.Module):
    dtype: jnp.dtype
    x: kd.kontext.Key = "batch.x"

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = jax.nn.gelu(nn.Dense(128, param_dtype=self.dtype, dtype=jnp.float32)(x))
        return nn.Dense(1, param_dtype=self.dtype, dtype=jnp.float32)(x)


@dataclasses.dataclass(kw_only=True, eq=True, frozen=True)
class OptimizerMetric(kd.metrics.Metric):
    """One of `jamp.metrics`, of the optimizer state before the step."""

    name: str
    opt_state: kd.kontext.Key = "opt_state"

    @flax.struct.dataclass
    class State(kd.metrics.AutoState):
        value: jax.Array = kd.metrics.sum_field()

        def compute(self):
            return super().compute().value

    def get_state(self, opt_state):
        return self.State(value=jamp.metrics(opt_state)[self.name])


@dataclasses.dataclass(frozen=True, eq=True, kw_only=True)
class Recorder(metric_writer.KDMetricWriter):
    scalars: dict = dataclasses.field(default_factory=dict, compare=False)

    def write_scalars(self, step, scalars):
        for name, value in scalars.items():
            self.scalars.setdefault(name, []).append(float(value))
        super().write_scalars(step, scalars)


def make_trainer(way, steps, workdir, recorder=None, metrics=(), **config):
    tx, dtype, wrap = optax.adamw(1e-3), jnp.float32, lambda loss_fn: loss_fn
    if way == "float16":
        tx = jamp.loss_scaled(tx, jamp.StaticLossScale(1.0))
        wrap = lambda loss_fn: jamp.scaled(jamp.autocast(loss_fn, jnp.float16))
    elif way == "bfloat16":
        wrap = lambda loss_fn: jamp.autocast(loss_fn, jnp.bfloat16)
    elif way == "8 bit":
        wrap = lambda loss_fn: jamp.autocast(loss_fn, jamp.Float8())
    elif way == "bfloat16 parameters":
        tx, dtype = jamp.stochastic_rounding(tx), jnp.bfloat16

    class TrainStep(kd.train.TrainStep):  # Kauldron's has no argument for another loss function
        def _step(self, state, batch):
            with mock.patch.object(train_step, "forward_with_loss", wrap(kd.train.forward_with_loss)):
                return super()._step(state, batch)

    return kd.train.Trainer(
        workdir=workdir,
        train_ds=kd.data.py.DataSource(data_source=DATA, shuffle=False, batch_size=128, seed=0, num_workers=0),
        model=Network(dtype),
        optimizer=tx,
        train_losses={"l2": kd.losses.L2(preds="preds", targets="batch.y")},
        train_metrics={name: OptimizerMetric(name=name) for name in metrics},
        trainstep=TrainStep(),
        num_train_steps=1000,
        stop_after_steps=steps,
        log_metrics_every=1,
        profiler=None,
        writer=recorder or Recorder(),
        **config,
    )


def train(way):
    recorder = Recorder()
    with tempfile.TemporaryDirectory() as folder:
        make_trainer(way, 100, folder, recorder).train()
    return recorder.scalars["losses/l2"]


def overflow():
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer("float16", 1, folder)
    state, batch = trainer.init_state(), next(iter(trainer.train_ds))
    state, _ = trainer.trainstep.step(state, batch)
    before = jax.device_get((state.params, state.opt_state.inner_state))
    state, _ = trainer.trainstep.step(state, batch | {"x": np.full_like(batch["x"], np.inf)})
    return before, (state.params, state.opt_state.inner_state), jamp.metrics(state.opt_state)["overflow_steps"]


def checkpoint():
    def trained(steps, folder):
        checkpointer = kd.ckpts.Checkpointer(save_interval_steps=1)
        return make_trainer("float16", steps, folder, checkpointer=checkpointer).train()[0]

    with tempfile.TemporaryDirectory() as folder:
        undisturbed = trained(6, folder)
    with tempfile.TemporaryDirectory() as folder:
        trained(4, folder)
        continued = trained(6, folder)  # restores the last checkpoint, with the place in the data
    assert int(continued.step) == int(undisturbed.step) == 6
    return (undisturbed.params, undisturbed.opt_state), (continued.params, continued.opt_state)


def metrics():
    recorder, names = Recorder(), ("overflow_steps", "finite_steps")
    bad = [row | {"x": row["x"] + np.inf} if 128 <= i < 256 else row for i, row in enumerate(DATA)]
    with tempfile.TemporaryDirectory() as folder, mock.patch(f"{__name__}.DATA", bad):
        make_trainer("float16", 4, folder, recorder, names).train()
    return {name: recorder.scalars[f"metrics/{name}"][-1] for name in names}
