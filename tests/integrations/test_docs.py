"""The documentation: its programs run, it names every public name, and what it says of the project holds."""

import ast
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
# Their programs are run, and more is asserted of them, by tests of their own.
ELSEWHERE = {
    "from-mindspore.md": "test_mindspore.py",
    "distributed.md": "distributed/test_mapped.py",
    "diagnosis.md": "integrations/test_diagnose.py",
    "checkpoints.md": "integrations/test_checkpoints.py",
}


def programs(page):
    """Its `python` blocks, without those that include a file: those are run as examples and tests."""
    blocks = re.findall(r"^```python.*?\n(.*?)^```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    return [block for block in blocks if "--8<--" not in block]


@pytest.mark.parametrize("page", [page for page in PAGES if page not in ELSEWHERE and programs(page)])
def test_the_programs_of_a_page_run_in_their_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": page}
    for block in programs(page):
        exec(compile(block, page, "exec"), namespace)


def test_the_programs_of_the_other_pages_are_run_by_the_tests_that_are_named():
    for page, test in ELSEWHERE.items():
        assert page in (ROOT / "tests" / test).read_text()


def public_names(module):
    """What a module lists (`name as name`) or defines, with the place that it comes from."""
    path = ROOT / module.replace(".", "/")
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            origin = f"{module}.{node.module}" if node.level else node.module
            yield from ((a.name, f"{origin}.{a.name}") for a in node.names if a.asname == a.name and node.module)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            yield node.name, f"{module}.{node.name}"


def test_every_public_name_is_on_one_api_page_and_no_other_name_is():
    sources = [path for path in (ROOT / "jamp").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    modules = [f"jamp.{path.stem}" for path in sources if not path.stem.startswith("_")]
    top = dict(public_names("jamp"))
    below = {f"{module}.{name}" for module in modules for name, _ in public_names(module)} - set(top.values())
    pages = "".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    assert sorted(re.findall(r"^::: (\S+)$", pages, re.MULTILINE)) == sorted({f"jamp.{name}" for name in top} | below)


def test_every_page_is_in_the_navigation():
    class Loader(yaml.SafeLoader):
        """mkdocs.yml may name Python objects."""

    pages = re.findall(r"[\w/-]+\.md", str(yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"]))
    assert sorted(pages) == PAGES


@pytest.mark.parametrize("page", [page for page in PAGES if page != "changelog.md"])
def test_every_page_ends_by_naming_what_it_does_not_cover(page):
    text = re.sub(r'--8<-- "(\w+\.md)"', lambda m: (ROOT / m[1]).read_text(), (DOCS / page).read_text())
    *_, last = re.findall(r"^## (.*)", text, re.MULTILINE)
    assert "not cover" in last.lower()


def test_every_test_that_the_comparison_names_exists():
    named = set(re.findall(r"`(test_\w+)`", (DOCS / "comparison.md").read_text()))
    defined = {
        name
        for path in (ROOT / "tests").rglob("*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }
    assert len(named) > 20
    assert named - defined == set()


def test_jamp_unpickles_nothing_and_evaluates_no_string():
    """SECURITY.md."""
    for path in (ROOT / "jamp").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node, "id", getattr(node, "attr", getattr(node, "module", "")))
            names = {name, *(alias.name for alias in getattr(node, "names", []) if isinstance(alias, ast.alias))}
            assert not names & {"pickle", "cloudpickle", "marshal", "eval", "exec"}, path
