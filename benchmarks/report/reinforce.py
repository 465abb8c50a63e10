"""Tables of REINFORCE in float16 and in bfloat16."""

import math
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from benchmarks.accuracy.reinforce import LEVELS, USUAL
from benchmarks.record import Rows
from benchmarks.report.accuracy import scales
from benchmarks.report.markdown import names, origin, select, table

AIM = 6
FIRST = 100  # steps in which a loss scale may still be looking for its value
Found = dict[str, Any]


def rows(found: Found, setup: str) -> Rows:
    return select(found["rows"], setup=setup)


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
    large, small = ([np.mean(row["means"]) for row in rows(found, setup)] for setup in ("bfloat16", "float16"))
    training, lost = np.divide(large, small), skipped(found, "float16")[1]
    ratios = {"before training": times(found, "start"), "in training": training, "after it": times(found, "end")}
    measured = ", ".join(f"{when} {spread(x)}" for when, x in ratios.items())
    verdict = lambda met: "met" if met else "**missed**"
    first = f"the mismatch in float16 is at least {AIM} times smaller than in bfloat16", measured
    second = f"float16 loses no step after the first {FIRST}", f"{lost} lost, of all seeds, default scale"
    body = [[*first, verdict(min(x.min() for x in ratios.values()) >= AIM)], [*second, verdict(lost == 0)]]
    return table(["aim", "measured: mean (lowest to highest seed)", ""], body)


def mismatch(found: Found) -> str:
    body = []
    for setup, when in product(("float32", "bfloat16", "float16"), ("start", "end")):
        measure = partial(of, found, setup, when)
        quantiles, ratio = measure("quantiles"), measure("ratio")
        middle, high = (quantiles[:, LEVELS.index(level)].mean() for level in (0.5, 0.99))
        cells = [measure("mean").mean(), middle, high, quantiles[:, -1].max()]
        spreads = f"{ratio[:, 0].min():.3f} to {ratio[:, 2].max():.3f}", f"{measure('sequence_ratio').mean():.1e}"
        kl = f"{measure('kl').mean():.0e}"
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
    head = ["", "reward, start", "end", "minus float32's", "skipped, steps 0 to 99", "skipped, later", "final scale"]
    body = []
    base = of(found, "float32", "end", "reward")
    for setup in names(found["rows"], "setup"):
        start, end = (of(found, setup, when, "reward") for when in ("start", "end"))
        compared = "" if setup == "float32" else f"{(end - base).mean():+.3f} ± {(end - base).std(ddof=1):.3f}"
        exponents = [{"final_log2_scale": math.log2(row["final_scale"])} for row in rows(found, setup)]
        scale = scales(exponents) if setup.startswith("float16") else "none"
        lost = map(str, skipped(found, setup))
        body.append([setup, spread(start, ".2f"), spread(end, ".2f"), compared, *lost, scale])
    return table(head, body)


TABLES = {"aims": aims, "mismatch": mismatch, "factors": factors, "training": training, "about": origin}
