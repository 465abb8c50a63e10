"""The README as the release's page on a package index shows it, and what a text links to."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def rendered():
    """The README after the substitutions of pyproject.toml, as hatch-fancy-pypi-readme makes them."""
    hooks = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["metadata"]["hooks"]
    hook, text = hooks["fancy-pypi-readme"], README
    assert [fragment["path"] for fragment in hook["fragments"]] == ["README.md"]
    for one in hook["substitutions"]:
        text = re.sub(one["pattern"], one["replacement"], text)
    return text


def targets(text):
    """Where its links lead and its pictures lie, in Markdown and in HTML."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"\]\(\s*([^)\s]*)|^\[[^\]]+\]:\s*(\S+)|(?:href|src)=[\"']([^\"']*)", prose, re.MULTILINE)


def relative(text):
    return [target for found in targets(text) for target in found if target and not target.startswith("https://")]
