"""What every file of results begins with: when, where, with what and by which command they were measured."""

import json
import os
import platform
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jamp

PACKAGES = ("jax", "jaxlib", "libtpu", "optax", "flax", "jmp", "mixed-precision-for-jax", "keras", "torch")


def record(module: str, quick: bool, device: str) -> dict[str, Any]:
    versions = {"python": platform.python_version(), "jamp": jamp.__version__}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python -m", module, *sys.argv[1:]]),
        "machine": {"device": device, "processor": processor(), "cores": cores()},
        "versions": versions,
        "quick": quick,
    }


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def cores() -> int | None:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def write(file: str | None, found: dict[str, Any]) -> None:
    if file:
        with open(file, "w") as out:
            json.dump(found, out, indent=1)
