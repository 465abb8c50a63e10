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
from processes import environment

INSIDE = "JAMP_TESTS_WITH_EIGHT_DEVICES"
OPTIONS = ["-s", "-pno:terminal", "-pno:xdist", "-pno:cacheprovider", "-oaddopts=--import-mode=importlib"]
failures = []


@functools.cache
def second_pytest():
    flags = "--xla_force_host_platform_device_count=8 --xla_cpu_collective_call_terminate_timeout_seconds=300"
    # XLA:CPU's threads. With one per device, as on two cores, all may wait in a collective for a step that has none.
    env = environment(**{INSIDE: "1", "JAX_PLATFORMS": "cpu", "NPROC": "32", "XLA_FLAGS": flags})
    code = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"
    command = [sys.executable, "-P", "-c", code, str(Path(__file__).parent), *OPTIONS]
    return subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def pytest_pyfunc_call(pyfuncitem):
    if INSIDE in os.environ:
        return None
    process, name = second_pytest(), pyfuncitem.nodeid.rpartition("/")[2]
    print(name, file=process.stdin, flush=True)
    if not (answer := process.stdout.readline()):
        raise RuntimeError(f"The process with eight devices died in {name}: {process.wait()}")
    if reports := json.loads(answer):
        pytest.fail("\n".join(reports), pytrace=False)
    return True


def pytest_runtestloop(session):
    if INSIDE not in os.environ:
        return None
    items = {item.nodeid.rpartition("/")[2]: item for item in session.items}
    for line in sys.stdin:
        session.config.hook.pytest_runtest_protocol(item=items[line.strip()], nextitem=None)
        print(json.dumps(failures), flush=True)
        failures.clear()
    return True


def pytest_runtest_logreport(report):
    if report.failed:
        failures.append(report.longreprtext)


def pytest_unconfigure():
    if second_pytest.cache_info().currsize:
        second_pytest().communicate()
