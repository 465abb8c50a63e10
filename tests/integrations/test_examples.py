"""examples/: each is run as a newcomer runs it, in a process of its own, and does what its docstring says."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import matplotlib.image
import pytest

import jamp

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
NAMES = ["float32", "float16, unscaled", "float16 with jamp"]
ROW = re.compile(r"^(float\d+\S*(?: \S+)*?) {2,}([\d.]+)% +(\S+) +((?:[\d.]+% +)+)(\d+) +2\*\*(\d+)$", re.MULTILINE)


class Row(NamedTuple):
    accuracy: float  # percent
    loss: float
    zeros: list[float]  # percent, after each quarter of training
    skipped: int
    exponent: int  # of the final loss scale


def run_digits(out, *args):
    """The rows of its table by name, and its progress bars."""
    # The jamp that the tests import, be it a checkout or an installed wheel.
    paths = [str(Path(jamp.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "examples/digits.py", *args, "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    rows = {
        name: Row(float(accuracy), float(loss), [float(z.rstrip("%")) for z in zeros.split()], int(skipped), int(scale))
        for name, accuracy, loss, zeros, skipped, scale in ROW.findall(done.stdout)
    }
    assert list(rows) == NAMES, done.stdout
    return rows, done.stderr


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_has_at_most_150_lines(name):
    assert len((ROOT / "examples" / name).read_text().splitlines()) <= 150


def test_digits_shows_progress_and_makes_a_table_and_a_picture(tmp_path):
    rows, progress = run_digits(tmp_path / "new" / "folder", "--steps", "8")
    for row in rows.values():
        assert 10 < row.accuracy <= 100
        assert 0 < row.loss < 2.5
        assert len(row.zeros) == 4
        assert all(0 <= zero <= 100 for zero in row.zeros)
    for name in NAMES:
        assert re.search(rf"{name}: 100%.* 8/8 .*loss=\S+, scale=2\*\*\d+, skipped=0]", progress)
    assert matplotlib.image.imread(tmp_path / "new" / "folder" / "digits.png").shape[:2] == (600, 800)


@pytest.mark.slow
def test_digits_stops_after_the_epochs_when_there_are_fewer_than_steps(tmp_path):
    _, progress = run_digits(tmp_path, "--epochs", "2", "--steps", "3")
    for name in NAMES:
        assert re.search(rf"{name}: 100%.* 2/2 ", progress)


@pytest.mark.slow
def test_digits_in_float16_with_jamp_is_within_half_a_point_of_float32_and_without_it_most_gradients_vanish(tmp_path):
    rows, progress = run_digits(tmp_path)
    assert progress.count(" 2000/2000 ") >= len(NAMES)
    float32, unscaled, scaled = (rows[name] for name in NAMES)
    assert abs(scaled.accuracy - float32.accuracy) <= 0.5
    # "Without loss scaling most gradients vanish in the end, and the training loss stalls several times higher."
    assert unscaled.zeros[0] < unscaled.zeros[-1]
    assert unscaled.zeros[-1] > 60
    assert unscaled.loss > 3 * float32.loss
    # "The test accuracy hardly notices."
    assert abs(unscaled.accuracy - float32.accuracy) <= 1
    # "With jamp nearly no gradient vanishes, and the training loss is float32's."
    assert max(scaled.zeros) < 2
    assert scaled.loss < 1.5 * float32.loss
    # The scale follows the shrinking gradients until they overflow.
    assert scaled.exponent > 24
    assert 1 <= scaled.skipped <= 100
    assert (float32.skipped, unscaled.skipped) == (0, 0)
