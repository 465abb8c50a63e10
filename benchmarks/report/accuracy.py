"""Tables of the accuracy study, of its overflows, of the text model and of bfloat16 parameters."""

import math
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from benchmarks.record import Rows
from benchmarks.report.markdown import names, origin, pivot, select, table

Row = Found = dict[str, Any]
MARGIN = 0.01  # of accuracy
T = {2: 6.314, 3: 2.920, 4: 2.353, 5: 2.132}  # of Student's distribution: 95 % lie below, by the number of seeds
FEW = 0.01  # the share of gradients lost up to which a loss scale counts as right
HEAD = {"digits": "training loss", "digits in batches": "training loss", "language model": "validation loss"}

aligned = partial(table, rule="---:")


def last(rows: Rows, name: str) -> np.ndarray:
    """The last measurement of each seed; nan where it was not finite."""
    return np.array([row[name][-1] for row in rows], float)


def results(found: Found, task: str) -> str:
    """One row for each way to compute, beside float32."""
    rows = select(found["rows"], task=task, start="default")
    base = select(rows, setup="float32")
    head = ["", HEAD[task], "lowest to highest", "mean among float32's", "against float32, seed by seed", "accuracy"]
    head += ["steps to float32's loss", "seconds", "skipped", "final scale"]
    return aligned(head, [_result(name, select(rows, setup=name), base) for name in names(rows, "setup")])


def _result(name: str, rows: Rows, base: Rows) -> list[str]:
    loss, base_loss = last(rows, "loss"), last(base, "loss")
    number = lambda x: f"{x:.3f}" if abs(x) >= 0.01 else f"{x:.1e}"
    low, high = base_loss.min(), base_loss.max()
    among = "yes" if low <= loss.mean() <= high else "below" if loss.mean() < low else "no"
    steps = [steps_to(row, high) for row in rows]
    reached = [(x, row["seconds_per_step"] * x) for x, row in zip(steps, rows, strict=True) if x]
    few = "" if len(reached) in (0, len(rows)) else f" ({len(reached)} of {len(rows)} seeds)"
    mean_steps, seconds = np.mean(reached, axis=0) if reached else (math.nan, math.nan)
    return [
        name,
        _spread(loss),
        f"{number(loss.min())} to {number(loss.max())}",
        among,
        "0" if name == "float32" else _spread(loss - base_loss[: len(loss)], sign="+"),
        _points(last(rows, "accuracy")),
        f"{mean_steps:.0f}{few}" if reached else "never",
        f"{seconds:.1f}" if reached else "",
        f"{np.mean([len(row['skipped']) for row in rows]):.1f}",
        scales(rows),
    ]


def steps_to(row: Row, loss: float) -> int | None:
    """The step of the first evaluation at or below a loss."""
    return next((step for step, x in zip(row["steps"], row["loss"], strict=True) if x is not None and x <= loss), None)


def scales(rows: Rows) -> str:
    """2^16, or the lowest and the highest of the seeds."""
    exponents = [row["final_log2_scale"] for row in rows]
    power = lambda exponent: f"2^{exponent:g}" if exponent else "1"
    return " to ".join(map(power, sorted({min(exponents), max(exponents)})))


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


def _points(accuracy: np.ndarray) -> str:
    return f"{100 * accuracy.mean():.2f} ± {100 * deviation(accuracy):.2f} %"


def gradients(found: Found, task: str) -> str:
    """What becomes of the gradients, without the loss scale and with it, at the end of training."""
    rows = select(found["rows"], task=task, start="default")
    head = ["", "lost in the backward pass", "with the scale", "error of the gradient", "with the scale"]
    head += ["below float16's normal numbers", "with the scale"]
    body = []
    for name in [name for name in names(rows, "setup") if name not in ("float32", "bfloat16")]:
        at_end = lambda what, chosen=select(rows, setup=name): last(chosen, what)
        low = [at_end(f"zero_{which}") + at_end(f"subnormal_{which}") for which in ("unscaled", "scaled")]
        pairs = [at_end(f"{what}_{which}") for what in ("lost", "error") for which in ("unscaled", "scaled")]
        shares = [x.mean() for x in (*pairs, *low)]
        body.append([name, *(f"{100 * x:.1f} %" if math.isfinite(x) else "not finite" for x in shares)])
    return aligned(head, body)


def starts(found: Found, task: str) -> str:
    """What a start far from the right loss scale costs."""
    rows = [row for row in select(found["rows"], task=task) if row["start"] != "default"]
    head = ["start", "loss scale", "steps skipped", "before the first one applied", "scale too low", HEAD[task]]
    body = []
    for start, name in product(names(rows, "start"), names(rows, "setup")):
        chosen = select(rows, start=start, setup=name)
        skipped, first = np.mean([(len(row["skipped"]), first_applied(row)) for row in chosen], axis=0)
        low = f"{100 * np.mean([too_low(row) for row in chosen]):.0f} % of evaluations"
        cells = f"{skipped:.1f}", f"{first:.1f}", low, _spread(last(chosen, "loss")), scales(chosen)
        body.append([start, name, *cells])
    return aligned([*head, "final scale"], body)


def first_applied(row: Row) -> int:
    """How many steps were skipped before the first one was applied."""
    return next(i for i, step in enumerate([*row["skipped"], math.inf]) if step != i)


def too_low(row: Row) -> float:
    """The share of evaluations at which more than a few gradients are lost in spite of the loss scale."""
    return float(np.mean([lost > FEW for lost in row["lost_scaled"]]))


