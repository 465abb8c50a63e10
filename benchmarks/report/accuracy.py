"""Tables of the accuracy study, of its overflows and of the text model."""

import math
from typing import Any

import numpy as np

from benchmarks.record import Rows
from benchmarks.report import markdown
from benchmarks.report.markdown import names, origin, select

Row = dict[str, Any]
MARGIN = 0.01  # of accuracy
T = {2: 6.314, 3: 2.920, 4: 2.353, 5: 2.132}  # of Student's distribution: 95 % lie below, by the number of seeds
FEW = 0.01  # the share of gradients lost up to which a loss scale counts as right
HEAD = {"digits": "training loss", "digits in batches": "training loss", "language model": "validation loss"}


def last(rows: Rows, name: str) -> np.ndarray:
    """The last measurement of each seed; nan where it was not finite."""
    return np.array([row[name][-1] for row in rows], float)


def table(head: list[str], body: list[list[str]]) -> str:
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *body))


def results(rows: Rows, task: str) -> str:
    """One row for each way to compute, beside float32."""
    rows = select(rows, task=task, start="default")
    base = select(rows, setup="float32")
    head = ["", HEAD[task], "lowest to highest", "mean among float32's", "against float32, seed by seed", "accuracy"]
    head += ["steps to float32's loss", "seconds", "skipped", "final scale"]
    return table(head, [_result(name, select(rows, setup=name), base) for name in names(rows, "setup")])


def _result(name: str, rows: Rows, base: Rows) -> list[str]:
    loss, accuracy = last(rows, "loss"), last(rows, "accuracy")
    low, high = last(base, "loss").min(), last(base, "loss").max()
    among = "yes" if low <= loss.mean() <= high else "below" if loss.mean() < low else "no"
    difference = loss - last(base, "loss")[: len(loss)]
    steps = [steps_to(row, high) for row in rows]
    reached = [(x, row["seconds_per_step"] * x) for x, row in zip(steps, rows, strict=True) if x]
    few = "" if len(reached) in (0, len(rows)) else f" ({len(reached)} of {len(rows)} seeds)"
    mean_steps, seconds = np.mean(reached, axis=0) if reached else (math.nan, math.nan)
    return [
        name,
        _spread(loss),
        f"{_number(loss.min())} to {_number(loss.max())}",
        among,
        "0" if name == "float32" else _spread(difference, sign="+"),
        f"{100 * accuracy.mean():.2f} ± {100 * deviation(accuracy):.2f} %",
        f"{mean_steps:.0f}{few}" if reached else "never",
        f"{seconds:.1f}" if reached else "",
        f"{np.mean([len(row['skipped']) for row in rows]):.1f}",
        scales(rows),
    ]


def steps_to(row: Row, loss: float) -> int | None:
    """The step of the first evaluation at or below a loss."""
    below = [step for step, x in zip(row["steps"], row["loss"], strict=True) if x is not None and x <= loss]
    return below[0] if below else None


def scales(rows: Rows) -> str:
    """2^16, or the lowest and the highest of the seeds."""
    low, high = (f(row["final_log2_scale"] for row in rows) for f in (min, max))
    return _power(low) if low == high else f"{_power(low)} to {_power(high)}"


def _power(exponent: float) -> str:
    return f"2^{exponent:g}" if exponent else "1"


def _spread(x: np.ndarray, sign: str = "") -> str:
    mean, spread = x.mean(), deviation(x)
    if not math.isfinite(mean):
        return "not finite"
    if abs(mean) + spread >= 0.001:
        return f"{mean:{sign}.4f} ± {spread:.4f}"
    return f"{mean:{sign}.1e} ± {spread:.0e}"


def deviation(x: np.ndarray) -> float:
    """The standard deviation of the seeds' population; 0 of one seed."""
    return float(x.std(ddof=1)) if len(x) > 1 else 0.0


def _number(x: float) -> str:
    return f"{x:.3f}" if abs(x) >= 0.01 else f"{x:.1e}"


def gradients(rows: Rows, task: str) -> str:
    """What becomes of the gradients, without the loss scale and with it, at the end of training."""
    rows = [row for row in select(rows, task=task, start="default") if row["setup"] not in ("float32", "bfloat16")]
    head = ["", "lost in the backward pass", "with the scale", "error of the gradient", "with the scale"]
    head += ["below float16's normal numbers", "with the scale"]
    body = []
    for name in names(rows, "setup"):
        chosen = select(rows, setup=name)
        low = [last(chosen, f"zero_{which}") + last(chosen, f"subnormal_{which}") for which in ("unscaled", "scaled")]
        pairs = [last(chosen, f"{what}_{which}") for what in ("lost", "error") for which in ("unscaled", "scaled")]
        body.append([name, *(_percent(x.mean()) for x in (*pairs, *low))])
    return table(head, body)


def _percent(share: float) -> str:
    return "not finite" if not math.isfinite(share) else f"{100 * share:.1f} %" if share >= 5e-4 else "0.0 %"


