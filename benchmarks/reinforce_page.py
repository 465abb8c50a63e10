"""The tables and the picture of docs/float16-or-bfloat16.md from the results of `benchmarks.reinforce`.

python -m benchmarks.reinforce_page
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.markdown import fill, origin, table
from benchmarks.reinforce import LEVELS, USUAL

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "float16-or-bfloat16.md"
COLORS = {"float32": "#8c8c8c", "bfloat16": "#d55e00", "float16": "#0072b2"}
AIM = 6
FIRST = 100  # steps in which a loss scale may still be looking for its value
Found = dict[str, Any]


def read() -> Found:
    found: Found = json.loads((DOCS / "benchmarks" / "reinforce.json").read_text())
    if found["quick"]:
        raise SystemExit("The results are of --quick: their numbers mean nothing. Measure without it.")
    return found


def rows(found: Found, setup: str) -> list[dict[str, Any]]:
    return [row for row in found["rows"] if row["setup"] == setup]


def of(found: Found, setup: str, when: str, key: str, way: str = USUAL) -> np.ndarray:
    """A measure at the start or the end of each seed's run."""
    return np.array([row[when][way][key] for row in rows(found, setup)])


def spread(values: np.ndarray, form: str = ".2g") -> str:
    return f"{values.mean():{form}} ({values.min():{form}} to {values.max():{form}})"


def times(found: Found, when: str, way: str = USUAL) -> np.ndarray:
    """How many times as large bfloat16's mean mismatch is, for each seed."""
    return of(found, "bfloat16", when, "mean", way) / of(found, "float16", when, "mean", way)


def skipped(found: Found, setup: str) -> tuple[int, int]:
    """Steps of all seeds, the first hundred of each run and the others."""
    steps = [step for row in rows(found, setup) for step in row["skipped"]]
    return sum(step < FIRST for step in steps), sum(step >= FIRST for step in steps)


def aims(found: Found) -> str:
    """They were set before the runs."""
    means = {
        setup: np.array([np.mean(row["means"]) for row in rows(found, setup)]) for setup in ("bfloat16", "float16")
    }
    training, lost = means["bfloat16"] / means["float16"], skipped(found, "float16")[1]
    ratios = {"before training": times(found, "start"), "in training": training, "after it": times(found, "end")}
    lowest = min(x.min() for x in ratios.values())
    measured = ", ".join(f"{when} {spread(x)}" for when, x in ratios.items())
    verdict = lambda met: "met" if met else "**missed**"
    body = [
        [f"the mismatch in float16 is at least {AIM} times smaller than in bfloat16", measured, verdict(lowest >= AIM)],
        [
            f"float16 loses no step after the first {FIRST}",
            f"{lost} lost, of all seeds, default scale",
            verdict(lost == 0),
        ],
    ]
    return table(["aim", "measured: mean (lowest to highest seed)", ""], body)


def mismatch(found: Found) -> str:
    body = []
    for setup in COLORS:
        for when in ("start", "end"):
            quantiles = of(found, setup, when, "quantiles")
            middle, high = (quantiles[:, LEVELS.index(level)].mean() for level in (0.5, 0.99))
            cells = [of(found, setup, when, "mean").mean(), middle, high, quantiles[:, -1].max()]
            ratio, answer = of(found, setup, when, "ratio"), of(found, setup, when, "sequence_ratio").mean()
            spreads = [f"{ratio[:, 0].min():.3f} to {ratio[:, 2].max():.3f}", f"{answer:.1e}"]
            kl = f"{of(found, setup, when, 'kl').mean():.0e}"
            body.append([f"{setup}, {when}", *(f"{x:.1e}" if x else "0" for x in cells), kl, *spreads])
    return table(["", "mean", "median", "99 %", "largest", "KL", "ratios", "ratio of an answer, std"], body)


def factors(found: Found) -> str:
    body = []
    for way in rows(found, "float16")[0]["end"]:
        means = []
        for setup in ("bfloat16", "float16"):
            largest = of(found, setup, "end", "quantiles", way).max()
            means += [f"{of(found, setup, 'end', 'mean', way).mean():.1e}", f"{largest:.1e}"]
        ratios = [times(found, when, way) for when in ("start", "end")]
        form = lambda ratio: ".2g" if ratio.min() < 100 else ".0f"
        body.append([way, *means, *("below 1" if x.max() < 1 else spread(x, form(x)) for x in ratios)])
    head = ["bfloat16, end", "largest", "float16, end", "largest", "times, start", "times, end"]
    return table(["sampler / trainer", *head], body)


def training(found: Found) -> str:
    body = []
    base = of(found, "float32", "end", "reward")
    for setup in dict.fromkeys(row["setup"] for row in found["rows"]):
        start, end = (of(found, setup, when, "reward") for when in ("start", "end"))
        compared = "" if setup == "float32" else f"{(end - base).mean():+.3f} ± {(end - base).std(ddof=1):.3f}"
        exponents = [math.log2(row["final_scale"]) for row in rows(found, setup)]
        scale = " to ".join(f"2^{x:g}" for x in sorted({min(exponents), max(exponents)}))
        scale = scale if setup.startswith("float16") else "none"
        body.append(
            [setup, spread(start, ".2f"), spread(end, ".2f"), compared, *map(str, skipped(found, setup)), scale]
        )
    return table(
        ["", "reward, start", "end", "minus float32's", "skipped, steps 0 to 99", "skipped, later", "final scale"], body
    )


def draw(found: Found) -> Figure:
    """Left, the share of tokens beyond a difference. Right, the rewards of all seeds."""
    figure = Figure(figsize=(8, 3.8), dpi=100, layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2)
    for setup, color in COLORS.items():
        width = 4 if setup == "float32" else 1.8
        for row in rows(found, setup):
            quantiles = row["end"][USUAL]["quantiles"]
            left.loglog(quantiles[1:-1], 1 - np.array(LEVELS[1:-1]), color=color, linewidth=1.2, alpha=0.7)
        rewards = np.array([row["rewards"] for row in rows(found, setup)])
        smooth = np.array([np.convolve(x, np.ones(20) / 20, "valid") for x in rewards])
        steps = np.arange(smooth.shape[1]) + 20
        right.plot(steps, smooth.mean(0), color=color, linewidth=width, label=setup)
        right.fill_between(steps, smooth.min(0), smooth.max(0), color=color, alpha=0.15, linewidth=0)
    left.set(xlabel="|difference of log-probabilities|", ylabel="share of tokens with a larger one")
    right.set(xlabel="step", ylabel="reward, mean of 20 steps", ylim=(0, 1))
    right.legend(frameon=False, loc="lower right")
    for axes in (left, right):
        axes.grid(alpha=0.25)
    return figure


TABLES = {"aims": aims, "mismatch": mismatch, "factors": factors, "training": training, "about": origin}


def fill_page(page: str, found: Found) -> str:
    for name, make in TABLES.items():
        page = fill(page, name, make(found))
    return page


if __name__ == "__main__":
    results = read()
    PAGE.write_text(fill_page(PAGE.read_text(), results))
    draw(results).savefig(DOCS / "images" / "float16_or_bfloat16.png")
