"""The table of clients in docs/frameworks.md, from the clients' results and their sections of pages."""

import json
import re
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"
CLIENTS = tomllib.loads((HERE / "clients.toml").read_text())
RECORDED = DOCS / "frameworks" / "clients.json"
INDEX = DOCS / "frameworks.md"
WAYS = "float16", "bfloat16", "8 bit", "bfloat16 parameters"
ROWS = re.compile(r"(?<=<!-- clients -->\n).*?(?=<!-- /clients -->)", re.DOTALL)


def section(name):
    """The page that has a client's section, relative to docs, and the section: its heading is the client's name."""
    for page in sorted((DOCS / "frameworks").glob("*.md")):
        for heading, text in re.findall(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", page.read_text(), re.MULTILINE | re.DOTALL):
            if heading.lower().replace(" ", "_") == name:
                return page.relative_to(DOCS).as_posix(), text
    raise KeyError(f"no page in docs/frameworks has a section {name}")


def added(name):
    """The changed lines of the diff in a client's section."""
    diffs = re.findall(r"```diff\n(.*?)```", section(name)[1], re.DOTALL)
    return [line for line in "".join(diffs).splitlines() if line[:1] in ("+", "-")]


def table():
    """A row for each client whose results are recorded, and below the table its notes."""
    header = ["client", "version", "lines", *WAYS]
    rows, notes = [header, ["---"] * len(header)], []
    for name, found in json.loads(RECORDED.read_text()).items():
        apart, title = found["from_float32"], CLIENTS[name]["title"]
        cells = [f"{100 * apart[way]:+.2f}&nbsp;%" if way in apart else "no" for way in WAYS]
        link = f"[{title}]({section(name)[0]}#{name.replace('_', '-')})"
        rows.append([link, found["version"], str(len(added(name))), *cells])
        said = {way: text for way, text in found["notes"].items() if way in WAYS} | found["impossible"]
        by_text = {text: [way for way in said if said[way] == text] for text in said.values()}
        notes += [f"- {title}, {', '.join(ways)}: {text}." for text, ways in by_text.items()]
        more = [f"{way} {100 * apart[way]:+.2f}&nbsp;%" for way in apart if way not in ("float32", *WAYS)]
        more += [found["checks"]["memory"]] if "memory" in found["checks"] else []
        notes += [f"- {title}: {'; '.join(more)}."] if more else []
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(["", *lines, "", *notes, "", ""])
