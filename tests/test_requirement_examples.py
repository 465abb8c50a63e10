"""docs/from-pytorch-members.md has every member and every usage example of the five requirement documents."""

import pathlib
import pkgutil
import re

from loss_scales import recorded

ROOT = pathlib.Path(__file__).parent.parent


PAGE = (ROOT / "docs" / "from-pytorch-members.md").read_text()


def test_the_table_has_every_member_and_each_that_works_is_there_under_its_name():
    found = re.findall(r"\| `([\w.]+)` \| Here \| \|\n\|---\|---\|---\|\n((?:\|.*\|\n)+)", PAGE)
    cells = lambda row: [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
    tables = {name: [cells(row) for row in rows.splitlines()] for name, rows in found}  # member, here, status
    plain = lambda member: re.sub(r"\(.*\)", "", member).strip("`").removeprefix("the ")
    names = {owner: [plain(member) for member, _, _ in rows] for owner, rows in tables.items()}
    # The members of the classes that the requirements define, and of torch's class as torch has it.
    assert names == {owner: members.split() for owner, members in recorded("required_members.json").items()}
    for member, here, status in (rows := [row for rows in tables.values() for row in rows]):
        assert here, member
        found = [pkgutil.resolve_name(name) for name in re.findall(r"\bjamp(?:\.\w+)+", here)]
        assert status == "replaced" or (status == "works" and found), member
    works = sum(status == "works" for _, _, status in rows)
    assert f"{len(rows)} members: {works} work, {len(rows) - works} are replaced, none is missing." in PAGE


def test_the_page_includes_the_example_of_every_document():
    """test_examples.py runs them."""
    included = re.findall(r'^--8<-- "(.+)"$', PAGE, re.MULTILINE)
    examples = sorted((ROOT / "examples" / "requirements").glob("*.py"))
    assert [path.name[:3] for path in examples] == ["000", "001", "002", "003", "004"]
    names = {path.relative_to(ROOT).as_posix() for path in examples}
    assert set(included) == names
