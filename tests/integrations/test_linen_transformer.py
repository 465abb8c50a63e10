"""examples/linen_transformer.py: it learns, shows what it does, and goes on after a SIGKILL with the same bits."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import matplotlib.image
import numpy as np
import orbax.checkpoint as ocp
import pytest

import jamp

ROOT = Path(__file__).resolve().parents[2]


def start(*args):
    # The jamp that the tests import, be it a checkout or an installed wheel.
    paths = os.pathsep.join([str(Path(jamp.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "error", "examples/linen_transformer.py", *map(str, args)]
    env = os.environ | {"PYTHONPATH": paths}
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(*args):
    with start(*args) as child:
        output, errors = child.communicate()
    assert child.returncode == 0, errors
    return output, errors


def last_checkpoint(out):
    """The bits of the train state, and the history."""
    with ocp.CheckpointManager(out / "checkpoints") as manager:
        args = ocp.args.Composite(state=ocp.args.StandardRestore(), about=ocp.args.JsonRestore())
        restored = manager.restore(manager.latest_step(), args=args)
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(restored.state)], restored.about["history"]


def test_it_shows_progress_and_makes_a_picture_and_tensorboard_scalars(tmp_path):
    output, progress = finish("--steps", 8, "--out", tmp_path, "--logdir", tmp_path / "logs")
    assert re.search(r"100%.* 8/8 .*loss=\S+, scale=2\*\*16, skipped=0]", progress)
    assert re.match(r"8 steps, 0 skipped: \d\.\d\d bits per byte.", output)
    assert matplotlib.image.imread(tmp_path / "linen_transformer.png").shape[:2] == (600, 800)
    (events,) = (tmp_path / "logs").iterdir()
    for name in (b"loss", b"loss_scale", b"overflow_steps", b"success_rate"):
        assert events.read_bytes().count(b"\x0a" + bytes([len(name)]) + name + b"\x15") == 8  # a float by this name


@pytest.mark.slow
def test_killed_and_resumed_it_ends_with_the_bits_of_an_undisturbed_run(tmp_path):
    delay = random.SystemRandom().uniform(0, 1.5)
    with start("--steps", 130, "--out", tmp_path / "killed") as child:
        while not (tmp_path / "killed" / "checkpoints" / "50").exists():
            assert child.poll() is None, child.communicate()[1]
            time.sleep(0.05)
        time.sleep(delay)
        child.send_signal(signal.SIGKILL)
        child.communicate()
    assert child.returncode == -signal.SIGKILL, f"{delay=}"
    with start("--out", tmp_path / "killed") as anew:  # which would mix two runs
        assert "go on with --resume" in anew.communicate()[1]
    assert anew.returncode == 2
    finish("--steps", 130, "--out", tmp_path / "killed", "--resume")
    finish("--steps", 130, "--out", tmp_path / "undisturbed")
    resumed, undisturbed = last_checkpoint(tmp_path / "killed"), last_checkpoint(tmp_path / "undisturbed")
    assert resumed == undisturbed, f"{delay=}"
    losses, scales, _ = np.transpose(undisturbed[1])
    assert len(losses) == 130
    assert np.log(256) < losses[0] < 1.5 * np.log(256)
    assert losses[-20:].mean() < 3
    assert scales[[0, 40, 80]].tolist() == [2.0**16, 2.0**17, 2.0**18]  # a growth every 40 steps
