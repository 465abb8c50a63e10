"""Pages of the site that are made of other files: the README, members.json, and the names on the pages of the API."""

import importlib
import inspect
import json
import re
from functools import reduce
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by MkDocs for each page, before it reads the Markdown."""
    if page.file.src_path == "index.md":
        return first_page((ROOT / "README.md").read_text())  # in place of the line for readers of the repository
    markdown = markdown.replace("<!-- api -->", api_index())
    return markdown.replace("<!-- members -->", members(json.loads((ROOT / "docs/members.json").read_text())))


def first_page(readme: str) -> str:
    """The README, with links that lead from the folder of the documentation."""
    return re.sub(r"(?<=\]\()docs/", "", readme)


def members(tables: list[dict[str, Any]]) -> str:
    """A table for each class: its members, what stands for them in jamp, and whether that works as the member does."""
    parts = []
    for table in tables:
        rows = [[f"`{table['owner']}`", "jamp", ""], ["---"] * 3]
        rows += [[cell.replace("|", "\\|") for cell in row] for row in table["members"]]
        parts.append("\n".join(f"| {' | '.join(row)} |" for row in rows))
    return "\n\n".join(parts)


def api_index() -> str:
    """A table of the public names: each with the first line of its docstring, and a link to its page."""
    rows = []
    for page in sorted((ROOT / "docs/api").glob("*.md")):
        title = re.search(r"^# (.+)", page.read_text(), re.MULTILINE)[1]
        for name in re.findall(r"^::: (jamp(?:\.[a-zA-Z]\w*)+)", page.read_text(), re.MULTILINE):
            line = inspect.getdoc(find(name)).partition("\n")[0].replace("|", "\\|")
            rows.append((name.lower(), f"| [`{name}`]({page.name}#{name}) | {line} | {title} |"))
    return "\n".join(["| name | what it does | page |", "| --- | --- | --- |", *(row for _, row in sorted(rows))])


def find(name: str) -> Any:
    """The object with a dotted name."""
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        try:
            return reduce(getattr, parts[length:], importlib.import_module(".".join(parts[:length])))
        except ModuleNotFoundError:
            continue
    raise ValueError(f"No module of {name} can be imported.")
