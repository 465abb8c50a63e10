"""These tests need eight devices, and a process has the devices that it starts with.

So each of them runs in a second pytest, which is started once, is sent the test's name and answers with its failure.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import jamp

INSIDE = "JAMP_TESTS_WITH_EIGHT_DEVICES"
failures = []


@functools.cache
def second_pytest():
    # The jamp that the tests import, be it a checkout or an installed wheel.
    paths = [str(Path(jamp.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {
        INSIDE: "1",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        # XLA:CPU's threads. With one a device, as on two cores, all may wait in a collective for a step that has none.
        "NPROC": "32",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 "
        "--xla_cpu_collective_call_terminate_timeout_seconds=300",
    }
    code = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"
    options = [
        "-s",
        "-p",
        "no:terminal",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
        "-o",
        "addopts=--import-mode=importlib",
    ]
    return subprocess.Popen(
        [sys.executable, "-P", "-c", code, str(Path(__file__).parent), *options],
        env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def pytest_pyfunc_call(pyfuncitem):
    if INSIDE in os.environ:
        return None
    process, name = second_pytest(), pyfuncitem.nodeid.rpartition("/")[2]
    process.stdin.write(f"{name}\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    if not answer:
        raise RuntimeError(f"The process with eight devices died in {name}: {process.wait()}")
    if reports := json.loads(answer):
        pytest.fail("\n".join(reports), pytrace=False)
    return True


def pytest_runtestloop(session):
    if INSIDE not in os.environ:
        return None
    items = {item.nodeid.rpartition("/")[2]: item for item in session.items}
    for line in sys.stdin:
        item = items[line.strip()]
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        print(json.dumps(failures), flush=True)
        failures.clear()
    return True


def pytest_runtest_logreport(report):
    if report.failed:
        failures.append(report.longreprtext)


def pytest_unconfigure():
    if second_pytest.cache_info().currsize:
        second_pytest().stdin.close()
        second_pytest().wait()
