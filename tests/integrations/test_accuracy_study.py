"""The accuracy study: its page says what its results say, and its measures are what they are called."""

import json
import shutil
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2]))  # at the end: an installed jamp comes first

from benchmarks import accuracy_report

DOCS = Path(__file__).parents[2] / "docs" / "benchmarks"


def test_the_tables_of_the_page_are_those_that_the_results_give(tmp_path):
    page = Path(shutil.copy(DOCS / "accuracy.md", tmp_path))
    accuracy_report.write_page(page, json.loads((DOCS / "accuracy.json").read_text()))
    assert page.read_text() == (DOCS / "accuracy.md").read_text()


def test_a_page_without_the_marks_is_an_error_that_names_them(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# No marks\n")
    with pytest.raises(ValueError, match="has no marks <!-- about -->"):
        accuracy_report.write_page(page, json.loads((DOCS / "accuracy.json").read_text()))


def test_a_scale_is_too_low_where_more_than_a_hundredth_of_the_gradients_is_lost():
    assert accuracy_report.too_low({"lost_scaled": [0.5, 0.02, 0.01, 0.0]}) == 0.5


def test_the_loss_is_reached_at_the_first_evaluation_at_or_below_it():
    row = {"steps": [10, 20, 30], "loss": [3.0, None, 1.0]}
    assert [accuracy_report.steps_to(row, loss) for loss in (3.5, 1.0, 0.5)] == [10, 30, None]


@pytest.mark.parametrize(("skipped", "first"), [([], 0), ([0, 1, 5], 2), ([3], 0)])
def test_the_first_step_applied_comes_after_the_unbroken_run_of_skipped_ones(skipped, first):
    assert accuracy_report.first_applied({"skipped": skipped}) == first
