"""The pages of other people's trainers say what their recipes do: `python -m tests.clients` runs them."""

import json
import re
import sys

import pytest

from tests.clients.__main__ import python_of
from tests.clients.table import CLIENTS, DOCS, INDEX, RECORDED, ROWS, WAYS, added, table

RESULTS = json.loads(RECORDED.read_text())
RECIPES = DOCS.parent / "tests" / "clients" / "recipes"


def test_the_table_is_that_of_the_results_and_has_every_client():
    assert RESULTS.keys() == CLIENTS.keys()
    assert ROWS.search(INDEX.read_text())[0] == table()


@pytest.mark.parametrize("name", CLIENTS)
def test_a_section_changes_at_most_ten_lines_which_its_recipe_runs(name):
    recipe = (RECIPES / f"{name}.py").read_text()
    assert 1 <= len(added(name)) <= 10
    missing = [line[1:].strip() for line in added(name) if line[0] == "+" and line[1:].strip() not in recipe]
    assert not missing, missing
    # The other ways are those of the table of docs/frameworks.md, with the client's own function in their place.
    rows = re.findall(rf"^\| ({'|'.join(WAYS)}) \| (.*?) \| (.*?) \|", INDEX.read_text(), re.MULTILINE)
    assert [way for way, *_ in rows] == list(WAYS)
    for way, *cells in rows[1:]:
        code = re.search(r"`(jamp\.[^`]*)`", " ".join(cells))[1]
        found = re.search(re.sub(r"loss_fn|\btx\b", ".+", re.escape(code)), recipe)
        assert found or way in RESULTS[name]["impossible"], (way, code)


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
