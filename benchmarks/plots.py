"""Pictures of results, 800 pixels wide, on white: they stand on light and on dark pages."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.markdown import TITLES
from benchmarks.models import TF32
from benchmarks.peers import AGAIN
from benchmarks.processes import equal
from benchmarks.report_gpu import rows_of
from benchmarks.report_step import largest
from benchmarks.update import SKIPPED

Rows = list[dict[str, Any]]
SHOWN = ("adamw", "sgd momentum", "clip + adamw")
LABEL = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # over the line that it may lie on


def figure(height: float, columns: int, **options: Any) -> Any:
    import matplotlib.pyplot as plt

    with plt.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        return plt.subplots(1, columns, figsize=(8, height), dpi=100, layout="constrained", **options)


def save(drawn: Any, file: Path) -> None:
    import matplotlib.pyplot as plt

    drawn.savefig(file)
    plt.close(drawn)


def steps(rows: Rows, folder: Path) -> None:
    """Ratios to plain Optax on a CPU, one panel an optimizer; shaded: how far plain Optax is from itself."""
    rows = [row for row in largest(rows) if row["optimizer"] in SHOWN and "framework" not in row]
    shown = [row for row in rows if row["name"] not in ("optax", AGAIN, SKIPPED)]
    columns = [name for name in SHOWN if any(r["optimizer"] == name for r in rows)]
    timed = [r["name"] for r in shown]
    names = [name for name in dict.fromkeys(timed) if timed.count(name) == len(columns)][::-1]
    drawn, panels = figure(0.28 * len(names) + 1.2, len(columns), sharey=True, sharex=True, squeeze=False)
    for axes, optimizer in zip(panels[0], columns, strict=True):
        at = {r["name"]: r for r in shown if r["optimizer"] == optimizer}
        found = np.array([[at[name][key] for key in ("ratio", "ratio_low", "ratio_high")] for name in names])
        colors = ["tab:blue" if name.startswith("jamp") else "0.65" for name in names]
        error = np.abs(found[:, 1:] - found[:, :1]).T
        axes.barh(names, found[:, 0], xerr=error, color=colors, error_kw={"lw": 1, "ecolor": "0.3"})
        for i, (ratio, _, high) in enumerate(found):
            axes.text(1.04 * max(ratio, high), i, f"{ratio:.2f}", va="center", fontsize=8, bbox=LABEL)
        same = np.exp(equal([r for r in rows if r["optimizer"] == optimizer]))
        axes.axvspan(1 / same, same, color="tab:red", alpha=0.2, zorder=0, lw=0)
        axes.axvline(at["jamp"]["limit_ratio"], color="tab:red", lw=1, ls="--", zorder=0)
        axes.set(title=TITLES[optimizer], xscale="log", xlim=(0.8, 1.6 * max(r["ratio_high"] for r in shown)))
        axes.set_xticks([1, 2, 5], ["1", "2", "5"])
        axes.minorticks_off()
    drawn.supxlabel("time beside plain Optax, XLA:CPU; dashed: limit by bytes; shaded: A/A", fontsize=10)
    save(drawn, folder / "benchmark_step.png")


def train(rows: Rows, folder: Path) -> None:
    """Whole steps of each model by batch size."""
    models = list(dict.fromkeys(r["model"] for r in rows))
    names = [name for name in dict.fromkeys(r["name"] for r in rows) if name not in ("optax", AGAIN)]
    names.sort(key=lambda name: name != "jamp")
    others = ("tab:orange", "tab:green", "tab:purple", "tab:brown", "0.5", "tab:pink", "tab:olive")
    drawn, panels = figure(3.4, len(models), sharey=True, squeeze=False)
    for axes, model in zip(panels[0], models, strict=True):
        for name, other in zip(names, ["tab:blue", *others], strict=False):
            at = [r for r in rows if (r["model"], r["name"]) == (model, name)]
            ratio, low, high = np.array([[r["ratio"], r["ratio_low"], r["ratio_high"]] for r in at]).reshape(-1, 3).T
            style = {"color": other, "lw": 2.4 if name == "jamp" else 1.2, "zorder": 3 if name == "jamp" else 2}
            axes.errorbar(
                [str(r["batch"]) for r in at], ratio, [ratio - low, high - ratio], fmt="o-", label=name, **style
            )
        axes.axhline(1, color="0.4", lw=0.8)
        axes.set(title=model, xlabel="batch")
        axes.grid(alpha=0.25, axis="y")
    panels[0, 0].set_ylabel("time beside plain Optax")
    drawn.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    save(drawn, folder / "benchmark_train.png")


def speed(entries: Rows, folder: Path) -> None:
    """Speed-ups over TF32 of the same library."""
    rows = rows_of(entries, "models")
    at = {(r["model"], r["library"], r["name"].removeprefix("torch ")): r["milliseconds"] for r in rows}
    models = [model for model in dict.fromkeys(r["model"] for r in rows) if (model, "jax", TF32) in at]
    names = [name for name in dict.fromkeys(r["name"] for r in rows) if not name.endswith((TF32, "again"))][::-1]
    drawn, panels = figure(0.3 * len(names) + 1.2, len(models), sharey=True, sharex=True, squeeze=False)
    for axes, model in zip(panels[0], models, strict=True):
        found = {r["name"]: at[model, r["library"], TF32] / r["milliseconds"] for r in rows if r["model"] == model}
        there = [name for name in names if name in found]
        colors = ["0.65" if name.startswith("torch") else "tab:blue" for name in there]
        bars = axes.barh([names.index(name) for name in there], [found[name] for name in there], color=colors)
        axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
        axes.set(title=model, xlabel="speed-up over its own TF32")
        axes.margins(x=0.15)
    panels[0, 0].set_yticks(range(len(names)), names)
    save(drawn, folder / "benchmark_gpu.png")


PLOTS: dict[str, Callable[[Rows, Path], None]] = {"step": steps, "train": train, "gpu": speed}
