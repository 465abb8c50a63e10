"""The table of clients in docs/frameworks.md, from the clients' results and pages."""

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
CHECKS = {"overflow": "skipped", "checkpoint": "equal", "metrics": "logged"}
ROWS = re.compile(r"(?<=<!-- clients -->\n).*?(?=<!-- /clients -->)", re.DOTALL)


def added(name):
    """The changed lines of the diff on a client's page."""
    diffs = re.findall(r"```diff\n(.*?)```", (DOCS / "frameworks" / f"{name}.md").read_text(), re.DOTALL)
    return [line for line in "".join(diffs).splitlines() if line[:1] in ("+", "-")]


def table():
    """A row for each client whose results are recorded, and below the table its notes."""
    header = ["client", "version", "lines", *WAYS, *CHECKS]
    rows, notes = [header, ["---"] * len(header)], []
    for name, found in json.loads(RECORDED.read_text()).items():
        apart, title = found["from_float32"], CLIENTS[name]["title"]
        cells = [f"{100 * apart[way]:+.2f}&nbsp;%" if way in apart else "no" for way in WAYS]
        checks = [word if check in found["checks"] else "no" for check, word in CHECKS.items()]
        rows.append([f"[{title}](frameworks/{name}.md)", found["version"], str(len(added(name))), *cells, *checks])
        said = {way: text for way, text in found["notes"].items() if way in WAYS} | found["impossible"]
        by_text = {text: [way for way in said if said[way] == text] for text in said.values()}
        notes += [f"- {title}, {', '.join(ways)}: {text}." for text, ways in by_text.items()]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(["", *lines, "", *notes, "", ""])
