"""Run jamp inside other people's trainers, each in an environment of its own.

    python -m tests.clients                                  all, before a release
    python -m tests.clients tunix tunix_grpo                 two recipes
    python -m tests.clients --in-turn                        one of the quick ones, by the date

A client is a row of `clients.toml`: what to install, and on which Python. Its recipe, `recipes/NAME.py`, trains with
the client's own trainer. `judge.py` says what holds for every recipe. It runs in the client's environment.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
CLIENTS = tomllib.loads((Path(__file__).parent / "clients.toml").read_text())


def python_of(client):
    """The Python that runs a client: this one, or the newer one that it needs. None if that is not on this machine."""
    if "python" not in client:
        return sys.executable
    version = client["python"]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for candidate in [f"python{version}", *map(str, sorted(pyenv.glob(f"{version}*/bin/python")))]:
        # pyenv puts a command of that name on the path also where it only prints an error.
        if shutil.which(candidate) and not subprocess.run([candidate, "-c", ""], capture_output=True).returncode:
            return candidate
    return None


def run(name, wheel):
    """Make the environment of a client if it is not there, install jamp into it, and run the recipe."""
    client, folder = CLIENTS[name], ROOT / "build" / "clients" / name
    python, result = folder / "bin" / "python", folder / "result.json"
    install = [python, "-m", "pip", "install", "-q", "--no-compile"]
    started = time.monotonic()
    if not python.exists():
        found = python_of(client) or sys.exit(f"{name} needs Python {client['python']}, which is not on this machine.")
        subprocess.run([found, "-m", "venv", folder], check=True)
        subprocess.run([*install, *client["install"], wheel], check=True)
        for stray in folder.glob("lib/*/site-packages/tests"):  # of a package such as draccus: it would hide ours
            shutil.rmtree(stray)
    subprocess.run([*install, "--no-deps", "--force-reinstall", wheel], check=True)
    installed = time.monotonic()
    command = [python, "-m", "tests.clients.judge", name, result]
    subprocess.run(command, check=True, cwd=ROOT, env=os.environ | client.get("variables", {}))
    print(f"{name}: {installed - started:.0f} s to install, {time.monotonic() - installed:.0f} s to run")


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CLIENTS))
    parser.add_argument("--in-turn", action="store_true")
    parser.add_argument("--wheel", default=str(ROOT), help="what to install as jamp: by default, this checkout")
    options = parser.parse_args()
    if unknown := set(options.names) - set(CLIENTS):
        parser.error(f"no client {', '.join(sorted(unknown))}: choose from {', '.join(CLIENTS)}")
    quick = [name for name, client in CLIENTS.items() if client["quick"]]
    turn = [quick[int(time.time() // 86400) % len(quick)]] if options.in_turn else list(CLIENTS)
    for name in options.names or turn:
        run(name, options.wheel)


if __name__ == "__main__":
    main()
