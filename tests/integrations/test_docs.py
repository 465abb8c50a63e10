"""The documentation: it names every public name, and what it says holds. check_pages.py runs its programs."""

import ast
import pkgutil
import re

import pytest
import yaml
from long_description import relative, rendered
from pages import DOCS, PAGES, README, ROOT

import jamp


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
    pages = "".join(text for page, text in PAGES.items() if page.startswith("api/"))
    listed = re.findall(r"^::: (\S+)$", pages, re.MULTILINE)
    returned = [name for name in listed if name.startswith("jamp._")]  # types that only functions make
    assert all(map(pkgutil.resolve_name, returned))
    assert sorted(listed) == sorted({*returned, *(f"jamp.{name}" for name in top), *below})


def test_a_docstring_on_an_api_page_links_to_a_page_and_does_not_name_its_file():
    pages = "".join(text for page, text in PAGES.items() if page.startswith("api/"))
    for name in re.findall(r"^::: (\S+)$", pages, re.MULTILINE):
        assert "docs/" not in (pkgutil.resolve_name(name).__doc__ or ""), name


def test_every_page_is_in_the_navigation():
    class Loader(yaml.SafeLoader):
        """mkdocs.yml may name Python objects."""

    pages = re.findall(r"[\w/-]+\.md", str(yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"]))
    assert sorted(pages) == sorted(PAGES)


def test_the_page_of_examples_has_each_with_its_command():
    commands = re.findall(r"```sh\npython (.+)\n```", PAGES["examples.md"])
    assert sorted(commands) == sorted(f"examples/{path.name}" for path in (ROOT / "examples").glob("*.py"))
    assert all((DOCS / name).exists() for name in re.findall(r"!\[.+\]\((.+)\)", PAGES["examples.md"]))


def test_the_page_of_the_release_has_no_relative_link_and_names_paths_that_exist():
    """`tests/release/check_wheel.py` reads the same from the wheel."""
    page = rendered()
    assert relative("[a](docs/a.md#b) ![c](d.png) [e](#f)") == ["docs/a.md#b", "d.png", "#f"]
    assert not relative(page)
    assert not re.search(r"!\[|<img", page)
    paths = {target.partition("#")[0] for target in relative(README)}
    assert len(paths) > 8
    assert all((ROOT / path).exists() for path in paths)
    assert {path for path in paths if not path.endswith(".png")} == set(re.findall(r" \(`(docs/[^`]+)`\)", page))
    blocks = lambda text: re.findall(r"^```.*?^```", text, re.MULTILINE | re.DOTALL)
    assert blocks(page) == blocks(README)


def test_only_pages_to_which_no_readme_leads_include_a_file():
    """The README leads to the files themselves, in which an included file would be missing."""
    including = {page for page, text in PAGES.items() if "--8<--" in text}
    assert including == {"changelog.md", "contributing.md"}
    assert not [page for page in including if f"docs/{page}" in README]


def test_no_two_powers_in_a_paragraph_turn_the_words_between_them_bold():
    for page, text in PAGES.items():
        prose = re.sub(r"^( *)```.*?^ *```|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)
        assert not [p for p in prose.split("\n\n") if len(re.findall(r"\w\*\*\d", p)) > 1], page


def test_the_autocast_page_explains_every_category():
    with pytest.raises(ValueError, match="must be one of") as error:
        jamp.autocast(abs, "float16", rules={"tanh": "none"})
    categories = re.search("one of (.*?),? got", str(error.value)).group(1).split(", ")
    assert len(categories) == 4
    assert all(f"- **{category}**: " in PAGES["autocast.md"] for category in categories)


def test_jamp_unpickles_nothing_and_evaluates_no_string():
    """SECURITY.md."""
    for path in (ROOT / "jamp").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node, "id", getattr(node, "attr", getattr(node, "module", "")))
            names = {name, *(alias.name for alias in getattr(node, "names", []) if isinstance(alias, ast.alias))}
            assert not names & {"pickle", "cloudpickle", "marshal", "eval", "exec"}, path
