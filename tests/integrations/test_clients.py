"""The recipes that `python -m tests.clients` runs have the lines of their pages."""

import re
import sys

import jax.numpy as jnp
import pytest
from flax import nnx
from pages import PAGES, ROOT

import jamp
from tests.clients.__main__ import CLIENTS, python_of
from tests.clients.recipes import flax_example

SECTIONS = {  # the section of docs/frameworks with the lines of each recipe
    "flax_example": "Flax's MNIST tutorial",
    "numpyro": "NumPyro",
    "tunix": "Tunix",
    "tunix_grpo": "Tunix GRPO",
    "levanter": "Levanter",
    "maxtext": "MaxText",
}


def test_every_client_has_a_section():
    assert SECTIONS.keys() == CLIENTS.keys()


@pytest.mark.parametrize("name", SECTIONS)
def test_a_recipe_has_the_lines_that_its_section_adds(name):
    pages = "".join(text for page, text in PAGES.items() if page.startswith("frameworks/"))
    [section] = re.findall(rf"^## {SECTIONS[name]}\n(.*?)(?=^## |\Z)", pages, re.MULTILINE | re.DOTALL)
    diffs = re.findall(r"^```diff\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    recipe = (ROOT / "tests" / "clients" / "recipes" / f"{name}.py").read_text()
    added = [line[1:].strip() for diff in diffs for line in diff.splitlines() if line[0] == "+"]
    added = [line for line in added if "rules=" not in line]  # `judge.py` has the rule, for all recipes
    assert len(added) > 2
    assert not [line for line in added if line not in recipe]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_tutorial_of_flax_has_no_lint(dtype):
    batch = {"image": flax_example.IMAGES[:128], "label": flax_example.LABELS[:128]}
    report = jamp.autocast_report(flax_example.loss_fn, dtype)(flax_example.CNN(rngs=nnx.Rngs(0)), nnx.Rngs(1), batch)
    assert report.lints == ()


def test_a_python_that_only_prints_an_error_is_not_taken_for_one_that_is_there(tmp_path, monkeypatch):
    shim = tmp_path / "python3.12"  # what pyenv puts on the path for each version of which any other is the default
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    assert python_of({"python": "3.12"}) is None
    assert python_of({}) == sys.executable
    works = tmp_path / "pyenv" / "versions" / "3.12.1" / "bin" / "python"
    works.parent.mkdir(parents=True)
    works.symlink_to(sys.executable)
    assert python_of({"python": "3.12"}) == str(works)
