"""Which results still hold although what they measure was changed: those whose programs are the same.

    python -m benchmarks.report.same text_model rounding
    python -m benchmarks.report.same gpu -- --device cpu       what follows goes to the benchmark

The command of each result is run small (`--quick`) at the commit that measured it and at the last commit, with the
same packages. `JAX_DUMP_IR_TO` writes what JAX gives to the compiler. If both runs compile the same set of programs,
text for text without the lines of the source, the file says so, and `benchmarks.report.age` takes it for as new as the
last commit. The programs have the sizes of `--quick`. Where sizes decide, as with a budget or the `min_size` of 8 bit,
compare the traced programs at full size too.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.record import write
from benchmarks.report.age import RESULTS, git, made

# A benchmark may start others, which would write to the same names: a folder for each process.
OF_A_PROCESS = 'import os; os.environ["JAX_DUMP_IR_TO"] = os.path.join(os.environ["PROGRAMS"], str(os.getpid()))\n'


def programs(commit: str, arguments: list[str]) -> set[str]:
    """What a command, without `python`, compiles at a commit."""
    with tempfile.TemporaryDirectory() as folder:
        checkout, site, dumped = (Path(folder, name) for name in ("checkout", "site", "programs"))
        site.mkdir()
        (site / "sitecustomize.py").write_text(OF_A_PROCESS)
        path = os.pathsep.join(str(x) for x in (site, checkout))
        environment = os.environ | {"PYTHONPATH": path, "PROGRAMS": str(dumped)}
        environment |= {"JAX_INCLUDE_DEBUG_INFO_IN_DUMPS": "false", "JAX_ENABLE_COMPILATION_CACHE": "false"}
        git("worktree", "add", "--detach", str(checkout), commit)
        try:
            subprocess.run([sys.executable, *arguments], cwd=checkout, env=environment, stdout=sys.stderr, check=True)
        finally:
            git("worktree", "remove", "--force", str(checkout))
        return {file.read_text() for file in dumped.rglob("*.mlir")}


def command(found: dict[str, str], more: list[str]) -> list[str]:
    """That of a result, small and without its file."""
    words = shlex.split(found["command"])
    if words[:2] != ["python", "-m"]:
        raise SystemExit(f"What did not start as `python -m` cannot be run again: {found['command']}")
    if "--json" in words:
        at = words.index("--json")
        del words[at : at + 2]
    return [*words[1:], "--quick", *more]


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report.same", description=__doc__, formatter_class=form)
    parser.add_argument("names", nargs="+", help="of files of results, without .json")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, more = parser.parse_args(sys.argv[1:end]), sys.argv[end + 1 :]
    last = git("log", "-1", "--format=%h", "--abbrev=12")
    for name in options.names:
        file = RESULTS / f"{name}.json"
        found = json.loads(file.read_text())
        arguments = command(found, more)
        then, now = programs(made(file), arguments), programs(last, arguments)
        differ = f"{len(then)} programs at {made(file)}, {len(now)} at {last}, {len(then ^ now)} in one of them only"
        print(f"{name}: {differ}", flush=True)
        if then == now and then:
            write(file, found | {"same_programs": last})


if __name__ == "__main__":
    main()