def about(found: Found) -> str:
    """The command, the date, the machine and the versions."""
    machine = found["machine"]
    versions = ", ".join(f"{name} {found['versions'][name]}" for name in ("python", "jax", "jaxlib", "optax", "jamp"))
    return (
        f"`{found['command']}`, {found['date']}, on {machine['cores']} core of {machine['processor']} "
        f"(JAX device: {machine['device']}) with {versions}."
    )


def overflow(found: Found) -> str:
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
            low, high = interval(accuracy - base)
            compared = f"{100 * low:+.2f} to {100 * high:+.2f} points", "yes" if is_within(low, high) else "**no**"
            compared = compared if setup != "float32" else ("", "")
            body.append([setup, _points(accuracy), *compared, skipped, scales(chosen)])
        parts.append(table(head, body))
    return "\n\n".join([*parts, about(found)])


def interval(differences: np.ndarray) -> tuple[float, float]:
    """The 90 % confidence interval of a mean."""
    half = T[len(differences)] * deviation(differences) / len(differences) ** 0.5
    return float(differences.mean() - half), float(differences.mean() + half)


def is_within(low: float, high: float) -> bool:
    return low > -MARGIN and high < MARGIN


def text_model(found: Found) -> str:
    head = ["seed", "float32's held-out loss", "float16's", "difference", "steps skipped", "final loss scale"]
    full, rows = (select(found["rows"], name=name) for name in ("float32", "float16"))
    base, half = last(full, "held_out_loss"), last(rows, "held_out_loss")
    body = [
        [str(row["seed"]), f"{x:.4f}", f"{y:.4f}", f"{y - x:+.4f}", str(len(row["skipped"])), f"{scale:.0f}"]
        for row, x, y, scale in zip(rows, base, half, 2 ** last(rows, "log2_scale"), strict=True)
    ]
    low, high = interval(half - base)
    after = (
        f"Nats a byte. Mean: float32 {base.mean():.4f}, float16 {half.mean():.4f}. The mean difference is "
        f"{np.mean(half - base):+.4f}, with a 90 % interval of {low:+.4f} to {high:+.4f}. Float32's seeds are up to "
        f"{np.ptp(base):.4f} apart."
    )
    return f"{table(head, body)}\n\n{after}\n\n{origin(found)}"


def rounding_optimizers(found: Found) -> str:
    return pivot(found["rows"], "optimizer", "way", lambda rows: f"{rows[0]['loss']:.3f}")


def weight_gradients(found: Found) -> str:
    """float16 with weight gradients in 16 bit and in float32: the loss scale, the steps skipped, and the errors."""
    head = ["float16", "final scale, gradients in 16 bit", "in float32", "powers of two more, by seed"]
    body = []
    for task in names(found["rows"], "task"):
        low, wide = (select(found["rows"], task=task, setup=name) for name in ("16 bit", "float32"))
        more = [f"{y['final_log2_scale'] - x['final_log2_scale']:.0f}" for x, y in zip(low, wide, strict=True)]
        skipped = [np.mean([len(row["skipped"]) for row in rows]) for rows in (low, wide)]
        cells = (f"{scales(rows)}, {n:.1f} skipped" for rows, n in zip((low, wide), skipped, strict=True))
        body.append([task, *cells, ", ".join(more)])
    return f"{table(head, body)}\n\n{weight_errors(found)}\n\n{origin(found)}"


def weight_errors(found: Found) -> str:
    """The lowest and the highest of the weights."""
    head = [
        "error of a weight's gradient",
        "one device, in 16 bit",
        "in float32",
        "eight devices, in 16 bit",
        "in float32",
    ]
    body = []
    for task, dtype in product(names(found["errors"], "task"), names(found["errors"], "dtype")):
        rows = [select(found["errors"], task=task, dtype=dtype, setup=name) for name in ("16 bit", "float32")]
        values = ([row[key] for row in some] for key in ("one device", "eight devices") for some in rows)
        body.append([f"{task}, {dtype}", *(f"{min(x):.1e} to {max(x):.1e}" for x in values)])
    return table(head, body)


def accumulate(found: Found) -> str:
    """The three uses of the category "accumulate"."""
    head = ["product", "error: 16 bit", "accumulate", "float32", "of rounded operands: 16 bit", "accumulate"]
    head += ["memory, bytes: H200", "TPU v5e"]
    body = []
    for use in names(found["rows"], "use"):
        rows = {row["category"]: row for row in select(found["rows"], use=use)}
        errors = [f"{rows[name]['error']:.1e}" for name in ("compute", "accumulate", "float32")]
        rounded = [f"{rows[name]['error, rounded operands']:.1e}" for name in ("compute", "accumulate")]
        costs = {
            row["target"]: f"{row['temporary']:.2f}, {row['main_memory']:.2f}"
            for row in select(found["costs"], use=use)
        }
        body.append([{"head": "logits"}.get(use, use), *errors, *rounded, costs["h200"], costs["tpu"]])
    return f"{table(head, body)}\n\n{origin(found)}"


TABLES: dict[str, Any] = {"about": about}
for _task in HEAD:
    _mark = _task.replace(" ", "-")
    TABLES |= {_mark: partial(results, task=_task), f"{_mark}-gradients": partial(gradients, task=_task)}
    TABLES |= {f"{_mark}-starts": partial(starts, task=_task)} if _task != "digits" else {}
