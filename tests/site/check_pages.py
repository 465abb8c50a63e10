"""The programs of the README, of the documentation's pages and of docstrings: `pytest tests/site/check_pages.py`.

They run beside the build of the site, and not with the tests: they show users how to call what the tests already check.
"""

import ast
import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from pages import PAGES, ROOT, programs, run_programs

import jamp

MODULES = ["jamp", *(x.name for x in pkgutil.walk_packages(jamp.__path__, "jamp.") if "__main__" not in x.name)]

# Their programs are run, and more is asserted of them, by tests of their own.
ELSEWHERE = {
    "distributed.md": "distributed/test_mapped.py",
    "from-mindspore.md": "test_mindspore.py",
}


@pytest.mark.promotes("Flax, Equinox and Optax")
@pytest.mark.parametrize("page", ["README.md", *(page for page in PAGES if page not in ELSEWHERE and programs(page))])
def test_the_programs_of_a_page_run_in_their_order_and_print_what_it_says(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run_programs(page, capsys)


def test_every_page_with_programs_is_run_and_some_say_what_they_print():
    for page, test in ELSEWHERE.items():
        assert Path(page).name in (ROOT / "tests" / test).read_text()
    assert sum(bool(printed) for page in PAGES for _, printed in programs(page)) >= 5


@pytest.mark.promotes("Flax and Optax")
def test_the_program_beside_pytorchs_learns_and_resumes_bit_for_bit(tmp_path, monkeypatch, capsys):
    [theirs] = re.findall(r'^```py title="PyTorch and bitsandbytes"\n(.*?)^```', PAGES["from-pytorch.md"], re.M | re.S)
    ours = programs("from-pytorch.md")[0][0]
    assert theirs.count("range(first, 4)") == ours.count("range(first, 4)") == 1
    ast.parse(theirs)

    def run(folder, epochs):
        (tmp_path / folder).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / folder)
        namespace = {"__name__": "from-pytorch.md"}
        exec(compile(ours.replace("range(first, 4)", f"range(first, {epochs})"), "model.py", "exec"), namespace)
        losses = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
        return losses, jax.tree.leaves(nnx.state((namespace["model"], namespace["optimizer"])))

    [first, second], undisturbed = run("one run", 2)
    assert second < first
    assert any(x.dtype == np.uint8 for x in undisturbed)  # 8-bit moments
    assert run("stopped", 1)[0] == [first]
    losses, continued = run("stopped", 2)
    assert losses == [second]
    assert all(np.array_equal(x, y) for x, y in zip(undisturbed, continued, strict=True))


@pytest.mark.promotes("Optax, Flax and Equinox in the examples")
@pytest.mark.parametrize("module", MODULES)
def test_docstring_examples_run(module):
    output = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in doctest.DocTestFinder().find(importlib.import_module(module), module):
        runner.run(test, out=output.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(output)
