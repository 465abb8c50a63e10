"""Settings for all tests: no implicit dtype promotion, warnings are errors (pyproject.toml), and quick compilation."""

import gc
import os
import sys
from collections import Counter
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

assert "jax" not in sys.modules, "a pytest plugin imported JAX before its settings were made"

# Set before JAX is imported, and inherited by subprocesses and workers. Set XLA_FLAGS to run with others.
CACHE = Path(__file__).resolve().parents[1] / "build" / "jax-cache"
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
# XLA:CPU's older emitters compile quickly; the newest JAX tests the new ones. libtpu ends a process with this flag.
if version("jaxlib") == "0.10.2" and not find_spec("libtpu"):
    QUICK += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
os.environ.setdefault("XLA_FLAGS", QUICK)
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# JAX's caches grow to gigabytes in a worker. A search for garbage reads all of it: seldom is often enough.
gc.set_threshold(100_000, 20, 100)

sys.path.append(str(Path(__file__).parents[1]))  # for `benchmarks`; at the end: an installed jamp comes first


def pytest_addoption(parser):
    parser.addoption("--in-turn", metavar="DAY/N", help="run every N-th of the selected tests: all of them in N days")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config, items):
    """Mark as slow what `slow_after` says, and with `--in-turn` take every N-th of what the marks select."""
    seen = Counter()
    for item in items:
        few = item.get_closest_marker("slow_after")
        if few and not item.get_closest_marker("slow"):
            test = (item.path, item.originalname)
            seen[test] += 1
            if seen[test] > few.args[0]:
                item.add_marker("slow")
    result = yield
    if in_turn := config.getoption("--in-turn"):
        day, n = map(int, in_turn.split("/"))
        config.hook.pytest_deselected(items=[item for i, item in enumerate(items) if i % n != day % n])
        items[:] = items[day % n :: n]
    return result


def pytest_collection_finish(session):
    """What is imported stays. No search for garbage reads it."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A worker starts with half of the files, so that few programs compile twice, and takes over from a slower one."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Forbid implicit dtype promotion, unless a test is marked `promotes` with the code that does it."""
    import jax

    with jax.numpy_dtype_promotion("standard" if item.get_closest_marker("promotes") else "strict"):
        return (yield)


@pytest.fixture(autouse=True, scope="module")
def _caches_of_one_file():
    """JAX's caches are emptied after each file: a worker that holds gigabytes lowers a program three times slower."""
    yield
    import jax

    jax.clear_caches()
    gc.collect()


@pytest.fixture
def x64():
    """64-bit dtypes for one test."""
    import jax

    with jax.enable_x64(True):
        yield
