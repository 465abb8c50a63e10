"""examples/notebooks, and the lines of findings in IPython, in a notebook, and in code that is typed or installed."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import environment, run_python

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "examples/notebooks").glob("*.ipynb"))

CELLS = [
    "import jax.numpy as jnp, jamp.debug",
    "def loss(w):\n    h = w @ w\n    return jnp.log(h - h).sum()\n",
    "print(jamp.debug.find_nonfinite(loss)(jnp.ones((4, 4))))",
    "def l2(w):\n    h = jnp.tanh(w @ w)\n    return jnp.sum(jnp.tanh(h @ w))\n",
    "print({x.source for x in jamp.debug.rounding_report(l2, 'bfloat16')(jnp.eye(64) / 3).rows if not x.backward})",
]
LINES = "  line    In[2]:3 (loss)", "In[4]:2 (l2)", "In[4]:3 (l2)"


@pytest.mark.slow
def test_in_ipython_a_line_is_that_of_a_cell():
    pytest.importorskip("IPython")
    command = [sys.executable, "-m", "IPython", "--simple-prompt", "--no-banner", "--colors=NoColor"]
    done = subprocess.run(
        command, input="\n".join([*CELLS[:3], "exit\n"]), env=environment(), capture_output=True, text=True, check=True
    )
    assert LINES[0] in done.stdout, done.stdout


@pytest.mark.slow
def test_in_a_notebook_a_line_is_that_of_a_cell(monkeypatch):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    nbclient.NotebookClient(notebook).execute()
    printed = "".join(output.get("text", "") for cell in notebook.cells for output in cell.outputs)
    assert not [line for line in LINES if line not in printed], printed


def outputs(book):
    """What each code cell shows, without the pictures: its kinds of output, and its text."""
    cells = [cell["outputs"] for cell in book["cells"] if cell["cell_type"] == "code"]
    kinds = [sorted({output.get("name", output["output_type"]) for output in cell}) for cell in cells]
    return kinds, ["".join(line for output in cell for line in output.get("text", [])) for cell in cells]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_an_example_notebook_runs_and_asserts_what_it_says(path, monkeypatch):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    monkeypatch.delenv("MPLBACKEND", raising=False)  # the pictures are part of it
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    saved_kinds, saved = outputs(notebook)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": path.parent}}).execute()
    kinds, printed = outputs(notebook)
    assert kinds == saved_kinds  # no warning, and the same pictures
    lines = lambda texts: [re.findall(r"In\[\d+\]:\d+", text) for text in texts]
    assert lines(printed) == lines(saved)


def test_the_notebooks_are_saved_as_run_in_order_without_paths_or_errors():
    assert [path.stem for path in NOTEBOOKS] == ["a_model_that_does_not_fit", "float16_without_bfloat16"]
    for path in NOTEBOOKS:
        book = json.loads(path.read_text())
        counts = [cell["execution_count"] for cell in book["cells"] if cell["cell_type"] == "code"]
        assert counts == list(range(1, len(counts) + 1))
        kinds, texts = outputs(book)
        assert {kind for cell in kinds for kind in cell} == {"stdout", "display_data"}  # no error, no warning
        assert not re.findall(r"(?<![\w.])(?:/\w[\w.-]*/\S*|[A-Z]:\\\S*)", "\n".join(texts))
        prose = "".join(line for cell in book["cells"] if cell["cell_type"] == "markdown" for line in cell["source"])
        assert not [link for link in re.findall(r"\]\(([^)#]+)", prose) if not (path.parent / link).exists()]
        assert path.stat().st_size < 150_000


@pytest.mark.slow
def test_code_of_a_command_line_has_lines():
    assert "  line    <string>:4 (loss)" in run_python("-c", "\n".join(CELLS[:3]))


@pytest.mark.slow
def test_a_line_in_packages_only_names_the_innermost_of_two_packages(tmp_path):
    """A model and its scan may both be installed, and run by `python -m`."""
    program, installed = tmp_path / "__start__.py", tmp_path / "site-packages"
    for name in ("stacked", "modelled"):
        (installed / name).mkdir(parents=True)
        (installed / name / "__init__.py").write_text("")
    (installed / "stacked/scan.py").write_text("def each(h):\n    return h - h.max() - h\n")
    model = (
        "import jax.numpy as jnp\nfrom stacked.scan import each\n\ndef loss(w):\n    return each(jnp.exp(w)).sum()\n"
    )
    (installed / "modelled/net.py").write_text(model)
    (installed / "modelled/__main__.py").write_text(
        "import jax.numpy as jnp, jamp.debug\nfrom modelled.net import loss\n"
        "found = jamp.debug.find_nonfinite(loss)(jnp.float32([1, 2]) + jnp.inf).finding\nprint(found.source)\n"
    )
    program.write_text("import runpy; runpy.run_module('modelled', run_name='__main__')")
    assert run_python(program, PYTHONPATH=f"{environment()['PYTHONPATH']}:{installed}").strip() == (
        "modelled/net.py:5 > stacked/scan.py:2"
    )
