"""The programs of the documentation's pages: `pytest tests/site/check_pages.py`.

They run beside the build of the site, and not with the tests: they show users how to call what the tests already check.
"""

from pathlib import Path

import pytest
from pages import PAGES, ROOT, programs, run_programs

# Their programs are run, and more is asserted of them, by tests of their own.
ELSEWHERE = {
    "distributed.md": "distributed/test_mapped.py",
    "appendix/mindspore.md": "test_mindspore.py",
    "quick-start.md": "integrations/test_docs.py",
}


@pytest.mark.promotes("Flax, Equinox and Optax")
@pytest.mark.parametrize("page", [page for page in PAGES if page not in ELSEWHERE and programs(page)])
def test_the_programs_of_a_page_run_in_their_order_and_print_what_it_says(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run_programs(page, capsys)


def test_every_page_with_programs_is_run_and_some_say_what_they_print():
    for page, test in ELSEWHERE.items():
        assert Path(page).name in (ROOT / "tests" / test).read_text()
    assert sum(bool(printed) for page in PAGES for _, printed in programs(page)) >= 5
