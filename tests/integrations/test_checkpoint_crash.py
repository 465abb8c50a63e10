"""A training process that is killed twenty times ends with the bits of an undisturbed one."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import jamp

STEPS, KILLS = 160, 20
LOSS_SCALE = jamp.DynamicLossScale(growth_interval=5, hysteresis=2)


def get_batch(step):
    x = np.random.default_rng(step).normal(size=(8, 16)).astype(np.float32)
    return np.full_like(x, np.inf) if step % 7 == 3 else x


def train(folder):
    """Train to the last step from the last checkpoint in `folder`, if any. Each step is announced."""
    tx = jamp.loss_scaled(optax.adam(1e-2), LOSS_SCALE)

    def loss_fn(params, x):
        x, params = jamp.cast_floating((x, params), jnp.float16)
        return jnp.mean((jnp.tanh(x @ params["in"]) @ params["out"] - 1).astype(jnp.float32) ** 2)

    @jax.jit
    def train_step(run, x):
        grads = jamp.grad(loss_fn, run["opt_state"])(run["params"], x)
        updates, opt_state = tx.update(grads, run["opt_state"], run["params"])
        return {"params": optax.apply_updates(run["params"], updates), "opt_state": opt_state}

    params = {"in": jnp.linspace(-1.0, 1.0, 256).reshape(16, 16), "out": jnp.ones((16, 1))}
    run = {"params": params, "opt_state": tx.init(params)}
    with ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(max_to_keep=2)) as manager:
        first = manager.latest_step() or 0
        if first:
            run = manager.restore(first, args=ocp.args.StandardRestore(run))
        for step in range(first + 1, STEPS + 1):
            run = train_step(run, get_batch(step))
            if step % 3 == 0:
                manager.save(step, args=ocp.args.StandardSave(run))  # in the background
            print(step, flush=True)
    np.savez(folder.with_suffix(".npz"), **{jax.tree_util.keystr(p): x for p, x in jax.tree.leaves_with_path(run)})


def process(folder):
    paths = os.pathsep.join([str(Path(jamp.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "error", __file__, str(folder)]
    return subprocess.Popen(command, env=os.environ | {"PYTHONPATH": paths}, stdout=subprocess.PIPE, text=True)


def last_state(folder):
    with process(folder) as child:
        child.stdout.read()
    assert child.returncode == 0
    with np.load(folder.with_suffix(".npz")) as saved:
        return {name: (x.dtype, x.tobytes()) for name, x in saved.items()}


@pytest.mark.slow
def test_killed_at_random_steps_twenty_times_and_resumed_the_training_ends_with_the_same_bits(tmp_path):
    seed = random.SystemRandom().randrange(10**6)
    rng, began = random.Random(seed), []
    for _ in range(KILLS):
        with process(tmp_path / "killed") as child:
            began.append(int(child.stdout.readline()))
            for _ in range(rng.randrange(4, 11)):
                child.stdout.readline()
            time.sleep(rng.uniform(0, 0.1))  # anywhere in a step or in the save behind it
            child.send_signal(signal.SIGKILL)
        assert child.returncode == -signal.SIGKILL, f"{seed=}"
    assert len(set(began)) > KILLS // 2, f"{seed=}: it hardly went on from one life to the next, {began}"
    assert last_state(tmp_path / "killed") == last_state(tmp_path / "undisturbed"), f"{seed=} {began}"


if __name__ == "__main__":
    train(Path(sys.argv[1]))
