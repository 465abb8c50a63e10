"""Type checkers see the types of the function that a transformation gets. mypy is in the extra `dev`."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

START = """
from typing import Any
import jax, jax.numpy as jnp, optax, jamp

def loss_fn(params: list[int], scale: float = 1.0) -> str: return ""
def with_aux(params: int) -> tuple[str, int]: return "", 1
@jamp.autocast(jnp.bfloat16, rules={"tanh": "float32"})
def decorated(params: int) -> str: return ""
@jamp.autocast("bfloat16", memory_budget="2GiB")
def by_name(params: int) -> str: return ""
state: Any = None
"""
LOSS, SMALL = "def (params: list[int], scale: float =) -> ", "def (params: int) -> "
# An expression, and its type or the code of the error.
TYPES = {
    "decorated": SMALL + "str",
    "by_name": SMALL + "str",
    "jamp.autocast(jamp.Float8())(loss_fn)": LOSS + "str",
    'jamp.autocast(loss_fn, "bfloat16", recompute=False)': LOSS + "str",
    "jamp.recompute(loss_fn, 0.5)": LOSS + "str",
    "jamp.scaled(loss_fn)": LOSS + "str",
    "jamp.value_and_grad(loss_fn, state)": LOSS + "tuple[str, Any]",
    "jamp.value_and_grad(with_aux, state, has_aux=True)": SMALL + "tuple[tuple[str, int], Any]",
    "jamp.grad(loss_fn, state)": LOSS + "Any",
    "jamp.GradScaler().value_and_grad(loss_fn)": LOSS + "tuple[str, Any]",
    'jamp.value_and_grad(loss_fn, state)([], scale="no")': "[arg-type]",
    "jamp.autocast(loss_fn)": "[call-overload]",
    'jamp.autocast(loss_fn, dtype="bfloat16")': "[call-overload]",
}


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("mypy"), reason="mypy is not installed")
def test_a_transformed_function_keeps_its_types(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(START + "".join(f"reveal_type({expression})\n" for expression in TYPES))
    config = Path(__file__).parents[1] / "pyproject.toml"
    command = sys.executable, "-m", "mypy", "--config-file", config, "--follow-imports=silent", "--no-pretty", path
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    text = re.sub(r"\b(builtins|typing)\.|(?<= =) \.\.\.", "", found.stdout)
    first = START.count("\n") + 1
    for number, (expression, wanted) in enumerate(TYPES.items(), first):
        lines = [line for line in text.splitlines() if line.startswith(f"{path}:{number}:")]
        assert any(wanted in line for line in lines), (expression, lines, found.stderr)
    assert not [line for line in re.findall(r"program\.py:(\d+): error", text) if int(line) < first], text
