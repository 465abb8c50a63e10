"""Tables of text: what tells is never cut."""

import os
import shutil
import sys

import pytest

from jamp import _table

FITTED = {
    # text, width: the function goes first, then the library, then names in the middle of a path without numbers.
    ("a_model.py:12 (a_function)", 20): "a_model.py:12",
    ("a_model.py:12 (a_function) > flax/linen/linear.py:287", 42): "a_model.py:12 > flax/linen/linear.py:287",
    ("a_model.py:12 (a_function) > flax/linen/linear.py:287", 30): "a_model.py:12",
    ("a_model_of_a_user.py:422", 8): "a_model_of_a_user.py:422",
    ("In[12]:3 (loss)", 8): "In[12]:3",
    ("model.blocks.{0,1,2}.attention.query.kernel", 40): "model.blocks.{0,1,2}.attention...kernel",
    ("params['layer_07']['attention']['query']['kernel']", 40): "params['layer_07']...['query']['kernel']",
    ("Net/h_*/attn/query", 100): "Net/h_*/attn/query",
    ("Net/h_*/attn/query/kernel", 20): "Net/h_*.../kernel",
    ("a_model.py:12 Net/h_*/attn/query/kernel", 32): "a_model.py:12 Net/h_*.../kernel",
    ("one/name", 4): "one/name",
    ("", 4): "",
}


@pytest.mark.parametrize(("text", "width"), FITTED)
def test_a_line_keeps_the_users_line_and_both_ends_of_a_path(text, width):
    assert _table.fit(text, width) == FITTED[text, width]


def test_a_table_is_as_wide_as_the_terminal(monkeypatch):
    rows = [
        [
            "dot_general",
            "model.blocks.{0,1,2}.attention.query_projection.kernel",
            "model.py:12 (a_function) " + "x" * 40,
        ]
    ]
    table = lambda: _table.with_header(("operation", "where", "source"), rows, ("where", "source"))
    wide = "\n".join(table())
    assert "  model.blocks.{0,1,2}...kernel  model.py:12 xxx" in wide
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    for columns, is_cut in ((200, False), (100, True), (20, True)):
        monkeypatch.setattr(shutil, "get_terminal_size", lambda _, n=columns: os.terminal_size((n, 24)))
        lines = table()
        assert ("..." in lines[1], "(a_function)" in lines[1]) == (is_cut, not is_cut)
        assert lines[0].index("source") == lines[1].index("model.py:12")
    monkeypatch.setattr(sys, "stdout", None)  # pythonw
    assert table() == wide.splitlines()
