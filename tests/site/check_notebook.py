"""The walk-through as a notebook, run by a real kernel: `pytest tests/site/check_notebook.py`.

Needs `pip install '.[docs]'`.
"""

import importlib.util
from pathlib import Path

import nbformat
from nbclient import NotebookClient

DOCS = Path(__file__).parents[2] / "docs"


def test_the_notebook_is_the_page_s_and_runs_from_its_first_cell_to_its_last():
    spec = importlib.util.spec_from_file_location("notebook", DOCS / "notebook.py")
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    assert (DOCS / "walk-through.ipynb").read_text() == module.text()
    book = nbformat.read(DOCS / "walk-through.ipynb", as_version=4)
    nbformat.validate(book)
    printed = lambda: [[out.text for out in cell.outputs] for cell in book.cells if cell.cell_type == "code"]
    said = printed()
    NotebookClient(book, timeout=300).execute()  # raises if a cell does
    for now, then in zip(printed(), said, strict=True):  # training ends a little differently on another processor
        assert ["".join(now).count("\n")] == ["".join(then).count("\n")]