def starts(rows: Rows, task: str) -> str:
    """What a start far from the right loss scale costs."""
    rows = [row for row in select(rows, task=task) if row["start"] != "default"]
    head = ["start", "loss scale", "steps skipped", "before the first one applied", "scale too low", HEAD[task]]
    body = []
    for start in names(rows, "start"):
        for name in names(rows, "setup"):
            chosen = select(rows, start=start, setup=name)
            if chosen:
                skipped, first, low = (
                    [f(row) for row in chosen] for f in (lambda row: len(row["skipped"]), first_applied, too_low)
                )
                cells = f"{np.mean(skipped):.1f}", f"{np.mean(first):.1f}", f"{100 * np.mean(low):.0f} % of evaluations"
                body.append([start, name, *cells, _spread(last(chosen, "loss")), scales(chosen)])
    return table([*head, "final scale"], body)


def first_applied(row: Row) -> int:
    """How many steps were skipped before the first one was applied."""
    return next(i for i, step in enumerate([*row["skipped"], math.inf]) if step != i)


def too_low(row: Row) -> float:
    """The share of evaluations at which more than a few gradients are lost in spite of the loss scale."""
    return float(np.mean([lost > FEW for lost in row["lost_scaled"]]))


def about(found: dict[str, Any]) -> str:
    """The command, the date, the machine and the versions."""
    machine = found["machine"]
    versions = ", ".join(f"{name} {found['versions'][name]}" for name in ("python", "jax", "jaxlib", "optax", "jamp"))
    return (
        f"`{found['command']}`, {found['date']}, on {machine['cores']} core of {machine['processor']} "
        f"(JAX device: {machine['device']}) with {versions}."
    )


def sections(found: dict[str, Any]) -> dict[str, str]:
    """What stands between the marks of the page, by name."""
    rows, made = found["rows"], {"about": about(found)}
    for task in names(select(rows, setup="float32"), "task"):
        key = task.replace(" ", "-")
        made |= {key: results(rows, task), f"{key}-gradients": gradients(rows, task)}
        if any(row["start"] != "default" for row in select(rows, task=task)):
            made[f"{key}-starts"] = starts(rows, task)
    return made


def overflow(found: dict[str, Any]) -> str:
    """A table of each task, beside float32.

    Equivalence is decided by a margin that was set before the runs. From each seed's accuracy on held-out digits, that
    of float32 is subtracted. The 90 % confidence interval of the mean has to lie within plus and minus one percentage
    point (two one-sided t-tests at 5 %).
    """
    parts = []
    for task in names(found["rows"], "task"):
        rows = select(found["rows"], task=task)
        base = last(select(rows, setup="float32"), "accuracy")
        head = [task, "accuracy", "minus float32's, 90 % interval", "equivalent", "skipped, by seed", "final scale"]
        body = []
        for setup in names(rows, "setup"):
            chosen = select(rows, setup=setup)
            accuracy, skipped = last(chosen, "accuracy"), ", ".join(str(len(row["skipped"])) for row in chosen)
            spread = f"{100 * accuracy.mean():.2f} ± {100 * deviation(accuracy):.2f} %"
            compared = ["", ""]
            if setup != "float32":
                low, high = interval(accuracy - base)
                compared = [
                    f"{100 * low:+.2f} to {100 * high:+.2f} points",
                    "yes" if is_within(low, high) else "**no**",
                ]
            body.append([setup, spread, *compared, skipped, scales(chosen)])
        parts.append(markdown.table(head, body))
    return "\n\n".join([*parts, about(found)])


def interval(differences: np.ndarray) -> tuple[float, float]:
    """The 90 % confidence interval of a mean."""
    half = T[len(differences)] * deviation(differences) / len(differences) ** 0.5
    return float(differences.mean() - half), float(differences.mean() + half)


def is_within(low: float, high: float) -> bool:
    return low > -MARGIN and high < MARGIN


def text_model(found: dict[str, Any]) -> str:
    head = ["seed", "float32's held-out loss", "float16's", "difference", "steps skipped", "final loss scale"]
    pairs = list(zip(*(select(found["rows"], name=name) for name in ("float32", "float16")), strict=True))
    body = [
        [
            str(base["seed"]),
            f"{base['held_out_loss'][-1]:.4f}",
            f"{half['held_out_loss'][-1]:.4f}",
            f"{half['held_out_loss'][-1] - base['held_out_loss'][-1]:+.4f}",
            str(len(half["skipped"])),
            f"{2 ** half['log2_scale'][-1]:.0f}",
        ]
        for base, half in pairs
    ]
    base, half = (last(select(found["rows"], name=name), "held_out_loss") for name in ("float32", "float16"))
    low, high = interval(half - base)
    after = (
        f"Nats a byte. Mean: float32 {base.mean():.4f}, float16 {half.mean():.4f}. The mean difference is "
        f"{np.mean(half - base):+.4f}, with a 90 % interval of {low:+.4f} to {high:+.4f}. Float32's seeds are up to "
        f"{np.ptp(base):.4f} apart."
    )
    return f"{markdown.table(head, body)}\n\n{after}\n\n{origin(found)}"
