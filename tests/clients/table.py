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
ROWS = re.compile(r"(?<=<!-- clients -->\n)(?:\|.*\n)*")


def added(name):
    """The changed lines of the diff on a client's page."""
    diffs = re.findall(r"```diff\n(.*?)```", (DOCS / "frameworks" / f"{name}.md").read_text(), re.DOTALL)
    return [line for line in "".join(diffs).splitlines() if line[:1] in ("+", "-")]


def table():
    """A row for each client whose results are recorded."""
    header = ["client", "version", "lines", *WAYS, *CHECKS, "not possible"]
    rows = [header, ["---"] * len(header)]
    for name, found in json.loads(RECORDED.read_text()).items():
        apart, missing = found["from_float32"], found["impossible"]
        notes = {way: found["notes"].get(way, "") for way in WAYS}
        cells = [f"{100 * apart[way]:+.2f} %" if way in apart else "no" for way in WAYS]
        cells = [f"{cell} ({notes[way]})" if notes[way] else cell for cell, way in zip(cells, WAYS, strict=True)]
        checks = [word if check in found["checks"] else "no" for check, word in CHECKS.items()]
        why = "; ".join(f"{what}: {reason}" for what, reason in missing.items())
        version = f"{found['version']}, JAX {found['jax']}"
        title = f"[{CLIENTS[name]['title']}](frameworks/{name}.md)"
        rows.append([title, version, str(len(added(name))), *cells, *checks, why])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
