"""The command line of a benchmark, and its file of results."""

import argparse
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jamp

Rows = list[dict[str, Any]]
PACKAGES = ("jax", "jaxlib", "libtpu", "optax", "flax", "jmp", "mixed-precision-for-jax")


def parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """With the options that all benchmarks have."""
    form = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(prog=f"python -m {module}", description=description, formatter_class=form)
    made.add_argument("--quick", action="store_true", help="every case once, small: does it run at all")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    return made


def record(module: str, quick: bool, device: str, packages: tuple[str, ...] = ()) -> dict[str, Any]:
    versions = {"python": platform.python_version(), "jamp": jamp.__version__}
    for package in PACKAGES + packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "command": f"python -m {module} {shlex.join(sys.argv[1:])}".strip(),
        "machine": {"device": device, "processor": processor(), "cores": cores},
        "versions": versions,
        "commit": commit(),
        "quick": quick,
    }


def commit() -> str | None:
    """The commit of the code that is measured, "-dirty" if it was changed since. None outside of a clone."""
    described = ["git", "-C", str(Path(jamp.__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(described, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def processor() -> str:
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    return names[0] if names else platform.machine()


def write(file: Path | None, found: dict[str, Any]) -> None:
    """A row of results is a line of the file."""
    if file:
        file.write_text(json.dumps(found).replace("}, {", "},\n{") + "\n")


def show(row: dict[str, Any]) -> None:
    """Print what is short in a row of results."""
    text = lambda key, x: x if isinstance(x, str) else f"{key} {x:.4g}" if isinstance(x, float) else f"{key} {x}"
    print("  ".join(text(key, x) for key, x in row.items() if isinstance(x, float | int | str)), flush=True)
