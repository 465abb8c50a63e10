"""examples/fsdp_transformer.py: on fake devices, and in real processes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jamp

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "fsdp_transformer.py"


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "processes"), [(8, 1), (4, 2)])
def test_it_learns_and_prints_speed_loss_scale_and_agreement(devices, processes):
    # Gloo prints from threads of its own, in pieces. Buffered, the example's lines come out whole.
    env = os.environ | {"PYTHONPATH": str(Path(jamp.__file__).parents[1]), "PYTHONUNBUFFERED": ""}
    options = ["--steps", "70", "--devices", devices, "--processes", processes]
    command = [sys.executable, "-W", "error", str(EXAMPLE), *map(str, options)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = re.search(
        r"(\d+) devices in (\d+) processes, ([\d,]+) tokens per second\n"
        r"loss ([\d.]+) -> ([\d.]+), loss scale 2\*\*(\d+)\n"
        r"(\d+) devices agreed on all 70 steps: (\d+) were skipped",
        done.stdout,
    )
    ours, jobs, _, first, last, exponent, agreed, skipped = found.groups()
    assert (int(ours), int(jobs), int(agreed)) == (devices, processes, devices)
    assert float(last) < 0.6 * float(first)
    assert 0 < int(skipped) < 10
    assert 16 < int(exponent) < 24
