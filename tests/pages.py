"""The pages of the documentation, and their programs."""

import importlib.util
import re
from pathlib import Path
from textwrap import dedent

import matplotlib as mpl
import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = {path.relative_to(DOCS).as_posix(): path.read_text() for path in sorted(DOCS.rglob("*.md"))}
README = (ROOT / "README.md").read_text()
ROUGHLY = {"README.md", "walk-through.md"}  # Processors differ in losses after training, and in bytes.


def programs(page):
    """Its `python` blocks, also those in tabs, each with the `text` that follows it, which is what it prints.

    Those that include a file are run as examples and tests. Those for Haiku and for `jax.export`, which serializes with
    flatbuffers, need it to be installed.
    """
    pattern = r"^( *)```python.*?\n(.*?)^\1```(?:\n\n\1```text\n(.*?)^\1```)?"
    blocks = re.findall(pattern, README if page == "README.md" else PAGES[page], re.MULTILINE | re.DOTALL)
    needs = {"import haiku": "haiku", "from jax import export": "flatbuffers"}
    skipped = ["--8<--", *(line for line, package in needs.items() if not importlib.util.find_spec(package))]
    return [(dedent(block), dedent(printed)) for _, block, printed in blocks if not any(x in block for x in skipped)]


def agree(printed, expected, *, roughly):
    """Equal but for errors of rounding (1.2e-03), which are within a quarter of each other.

    Or equal but for all numbers, which are within a quarter, or 1, of each other.
    """
    if not roughly:
        error = r"\b\d\.\de[+-]\d\d\b"
        found, wanted = (list(map(float, re.findall(error, text))) for text in (printed, expected))
        same = re.sub(error, "#", printed) == re.sub(error, "#", expected)
        return same and found == pytest.approx(wanted, rel=0.25)
    number = r"(?<![\w*])[\d.]+(?:e[+-]?\d+)?"
    found, wanted = (list(map(float, re.findall(number, text))) for text in (printed, expected))
    return re.sub(number, "#", printed) == re.sub(number, "#", expected) and found == pytest.approx(
        wanted, rel=0.25, abs=1
    )


def run_programs(page, capsys):
    """Run the programs of a page in their order, in one namespace. Each prints what the page says."""
    mpl.use("Agg")
    namespace = {"__name__": page}
    for block, expected in programs(page):
        exec(compile(block, "model.py", "exec"), namespace)
        printed = capsys.readouterr().out
        assert not expected or agree(printed, expected, roughly=page in ROUGHLY)
        # A comment beside a `print` is how the line that it prints begins.
        for comment in re.findall(r"^ *print\(.*\)  # (.*?)(?: \.\.\.)?$", block, re.MULTILINE):
            assert comment in printed
