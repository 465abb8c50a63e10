"""docs/members.json has every member and tests/requirements every usage example of the requirement documents."""

import json
import pathlib
import pkgutil
import re
import runpy

import pytest
from loss_scales import recorded

ROOT = pathlib.Path(__file__).parent.parent
PROGRAMS = sorted((ROOT / "tests" / "requirements").glob("*.py"))
TABLES = json.loads((ROOT / "docs" / "members.json").read_text())


def test_the_table_has_every_member_and_each_that_works_is_there_under_its_name():
    plain = lambda member: re.sub(r"\(.*\)", "", member).strip("`").removeprefix("the ")
    names = {table["owner"]: [plain(member) for member, _, _ in table["members"]] for table in TABLES}
    # The members of the classes that the requirements define, and of torch's class as torch has it.
    assert names == {owner: members.split() for owner, members in recorded("required_members.json").items()}
    for member, here, status in (row for table in TABLES for row in table["members"]):
        assert here, member
        found = [pkgutil.resolve_name(name) for name in re.findall(r"\bjamp(?:\.\w+)+", here)]
        assert status == "replaced" or (status == "works" and found), member


def test_every_document_has_its_translated_examples():
    assert [path.name[:3] for path in PROGRAMS] == ["000", "001", "002", "003", "004"]


@pytest.mark.slow_after(2)
@pytest.mark.promotes("the update of bfloat16 parameters in a program")
@pytest.mark.parametrize(
    "program",
    [pytest.param(x, marks=[pytest.mark.slow] * (x.stem[:3] in ("000", "004"))) for x in PROGRAMS],
    ids=lambda path: path.stem,
)
def test_a_translated_example_asserts_what_it_claims_and_prints_it(program, capsys):
    runpy.run_path(str(program), run_name="__main__")
    output, errors = capsys.readouterr()
    assert (len(output.splitlines()) >= 2, errors) == (True, "")
