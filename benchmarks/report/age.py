"""Which results are older than the code that they measure.

    python -m benchmarks.report.age            names them on the page of the benchmarks
    python -m benchmarks.report.age --check    fails if one is not named there

A result is as old as the commit that it holds, or else the commit that wrote its file. It is older if one of the paths
in `MEASURED` holds another program now: other comments and docstrings do not count. `benchmarks.report.same` finds
results whose compiled programs did not change, and records the commit up to which that holds.
"""

import argparse
import ast
import json
import subprocess
from pathlib import Path

from benchmarks.report.markdown import fill

ROOT = Path(__file__).parents[2]
RESULTS, PAGE = ROOT / "docs/benchmarks", ROOT / "docs/benchmarks/index.md"


def paths(folder: str, names: str) -> tuple[str, ...]:
    return tuple(f"jamp/{folder}/{name}.py" for name in names.split())


CLASSES = ("jamp/_primitives.py", "jamp/_dataflow.py")
CASTS = (
    *paths("_autocast", "arithmetic cast constructs decisions facts rules passes lower product"),
    *paths("_autocast", "matrix_product target transform"),
    *CLASSES,
)
KEPT = (*paths("_autocast", "budget flops segments recompute kept residuals"), *CLASSES)
LOW = (*CASTS, *paths("_autocast", "formats quantized quantize"))
SKIP = (*paths("_step", "loss_scaled skip finite find scale_unscale state"), *CLASSES)
SCALED = paths("_step", "scaled scaled_primitives retry")
MASTERS = paths("_step", "master_params split_masters params")
PARAMETERS = (*MASTERS, *paths("_step", "stochastic_rounding rounding block_codes quantized_state moments"))
COMPARE = paths("debug", "_align _compare _comparison _numbers _observe _parting _walk _wider")
# By the beginning of the names of files. The longest that fits counts.
MEASURED: dict[str, tuple[str, ...]] = {
    "accumulate": CASTS,
    "accuracy": (*CASTS, *SKIP),
    "budget": (*CASTS, *KEPT),
    "codes": PARAMETERS,
    "devices": SKIP,
    "digits": (*CASTS, *SKIP),
    "false_alarms": COMPARE,
    "fit": (*KEPT, *PARAMETERS),
    "float64": (*CASTS, *paths("_autocast", "wide_dot")),
    "float8": LOW,
    "gpu": (*CASTS, *KEPT, *SKIP, *MASTERS),
    "gpu_h100": (*CASTS, *KEPT),
    "gradients": LOW,
    "h200": SKIP,
    "int8": LOW,
    "large_models": (*CASTS, *KEPT),
    "memory": (*CASTS, *KEPT),
    "reinforce": (*CASTS, *SCALED),
    "retries": SCALED,
    "rounding": PARAMETERS,
    "scaled": SCALED,
    "step": (*SKIP, *MASTERS),
    "text_model": LOW,
    "tpu_v5e": SKIP,
    "train": SKIP,
    "tunix_mismatch": (*CASTS, *SCALED),
}


def measured(name: str) -> tuple[str, ...]:
    """The paths that a file of results measures."""
    return MEASURED[max((start for start in MEASURED if name.startswith(start)), key=len)]


def git(*arguments: str) -> str:
    return subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=True).stdout.strip()


def older() -> list[str]:
    """The files of results that are older than what they measure."""
    found = []
    for file in sorted(RESULTS.glob("*.json")):
        holds = known(json.loads(file.read_text()).get("same_programs")) or made(file)
        changed = git("diff", "--name-only", holds, "--", *measured(file.stem)).split()
        if any(program(then(holds, name)) != program(now(name)) for name in changed):
            found.append(file.name)
    return found


def made(file: Path) -> str:
    """The commit that measured a result."""
    wrote = lambda: git("log", "-1", "--format=%h", "--abbrev=12", "--", str(file))
    return known(json.loads(file.read_text()).get("commit")) or wrote() or "HEAD"


def known(commit: str | None) -> str | None:
    """A commit that a file holds, if this clone has it."""
    clean = str(commit).removesuffix("-dirty")
    return clean if clean in git("log", "--format=%h", "--abbrev=12").split() else None


def then(commit: str, name: str) -> str:
    """A file of a commit, or nothing if it was not there."""
    return git("show", f"{commit}:{name}") if git("ls-tree", "--name-only", commit, "--", name) else ""


def now(name: str) -> str:
    return (ROOT / name).read_text() if (ROOT / name).exists() else ""


def program(text: str) -> str:
    """The code of a Python file without its comments and docstrings. Of one that does not parse, all of it."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return text
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return ast.unparse(tree)


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report.age", description=__doc__, formatter_class=form)
    parser.add_argument("--check", action="store_true", help="fail if a result that is older is not named on the page")
    options = parser.parse_args()
    try:
        names, page = older(), PAGE.read_text()
    except (OSError, subprocess.CalledProcessError) as error:
        return print(f"The age of results is known in a whole clone only, and was not checked: {error}")
    if not options.check:
        PAGE.write_text(fill(page, "older", ", ".join(f"`{name}`" for name in names) or "None."))
        return print(*names, sep="\n")
    listed = page.partition("<!-- older -->")[2].partition("<!-- /older -->")[0]
    if missing := [name for name in names if f"`{name}`" not in listed]:
        raise SystemExit(
            f"Older than what they measure: {', '.join(missing)}. Measure again, or run this without --check."
        )


if __name__ == "__main__":
    main()
