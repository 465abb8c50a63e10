"""Pictures of the results, 800 pixels wide."""

from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from benchmarks.accuracy.reinforce import LEVELS, USUAL
from benchmarks.record import Rows
from benchmarks.report.accuracy import HEAD, last
from benchmarks.report.markdown import TITLES, names, select
from benchmarks.report.step import largest
from benchmarks.step.peers import AGAIN
from benchmarks.step.update import SCALED, SKIPPED
from benchmarks.timing import equal

# Told apart also by who cannot tell red from green; grey is float32.
COLORS = ["#8c8c8c", "#009e73", "#d55e00", "#cc79a7", "#0072b2", "#e69f00", "#56b4e9", "#000000", "#a0522d"]
COLORS += ["#8b0000", "#ff8c69"]  # float16 without a loss scale, in smaller batches
DASHED = [(0, (6, 2)), (0, (1, 1.5)), (0, (4, 1.5, 1, 1.5)), (0, (2, 2)), (0, (8, 3)), (0, (1, 4))]  # lie on others
STYLES = ["-", "-", "-", *DASHED, "-", "-"]
DTYPES = {"float32": "#8c8c8c", "bfloat16": "#d55e00", "float16": "#0072b2"}


def losses(rows: Rows, task: str) -> Figure:
    """The loss over the steps, median and spread of the seeds; below, the final loss of each seed."""
    rows = select(rows, task=task, start="default")
    setups = names(rows, "setup")
    figure = Figure(figsize=(8, 7.5), layout="constrained")
    top, bottom = figure.subplots(2, height_ratios=[1.1, 1])
    for i, name in enumerate(setups):
        chosen = select(rows, setup=name)
        steps, loss = chosen[0]["steps"], np.array([row["loss"] for row in chosen], float)
        style = {"color": COLORS[i], "linestyle": STYLES[i], "linewidth": 5 if name == "float32" else 1.8}
        top.plot(steps, np.median(loss, 0), label=name, **style)
        shade = {"color": COLORS[i], "alpha": 0.3 / len(setups) ** 0.5, "linewidth": 0}
        top.fill_between(steps, loss.min(0), loss.max(0), **shade)
        bottom.plot(loss[:, -1], np.full(len(chosen), i), "o", color=COLORS[i], alpha=0.7, markersize=7)
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
    top.grid(alpha=0.25)
    bottom.grid(alpha=0.25)
    return figure


def starts(rows: Rows) -> Figure:
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


