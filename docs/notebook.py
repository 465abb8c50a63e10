"""Write docs/walk-through.ipynb from docs/walk-through.md: `python docs/notebook.py`.

The programs of the page become cells, with what it says they print as their output.
"""

import json
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
INSTALL = """import importlib.util

if importlib.util.find_spec("jamp") is None:
    %pip install -q jamp-jax"""
BLOCK = re.compile(r"^```python\n(.*?)^```(?:\n\n```text\n(.*?)^```)?\n", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[([^\]]+)\]\([^)]*\)")


def cell(number: int, kind: str, source: str, printed: str | None = None) -> dict[str, Any]:
    made = {
        "cell_type": kind,
        "id": f"cell-{number}",
        "metadata": {},
        "source": source.strip().splitlines(keepends=True),
    }
    if kind == "markdown":
        return made
    output = {"output_type": "stream", "name": "stdout", "text": (printed or "").splitlines(keepends=True)}
    return made | {"execution_count": None, "outputs": [output] if printed else []}


def notebook(page: str) -> dict[str, Any]:
    """Prose without its links, which lead to other pages, and programs, in turn."""
    title, *rest = BLOCK.split(page)
    parts = [("markdown", title, None), ("code", INSTALL, None)]
    for program, printed, prose in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
        parts += [("code", program, printed), ("markdown", prose, None)]
    cells = [(kind, LINK.sub(r"\1", text) if kind == "markdown" else text, printed) for kind, text, printed in parts]
    metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    made = [cell(i, *part) for i, part in enumerate(part for part in cells if part[1].strip())]
    return {"cells": made, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def text() -> str:
    return json.dumps(notebook((HERE / "walk-through.md").read_text()), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    (HERE / "walk-through.ipynb").write_text(text())
