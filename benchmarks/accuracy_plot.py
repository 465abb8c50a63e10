"""The pictures of the accuracy study, made of its JSON."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from benchmarks.accuracy_report import HEAD, Row, last, names, select

# Told apart also by who cannot tell red from green; grey is float32.
COLORS = ["#8c8c8c", "#009e73", "#d55e00", "#cc79a7", "#0072b2", "#e69f00", "#56b4e9", "#000000", "#a0522d"]
COLORS += ["#8b0000", "#ff8c69"]  # float16 without a loss scale, in smaller batches
DASHED = [(0, (6, 2)), (0, (1, 1.5)), (0, (4, 1.5, 1, 1.5)), (0, (2, 2)), (0, (8, 3)), (0, (1, 4))]  # lie on others
STYLES = ["-", "-", "-", *DASHED, "-", "-"]
SETTINGS = {"dpi": 100, "facecolor": "white"}  # opaque: it stands on light and dark pages


def draw(found: dict[str, Any], folder: Path) -> None:
    """A picture for each task, and one of the loss scales after a bad start."""
    folder.mkdir(parents=True, exist_ok=True)
    for task in names(select(found["rows"], setup="float32"), "task"):
        curves(found["rows"], task).savefig(folder / f"accuracy_{task.replace(' ', '_')}.png", **SETTINGS)
    starts(found["rows"]).savefig(folder / "accuracy_starts.png", **SETTINGS)


def curves(rows: list[Row], task: str) -> Figure:
    """The loss over the steps, median and spread of the seeds; below, the final loss of each seed."""
    rows = select(rows, task=task, start="default")
    setups = names(rows, "setup")
    figure = Figure(figsize=(8, 7.5), layout="constrained")
    top, bottom = figure.subplots(2, height_ratios=[1.1, 1])
    for i, name in enumerate(setups):
        chosen = select(rows, setup=name)
        losses = np.array([row["loss"] for row in chosen], float)
        color, style = COLORS[i], STYLES[i]
        width = 5 if name == "float32" else 1.8
        top.plot(chosen[0]["steps"], np.median(losses, 0), color=color, linestyle=style, linewidth=width, label=name)
        top.fill_between(
            chosen[0]["steps"], losses.min(0), losses.max(0), color=color, alpha=0.3 / len(setups) ** 0.5, linewidth=0
        )
        bottom.plot(last(chosen, "loss"), np.full(len(chosen), i), "o", color=color, alpha=0.7, markersize=7)
    base = last(select(rows, setup="float32"), "loss")
    bottom.axvspan(base.min(), base.max(), color=COLORS[0], alpha=0.25, linewidth=0)
    bottom.set(yticks=range(len(setups)), yticklabels=setups, ylim=(len(setups) - 0.5, -0.5))
    bottom.set(xlabel=f"final {HEAD[task]}, one dot a seed; shaded: float32's seeds")
    top.set(ylabel=f"{HEAD[task]} (nats)", xlabel="step", title=f"The {task}")
    place = ("upper right", (1, 1)) if base.min() < 0.01 else ("center right", (1, 0.46))  # where no line runs
    top.legend(loc=place[0], bbox_to_anchor=place[1], fontsize="small", frameon=False, ncols=2)
    if base.min() < 0.01:
        top.set_yscale("log")
        bottom.set_xscale("log")
        bottom.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        bottom.xaxis.set_major_formatter("{x:.0e}")
        bottom.xaxis.set_minor_formatter(NullFormatter())
    for axes in (top, bottom):
        axes.grid(alpha=0.25)
    return figure


def starts(rows: list[Row]) -> Figure:
    """The loss scale of each seed after a bad start; a mark where a step was skipped."""
    rows = [row for row in rows if row["start"] != "default"]
    tasks, kinds = names(rows, "task"), names(rows, "start")
    figure = Figure(figsize=(8, 3 * len(tasks) + 0.5), layout="constrained")
    grid = figure.subplots(len(tasks), len(kinds), squeeze=False, sharex="row")
    for task, line in zip(tasks, grid, strict=True):
        for start, axes in zip(kinds, line, strict=True):
            chosen = select(rows, task=task, start=start)
            for name, color in zip(names(chosen, "setup"), ("#d55e00", "#009e73", "#0072b2"), strict=True):
                for i, row in enumerate(select(chosen, setup=name)):
                    label = name if i == 0 else None
                    axes.plot(row["steps"], row["log2_scale"], color=color, linewidth=1.3, alpha=0.7, label=label)
            axes.set(title=f"{task}, started {start}", xlabel="step")
            axes.grid(alpha=0.25)
            axes.yaxis.set_major_locator(MaxNLocator(integer=True))
            axes.yaxis.set_major_formatter("$2^{{{x:.0f}}}$")
        line[0].set_ylabel("loss scale")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    return figure