def reinforce(rows: Rows) -> Figure:
    """Left, the share of tokens beyond a difference. Right, the rewards of all seeds."""
    figure = Figure(figsize=(8, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    for setup, color in DTYPES.items():
        for row in select(rows, setup=setup):
            quantiles = row["end"][USUAL]["quantiles"]
            left.loglog(quantiles[1:-1], 1 - np.array(LEVELS[1:-1]), color=color, linewidth=1.2, alpha=0.7)
        rewards = np.array([row["rewards"] for row in select(rows, setup=setup)])
        smooth = np.array([np.convolve(x, np.ones(20) / 20, "valid") for x in rewards])
        steps = np.arange(smooth.shape[1]) + 20
        right.plot(steps, smooth.mean(0), color=color, linewidth=4 if setup == "float32" else 1.8, label=setup)
        right.fill_between(steps, smooth.min(0), smooth.max(0), color=color, alpha=0.15, linewidth=0)
    left.set(xlabel="|difference of log-probabilities|", ylabel="share of tokens with a larger one")
    right.set(xlabel="step", ylabel="reward, mean of 20 steps", ylim=(0, 1))
    right.legend(frameon=False, loc="lower right")
    left.grid(alpha=0.25)
    right.grid(alpha=0.25)
    return figure


def text_model(rows: Rows) -> Figure:
    styles = {"float32": {"color": "#8c8c8c", "linewidth": 3}, "float16": {"color": "#d55e00", "linewidth": 1.2}}
    figure = Figure(figsize=(9, 4), layout="constrained")
    whole, end = figure.subplots(1, 2)
    for axes, first, title in ((whole, 0, "the whole run"), (end, len(rows[0]["steps"]) // 2, "second half")):
        for row in rows:
            label = row["name"] if row["seed"] == rows[0]["seed"] else None
            axes.plot(row["steps"][first:], row["held_out_loss"][first:], label=label, **styles[row["name"]])
        axes.set(title=title, xlabel="step", ylabel="held-out loss (nats a byte)")
        axes.grid(alpha=0.25)
    whole.legend(frameon=False)
    return figure


LABEL = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # over the line that it may lie on


def panels_of(height: float, columns: int, **options: Any) -> tuple[Figure, Any]:
    with rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(8, height), layout="constrained")
        return figure, figure.subplots(1, columns, squeeze=False, **options)


def steps(rows: Rows) -> Figure:
    """Ratios to plain Optax on a CPU, one panel an optimizer; shaded: how far plain Optax is from itself."""
    rows = [row for row in largest(rows) if row["optimizer"] in SCALED and "framework" not in row]
    shown = [row for row in rows if row["name"] not in ("optax", AGAIN, SKIPPED)]
    columns = [name for name in SCALED if name in names(rows, "optimizer")]
    timed_of_all = [name for name in names(shown) if len(select(shown, name=name)) == len(columns)][::-1]
    drawn, panels = panels_of(0.28 * len(timed_of_all) + 1.2, len(columns), sharey=True, sharex=True)
    for axes, optimizer in zip(panels[0], columns, strict=True):
        at = {r["name"]: r for r in shown if r["optimizer"] == optimizer}
        found = np.array([[at[name][key] for key in ("ratio", "ratio_low", "ratio_high")] for name in timed_of_all])
        colors = ["tab:blue" if name.startswith("jamp") else "0.65" for name in timed_of_all]
        error = np.abs(found[:, 1:] - found[:, :1]).T
        axes.barh(timed_of_all, found[:, 0], xerr=error, color=colors, error_kw={"lw": 1, "ecolor": "0.3"})
        for i, (ratio, _, high) in enumerate(found):
            axes.text(1.04 * max(ratio, high), i, f"{ratio:.2f}", va="center", fontsize=8, bbox=LABEL)
        same = np.exp(equal([r for r in rows if r["optimizer"] == optimizer]))
        axes.axvspan(1 / same, same, color="tab:red", alpha=0.2, zorder=0, lw=0)
        axes.axvline(at["jamp"]["limit_ratio"], color="tab:red", lw=1, ls="--", zorder=0)
        axes.set(title=TITLES[optimizer], xscale="log", xlim=(0.8, 1.6 * max(r["ratio_high"] for r in shown)))
        axes.set_xticks([1, 2, 5], ["1", "2", "5"])
        axes.minorticks_off()
    drawn.supxlabel("time beside plain Optax, XLA:CPU; dashed: limit by bytes; shaded: A/A", fontsize=10)
    return drawn


def train(rows: Rows) -> Figure:
    """Whole steps of each model by batch size."""
    models = names(rows, "model")
    shown = sorted((x for x in names(rows) if x not in ("optax", AGAIN)), key=lambda name: name != "jamp")
    others = ("tab:orange", "tab:green", "tab:purple", "tab:brown", "0.5", "tab:pink", "tab:olive")
    drawn, panels = panels_of(3.4, len(models), sharey=True)
    for axes, model in zip(panels[0], models, strict=True):
        for name, other in zip(shown, ["tab:blue", *others], strict=False):
            at = select(rows, model=model, name=name)
            ratio, low, high = np.array([[r["ratio"], r["ratio_low"], r["ratio_high"]] for r in at]).reshape(-1, 3).T
            style = {"color": other, "lw": 2.4 if name == "jamp" else 1.2, "zorder": 3 if name == "jamp" else 2}
            batches = [str(r["batch"]) for r in at]
            axes.errorbar(batches, ratio, [ratio - low, high - ratio], fmt="o-", label=name, **style)
        axes.axhline(1, color="0.4", lw=0.8)
        axes.set(title=model, xlabel="batch")
        axes.grid(alpha=0.25, axis="y")
    panels[0, 0].set_ylabel("time beside plain Optax")
    drawn.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return drawn
