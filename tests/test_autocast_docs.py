"""The table of docs/autocast.md is the table."""

import re
from pathlib import Path

from jamp._autocast.rules import CATEGORIES, RULES

TEXT = (Path(__file__).resolve().parents[1] / "docs" / "autocast.md").read_text()


def test_the_table_of_the_page_is_the_data():
    rows = re.findall(r"^\| (\w+) \| ((?:`[^`]+` ?)+) \| (.+) \|$", TEXT, re.MULTILINE)
    listed = {key: (category, reason) for category, keys, reason in rows for key in re.findall(r"`([^`]+)`", keys)}
    assert listed == RULES
    assert all(f"- **{category}**: " in TEXT for category in CATEGORIES)
