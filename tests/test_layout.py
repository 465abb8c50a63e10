"""The layout: floors of imports, public API only, and an example in each docstring."""

import ast
import importlib
import importlib.util
import inspect
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from processes import run_python

import jamp

ROOT = Path(jamp.__file__).parent
name_of = lambda path: ".".join(("jamp", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
SOURCES = {name_of(path): path.read_text() for path in sorted(ROOT.rglob("*.py"))}
PACKAGES = {name_of(path) for path in ROOT.rglob("__init__.py")}

# A module imports from its own floor and from those below. One that is not named here is an adapter, on the top.
FLOORS = [
    {"_cast"},
    {"_jaxprs"},
    {"_arguments", "_compiler_hints", "_leaves", "_loss_scale", "_mesh", "_numbers", "_rounded", "_staging", "_table"},
    {"_products"},
    {"_autocast", "_recompute"},
    {"_transforms"},
    {"_optimizer_state"},
    {"_step"},
    {"_chunked_sum"},
]


def floor(module):
    """The floor of the package or module of `jamp` that a module belongs to."""
    package = module.split(".")[1]
    return next((i for i, names in enumerate(FLOORS) if package in names), len(FLOORS))


def imports(module):
    """The modules that a module imports, anywhere in its code."""
    package = module if module in PACKAGES else module.rpartition(".")[0]
    found = set()
    for node in (n for n in ast.walk(ast.parse(SOURCES[module])) if isinstance(n, (ast.Import, ast.ImportFrom))):
        names = {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            names = {f"{base}.{name}" for name in names} & SOURCES.keys() or {base}
        found |= names
    return found


IMPORTS = {module: imports(module) for module in SOURCES}
INSIDE = {module: names & SOURCES.keys() for module, names in IMPORTS.items() if module != "jamp"}


def test_imports_inside_jamp_go_down_and_have_no_circle():
    for module, names in INSIDE.items():
        assert not [name for name in names if name == "jamp" or floor(name) > floor(module)], module
    tuple(TopologicalSorter(INSIDE).static_order())


def test_the_kit_alone_knows_primitives_and_nothing_private_jax_and_casts_know_no_optax():
    assert [module for module, source in SOURCES.items() if "eqn.params" in source] == [
        "jamp._jaxprs.build",
        "jamp._jaxprs.constructs",
        "jamp._jaxprs.ir",
        "jamp._jaxprs.manual_axes",
    ]
    assert not [module for module, source in SOURCES.items() if "_src" in source]
    modules = [
        m
        for m in SOURCES
        if m.startswith(("jamp._cast", "jamp._jaxprs", "jamp._products", "jamp._recompute", "jamp._autocast"))
    ]
    assert not [(m, name) for m in modules for name in IMPORTS[m] if name.startswith("optax")]


def test_init_is_a_table_of_contents():
    """Relative imports of `name as name`, the version, and the names again, for `dir` and `import *`."""
    _, *body = ast.parse(SOURCES["jamp"]).body
    imported = [node for node in body if isinstance(node, ast.ImportFrom) and node.level == 1]
    assert all(alias.asname == alias.name for node in imported for alias in node.names)
    version, names, lazy, listing = (node for node in body if node not in imported)
    assert [ast.unparse(node.targets) for node in (version, names)] == ["__version__", "__all__"]
    assert (lazy.name, listing.name) == ("__getattr__", "__dir__")
    listed = {alias.name for node in imported for alias in node.names}
    assert {name for name in dir(jamp) if not name.startswith("_") and callable(getattr(jamp, name))} <= listed


@pytest.mark.parametrize("module", [name for name in SOURCES if "._" not in name and not name.endswith("__main__")])
def test_a_public_module_shows_its_own_names_alone(module):
    """In `dir`, for completion, and in `__all__`, for `import *` and type checkers: no `jnp` and no `Any`."""
    if not importable(module):
        pytest.skip("needs an extra")
    found = importlib.import_module(module)
    assert sorted(set(found.__all__)) == sorted(found.__all__)
    public = {name for name in dir(found) if not name.startswith("_")}
    modules = {name.rpartition(".")[2] for name in SOURCES if name.rpartition(".")[0] == module}
    assert set(found.__all__) <= public <= {*found.__all__, *modules}
    for name in found.__all__:
        value = getattr(found, name)
        assert (value.__name__ if inspect.ismodule(value) else value.__module__).partition(".")[0] == "jamp", name


def test_import_jamp_imports_jax_and_optax_only_and_touches_no_device():
    code = """
import sys, jax, optax
before = set(sys.modules)
import jamp
assert "jamp.debug" not in sys.modules and jamp.debug.find_nonfinite and "jamp.debug" in sys.modules
imported = {name.partition(".")[0] for name in set(sys.modules) - before}
assert imported - sys.stdlib_module_names <= {"jamp", "jax", "optax"}, imported
for make in (jamp.NoOpLossScale, jamp.StaticLossScale, jamp.DynamicLossScale, jamp.AdaptiveLossScale):
    jamp.loss_scaled(optax.adamw(1e-3), make())  # arrays are made by init
try:
    jax.devices()
except RuntimeError:
    print("there is no device")
"""
    assert run_python("-c", code, JAX_PLATFORMS="nonexistent") == "there is no device\n"


def importable(module):
    """Whether all packages it needs are installed: with jax and optax only, `jamp.equinox` cannot be imported."""
    if module in INSIDE:
        return all(importable(name) for name in IMPORTS[module])
    return importlib.util.find_spec(module.partition(".")[0]) is not None


IMPORTABLE = [module for module in SOURCES if not module.endswith("__main__") and importable(module)]


def test_every_public_name_has_a_docstring_with_an_example():
    """What `jamp` lists, and what its public modules define."""
    for module in (module for module in IMPORTABLE if "._" not in module):
        for name, value in vars(importlib.import_module(module)).items():
            own = module == "jamp" or getattr(value, "__module__", None) == module
            if own and not name.startswith("_") and not inspect.ismodule(value):
                assert ">>> " in (value.__doc__ or ""), f"{module}.{name}"
