"""The house: floors of imports, public API only, small modules, and docstrings whose examples run."""

import ast
import doctest
import importlib
import importlib.util
import inspect
import os
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import jamp

ROOT = Path(jamp.__file__).parent
name_of = lambda path: ".".join(("jamp", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
SOURCES = {name_of(path): path.read_text() for path in sorted(ROOT.rglob("*.py"))}
PACKAGES = {name_of(path) for path in ROOT.rglob("__init__.py")}

# A module imports from its own floor and from those below. One that is not named here is an integration, on the top.
FLOORS = [
    {"_checks", "_jaxpr", "_tree"},
    {"_loss_scale", "_adaptive", "_stats", "_skip", "_lookup", "_policy", "_autocast"},
    {"_scaling", "_health", "_config"},
    {"_transforms", "_master"},
]


def floor(module):
    return next((i for i, names in enumerate(FLOORS) if module.split(".")[1] in names), len(FLOORS))


def imports(module):
    """The modules that a module imports, anywhere in its code."""
    package = module if module in PACKAGES else module.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(SOURCES[module])):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            names = {f"{base}.{alias.name}" for alias in node.names} & SOURCES.keys()
            found |= names or {base}
    return found


IMPORTS = {module: imports(module) for module in SOURCES}
INSIDE = {module: names & SOURCES.keys() for module, names in IMPORTS.items() if module != "jamp"}


@pytest.mark.parametrize("module", INSIDE)
def test_imports_inside_jamp_go_down_only(module):
    assert not [name for name in INSIDE[module] if name == "jamp" or floor(name) > floor(module)]


def test_imports_inside_jamp_have_no_circle():
    tuple(TopologicalSorter(INSIDE).static_order())


def test_policy_and_autocast_know_no_optax():
    modules = [m for m in SOURCES if m.startswith(("jamp._policy", "jamp._autocast"))]
    assert not [(m, name) for m in modules for name in IMPORTS[m] if name.startswith("optax")]


def test_no_private_module_of_jax_is_used():
    assert not [module for module, source in SOURCES.items() if "_src" in source]


def test_no_module_is_over_300_lines():
    assert not {module: n for module, source in SOURCES.items() if (n := len(source.splitlines())) > 300}


def test_init_is_a_table_of_contents():
    """Relative imports of `name as name`, and the version."""
    _, *body = ast.parse(SOURCES["jamp"]).body
    for node in body:
        if isinstance(node, ast.ImportFrom):
            assert node.level == 1
            assert all(alias.asname == alias.name for alias in node.names)
        else:
            assert isinstance(node, ast.Assign)
            assert [target.id for target in node.targets] == ["__version__"]


def test_import_jamp_imports_jax_and_optax_only_and_touches_no_device():
    code = """
import sys, jax, optax
before = set(sys.modules)
import jamp
imported = {name.partition(".")[0] for name in set(sys.modules) - before}
assert imported - sys.stdlib_module_names <= {"jamp", "jax", "optax"}, imported
for make in (jamp.NoOpLossScale, jamp.StaticLossScale, jamp.DynamicLossScale, jamp.AdaptiveLossScale):
    jamp.loss_scaled(optax.adamw(1e-3), make())  # arrays are made by init
try:
    jax.devices()
except RuntimeError:
    print("there is no device")
"""
    env = os.environ | {"JAX_PLATFORMS": "nonexistent", "PYTHONPATH": str(ROOT.parent)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], env=env, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "there is no device\n"), done.stderr


def importable(module):
    """Whether all packages it needs are installed: with jax and optax only, `jamp.equinox` cannot be imported."""
    if module in INSIDE:
        return all(importable(name) for name in IMPORTS[module])
    return importlib.util.find_spec(module.partition(".")[0]) is not None


IMPORTABLE = [module for module in SOURCES if not module.endswith("__main__") and importable(module)]


def public_names():
    """What `jamp` lists, and what its public modules define."""
    modules = [m for m in IMPORTABLE if not any(part.startswith("_") for part in m.split("."))]
    for module in modules:
        for name, value in vars(importlib.import_module(module)).items():
            listed = not name.startswith("_") and not inspect.ismodule(value)
            if listed and (module == "jamp" or getattr(value, "__module__", None) == module):
                yield f"{value.__module__}.{name}", value


PUBLIC = dict(public_names())


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_a_docstring_with_an_example(name):
    assert ">>> " in (PUBLIC[name].__doc__ or "")


@pytest.mark.parametrize("module", IMPORTABLE)
def test_docstring_examples_run(module):
    output = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in doctest.DocTestFinder().find(importlib.import_module(module), module):
        runner.run(test, out=output.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(output)
