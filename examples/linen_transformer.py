"""Train a small language model in float16 that resumes after a crash, with Flax Linen and Orbax checkpoints.

A decoder-only transformer learns to predict the next byte of Python's own standard library. Its modules compute in
float16 (`dtype=`) and keep float32 parameters. Every 50 steps the program saves the whole `jamp.linen.TrainState`:
parameters, optimizer state, loss scale and counts. If you kill it and start it again with `--resume`, it ends with the
same parameters as an undisturbed run, bit for bit.

    pip install '.[examples,flax]'
    python examples/linen_transformer.py                        # about a minute on two cores
    python examples/linen_transformer.py --resume --steps 2000  # continue
    python examples/linen_transformer.py --out out/logged --logdir out/tensorboard

It draws out/linen_transformer.png. For a short run, the scale here may grow every 40 steps and has no ceiling. It rises
until a gradient overflows. That step is skipped, and the scale is halved. In a long run, keep the defaults.
"""

import argparse
import contextlib
import importlib
import math
import os
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from matplotlib.figure import Figure
from tqdm import trange

import jamp.linen

CONTEXT, BATCH, SAVE_EVERY = 64, 16, 50
LOSS_SCALE = jamp.DynamicLossScale(growth_interval=40, max_scale=math.inf)


class Transformer(nn.Module):
    layers: int = 2
    width: int = 128

    @nn.compact
    def __call__(self, tokens):
        half, width = {"dtype": jnp.float16}, self.width  # compute in float16; the parameters are float32
        x = nn.Embed(256, width, **half)(tokens) + nn.Embed(CONTEXT, width, **half)(jnp.arange(CONTEXT))
        for _ in range(self.layers):
            attend = nn.MultiHeadDotProductAttention(num_heads=4, force_fp32_for_softmax=True, **half)
            x = x + attend(nn.LayerNorm(**half)(x), mask=nn.make_causal_mask(tokens))
            x = x + nn.Dense(width, **half)(nn.gelu(nn.Dense(4 * width, **half)(nn.LayerNorm(**half)(x))))
        # The loss is float32, because the scaled loss would exceed 65504, the largest float16.
        return nn.Dense(256, **half)(nn.LayerNorm(**half)(x)).astype(jnp.float32)


def read_text():
    """About 2 MB of Python's standard library, uint8[n]. Every machine has this text."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    return np.frombuffer(b"\n".join(file.read_bytes() for file in files)[:2_000_000], np.uint8)


def get_batch(text, index):
    """Make batch number `index`, i32[BATCH, CONTEXT + 1]. A resumed run gets the same batches."""
    starts = np.random.default_rng(index).integers(len(text) - CONTEXT, size=BATCH)
    return text[starts[:, None] + np.arange(CONTEXT + 1)].astype(np.int32)


def create_state():
    model = Transformer()
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, CONTEXT), jnp.int32))["params"]
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.warmup_constant_schedule(0.0, 1e-3, 50)))
    return jamp.linen.TrainState.create(apply_fn=model.apply, params=params, tx=tx, loss_scale=LOSS_SCALE)


@jax.jit
def train_step(state, tokens):
    def loss_fn(params):
        logits = state.apply_fn({"params": params}, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    scale = jamp.get_loss_scale(state)
    loss, grads = state.value_and_grad(loss_fn)(state.params)  # the true loss, true float32 gradients
    state = state.apply_gradients(grads=grads)  # on an overflow only the loss scale changes
    return state, {**state.metrics(), "loss": loss, "loss_scale": scale}


def restore(manager, state):
    """Return the state of the last checkpoint and the history of its run."""
    about = manager.restore(manager.latest_step(), args=ocp.args.Composite(about=ocp.args.JsonRestore())).about
    jamp.interop.check_checkpoint_config(about["config"], state, LOSS_SCALE)  # Orbax would cast other dtypes silently
    restored = manager.restore(manager.latest_step(), args=ocp.args.Composite(state=ocp.args.StandardRestore(state)))
    return restored.state, about["history"]


def save(manager, step, state, history):
    about = {"config": jamp.interop.checkpoint_config(state, LOSS_SCALE), "history": history}
    # Orbax writes in the background. An incomplete checkpoint has a temporary name.
    manager.save(step, args=ocp.args.Composite(state=ocp.args.StandardSave(state), about=ocp.args.JsonSave(about)))


def draw(history, path):
    loss, scale, finite = np.transpose(history)
    steps, skipped = np.arange(1, len(loss) + 1), np.flatnonzero(finite == 0)
    figure = Figure(figsize=(8, 6), layout="constrained")
    top, bottom = figure.subplots(2, sharex=True)
    top.plot(steps, loss / math.log(2), color="C0")
    top.set(ylabel="loss (bits per byte)", title="A float16 transformer reads Python's standard library")
    bottom.semilogy(steps, scale, base=2, color="C0")
    bottom.plot(steps[skipped], scale[skipped], "rx", label=f"overflow, step skipped ({len(skipped)} times)")
    bottom.set(xlabel="step", ylabel="loss scale")
    bottom.legend(loc="lower right")
    figure.savefig(path)


def main():
    parser = argparse.ArgumentParser(description="A float16 language model that resumes after a crash.")
    parser.add_argument("--steps", type=int, default=1000, help="the number of the last step")
    parser.add_argument("--resume", action="store_true", help="resume from the last checkpoint in --out, if any")
    parser.add_argument("--out", type=Path, default=Path("out"), help="the folder for checkpoints and the picture")
    parser.add_argument("--logdir", help="a folder for TensorBoard scalars")
    args = parser.parse_args()
    log = importlib.import_module("tensorboardX").SummaryWriter(args.logdir) if args.logdir else None
    folder, options = args.out.resolve() / "checkpoints", ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager(folder, options=options) as manager, log or contextlib.nullcontext():
        if manager.latest_step() is not None and not args.resume:
            parser.error(f"{folder} has checkpoints: go on with --resume, or choose another --out.")
        state, history, text = create_state(), [], read_text()
        if manager.latest_step() is not None:
            state, history = restore(manager, state)
        pending = []  # the metrics since the last checkpoint, on the device to avoid waiting
        for step in (bar := trange(len(history) + 1, args.steps + 1, initial=len(history), total=args.steps)):
            state, measured = train_step(state, get_batch(text, step))
            pending.append(measured)
            if step % 10 == 0 or step == args.steps:
                bits, scale = measured["loss"] / math.log(2), f"2**{math.log2(measured['loss_scale']):g}"
                bar.set_postfix(loss=f"{bits:.2f} bits", scale=scale, skipped=int(measured["overflow_steps"]))
            if step % SAVE_EVERY == 0 or step == args.steps:
                rows, pending = jax.device_get(pending), []
                for index, row in enumerate(rows, len(history) + 1):
                    for name, value in row.items() if log else ():
                        log.add_scalar(name, float(value), index)
                history += [[float(row[name]) for name in ("loss", "loss_scale", "grads_finite")] for row in rows]
                save(manager, step, state, history)
    draw(history, args.out / "linen_transformer.png")
    bits, skipped = np.mean([loss for loss, *_ in history[-20:]]) / math.log(2), jamp.get_stats(state).overflow_steps
    print(f"{len(history)} steps, {skipped} skipped: {bits:.2f} bits per byte.")
    print(f"The curves are in {args.out / 'linen_transformer.png'}.")


if __name__ == "__main__":
    main()
