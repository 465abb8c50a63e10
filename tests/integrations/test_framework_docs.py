"""The examples print what they say, and a missing framework is named with its extra."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jamp

ROOT = Path(__file__).resolve().parents[2]


def run(*args):
    """Python in a process of its own, with the jamp that the tests import, be it a checkout or an installed wheel."""
    path = os.pathsep.join([str(Path(jamp.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": path}
    done = subprocess.run([sys.executable, *args], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done


EXAMPLES = {
    "nnx_resnet.py": (["--steps", "12"], r"1 of 12 steps skipped; BatchNorm's statistics are finite\.\n[\d.]+% of the"),
    "equinox_mlp.py": (["--steps", "3"], r"training loss  skipped\nfloat32 .* 0\nautocast +[\d.]+% +\S+ +\d"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_trains_with_a_progress_bar_and_says_how_it_went(name):
    args, said = EXAMPLES[name]
    done = run(f"examples/{name}", *args)
    assert re.search(said, done.stdout), done.stdout
    assert re.search(r"100%.*loss=\S+, scale=2\*\*\d+, skipped=\d+]", done.stderr)


def test_a_missing_package_is_an_error_that_names_the_extra():
    code = """
import sys
sys.modules.update(flax=None, equinox=None)
for name, extra in {"linen": "flax", "nnx": "flax", "equinox": "equinox"}.items():
    try:
        __import__(f"jamp.{name}")
    except ImportError as error:
        assert f"pip install 'jax-amp[{extra}]'" in str(error), error
    else:
        raise AssertionError(name)
"""
    run("-c", code)
