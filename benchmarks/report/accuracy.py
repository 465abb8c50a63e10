"""Tables of the accuracy study, of its overflows and of the text model."""

from typing import Any

import numpy as np

from benchmarks.accuracy.text_model import MARGIN as TEXT_MARGIN
from benchmarks.record import Rows
from benchmarks.report.markdown import names, origin, select, table

Row = Found = dict[str, Any]
SHOWN = ("bfloat16", "float16, unscaled", "float16, dynamic", "float16, adaptive", "autocast float16, dynamic")
T = {2: 6.314, 3: 2.920, 4: 2.353, 5: 2.132}  # of Student's distribution: 95 % lie below, by the number of seeds
TASKS = ("digits", "digits in batches", "language model")


def last(rows: Rows, name: str) -> np.ndarray:
    """The last measurement of each seed; nan where it was not finite."""
    return np.array([row[name][-1] for row in rows], float)


def small(found: Found) -> str:
    """Each way to compute: the final loss as a factor of float32's, seed by seed, and the gradients that became 0."""
    rows = [row for row in found["rows"] if row["start"] == "default"]
    base = {(row["task"], row["seed"]): row["loss"][-1] for row in select(rows, setup="float32")}
    body = []
    for setup in names(rows, "setup"):
        chosen = [select(rows, setup=setup, task=task) for task in TASKS]
        if setup in SHOWN:
            factors = [np.log([row["loss"][-1] / base[row["task"], row["seed"]] for row in some]) for some in chosen]
            cells = [ratio(np.exp([x.mean(), *interval(x)])) for x in factors]
            body.append([setup, *cells, *(lost(some) for some in chosen)])
    rows_of = table(["", *TASKS, *(f"gradients lost: {task}" for task in TASKS)], body)
    return f"{rows_of}\n\n{origin(found)}"


def ratio(x: np.ndarray) -> str:
    """A ratio and its interval."""
    return "{:#.3g} ({:#.3g}-{:#.3g})".format(*x)


def lost(rows: Rows) -> str:
    """The mean over seeds and over the evaluations of a run, and the range."""
    shares = 100 * np.array([row["lost_scaled"] for row in rows], float)
    return f"{np.nanmean(shares):.0f} ({np.nanmin(shares):.0f}-{np.nanmax(shares):.0f}) %"


def interval(differences: np.ndarray) -> tuple[float, float]:
    """The 90 % confidence interval of a mean."""
    half = T[len(differences)] * differences.std(ddof=1) / len(differences) ** 0.5
    return float(differences.mean() - half), float(differences.mean() + half)


def text_model(found: Found) -> str:
    """Each format beside float32, and whether the interval of the difference lies within the margin."""
    head = ["", "held-out loss, nats a byte, by seed", "minus float32's, 90 % interval", "margin", "equivalent"]
    head += ["steps skipped, by seed", "final scale"]
    body = []
    for name in names(found["rows"]):
        rows = sorted(select(found["rows"], name=name), key=lambda row: row["seed"])
        base = {row["seed"]: row["loss"] for row in select(found["rows"], name="float32")}
        skipped = ", ".join(str(len(row["skipped"])) for row in rows)
        cells = [name, ", ".join(f"{row['loss']:.4f}" for row in rows)]
        if len(rows) > 1 and (margin := TEXT_MARGIN.get(name)):
            low, high = interval(np.array([row["loss"] - base[row["seed"]] for row in rows]))
            within = "yes" if max(-low, high) < margin else "**not shown**"
            cells += [f"{low:+.4f} to {high:+.4f}", f"{margin}", within]
        else:
            cells += ["", "", ""]
        final = sorted({round(row["log2_scale"][-1]) for row in rows})
        cells += [skipped, " to ".join(f"2^{x}" for x in {final[0]: 0, final[-1]: 0})] if final[-1] else ["", ""]
        body.append(cells)
    after = (
        f"{found['bytes_read'] / 1e6:.1f} of {found['training_bytes'] / 1e6:.1f} MB are read. A table of trigrams of "
        f"the same training text has {found['trigrams']:.3f} nats a byte on all {found['held_out_bytes'] / 1e6:.1f} "
        "MB held out."
    )
    processors = " and ".join(names(found["rows"], "processor"))
    source = origin(found | {"machine": found["machine"] | {"processor": processors}})
    return f"{table(head, body)}\n\n{after}\n\n{source}"
