"""Pages of the site that are made of other files: the first page is the README, a table is made of members.json."""

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by MkDocs for each page, before it reads the Markdown."""
    if page.file.src_path == "index.md":
        return markdown + first_page((ROOT / "README.md").read_text())
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
