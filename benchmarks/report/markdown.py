"""Tables in Markdown, and their place in a page."""

import re
from collections.abc import Iterable
from typing import Any

from benchmarks.record import Rows

TITLES = {"adamw": "AdamW", "sgd momentum": "SGD with momentum", "clip + adamw": "clip + AdamW"}
TITLES |= {"adafactor": "Adafactor"}


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table without the columns that are empty in every row."""
    header, body = list(header), [list(row) for row in rows]
    kept = [i for i in range(len(header)) if i == 0 or any(row[i] for row in body)]
    lines = [header, ["---"] * len(header), *body]
    return "\n".join(f"| {' | '.join(line[i] for i in kept)} |" for line in lines)


def number(x: float) -> str:
    """Three significant digits, never an exponent."""
    text = f"{x:.3g}"
    return f"{x:.0f}" if "e" in text else text


def select(rows: Rows, **labels: Any) -> Rows:
    return [row for row in rows if all(row[name] == value for name, value in labels.items())]


def names(rows: Iterable[dict[str, Any]], key: str = "name") -> list[Any]:
    """The values of a label, in their order."""
    return list(dict.fromkeys(row[key] for row in rows))


def is_marked(page: str, name: str) -> bool:
    """Whether a page has both marks of a table."""
    return bool(_between(name).search(page))


def fill(page: str, name: str, text: str) -> str:
    """Put a text between its two marks."""
    return _between(name).sub(lambda m: f"{m[1]}\n{text}\n\n{m[2]}", page)


def _between(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)


def origin(found: dict[str, Any]) -> str:
    """When, where and by which command the results were measured. The file has the versions of all packages."""
    machine, versions = found["machine"], found["versions"]
    processor = f", {machine['processor']}, cores: {machine['cores']}" if machine["device"] == "cpu" else ""
    how = f"`{found['command']}` at commit `{found['commit'][:7]}`" if "command" in found else f"{found['note']}."
    return f"*{found['date']}; {machine['device']}{processor}; jax {versions['jax']}.* {how}"
