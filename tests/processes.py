"""Python programs in processes of their own, which import the jamp that is tested, be it a checkout or a wheel."""

import os
import subprocess
import sys
from pathlib import Path

import jamp


def environment(**variables):
    """The environment of a subprocess. `XLA_FLAGS` are added to those of the tests."""
    paths = [str(Path(jamp.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), **variables}
    if "XLA_FLAGS" in variables:
        variables["XLA_FLAGS"] = f"{os.environ['XLA_FLAGS']} {variables['XLA_FLAGS']}"
    return {k: v for k, v in os.environ.items() if k != "PYTEST_ADDOPTS"} | variables


def run_python(*args, **variables):
    """What a Python program prints: `run_python("-c", code)`. It must end well, and give no warning."""
    command = [sys.executable, "-W", "error", *map(str, args)]
    done = subprocess.run(command, env=environment(**variables), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
