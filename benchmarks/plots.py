"""Pictures of results, 800 pixels wide, on white: they stand on light and on dark pages."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.growth import Growth, growths
from benchmarks.update import SKIPPED

Rows = list[dict[str, Any]]
COLORS = {"adamw": "tab:blue", "sgd momentum": "tab:orange", "clip + adamw": "tab:green"}
TITLES = {"adamw": "AdamW", "sgd momentum": "SGD with momentum", "clip + adamw": "clip + AdamW"}
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
    """Ratios to plain Optax, one panel an optimizer, and the limit by the bytes moved; then how they grow."""
    rows = [r for r in rows if r["grads"] == "float32" and r["leaves"] == 40 and "framework" not in r]
    largest = {
        name: max({r["millions"] for r in rows if r["optimizer"] == name and r["name"] not in ("optax", "jamp")})
        for name in COLORS
        if any(r["optimizer"] == name for r in rows)
    }
    left_out = ("optax", SKIPPED)  # the one is 1, the other no peer
    shown = [r for r in rows if r["name"] not in left_out and r["millions"] == largest.get(r["optimizer"])]
    names = list(dict.fromkeys(r["name"] for r in shown))[::-1]
    drawn, panels = figure(0.28 * len(names) + 1.2, len(largest), sharey=True, sharex=True, squeeze=False)
    for axes, optimizer in zip(panels[0], largest, strict=True):
        at = {r["name"]: r for r in shown if r["optimizer"] == optimizer}
        there = [i for i, name in enumerate(names) if name in at]
        found = np.array([[at[names[i]][key] for key in ("ratio", "ratio_low", "ratio_high")] for i in there])
        colors = ["tab:blue" if names[i].startswith("jamp") else "0.65" for i in there]
        error = np.abs(found[:, 1:] - found[:, :1]).T
        axes.barh(there, found[:, 0], xerr=error, color=colors, error_kw={"lw": 1, "ecolor": "0.3"})
        for i, (ratio, _, high) in zip(there, found, strict=True):
            axes.text(1.04 * max(ratio, high), i, f"{ratio:.2f}", va="center", fontsize=8, bbox=LABEL)
        axes.axvline(at["jamp"]["limit_ratio"], color="tab:red", lw=1, ls="--", zorder=0)
        axes.set(title=TITLES[optimizer], xscale="log", xlim=(0.8, 1.6 * max(r["ratio"] for r in shown)))
        axes.set_xticks([1, 2, 5], ["1", "2", "5"])
        axes.minorticks_off()
    panels[0, 0].set_yticks(range(len(names)), names)
    drawn.supxlabel("time beside plain Optax; dashed: limit by the bytes moved", fontsize=10)
    save(drawn, folder / "benchmark_step.png")


def growth(rows: Rows, folder: Path) -> None:
    """What jamp adds along parameters and leaves, with its fitted line, and the limit."""
    found = growths(rows)
    panels = [
        ("millions", "added", "parameters, millions (40 leaves)", "ms that jamp adds to a step"),
        ("leaves", "added", "leaves (5 M parameters)", "ms that jamp adds to a step"),
        ("leaves", "added_seconds", "leaves (5 M parameters)", "s that jamp adds to compiling"),
    ]
    drawn, all_axes = figure(3.8, len(panels))
    for axes, (along, what, xlabel, ylabel) in zip(all_axes, panels, strict=True):
        for g in found:
            if g.along == along:
                curve(axes, g, what)
        axes.set(xlabel=xlabel, ylabel=ylabel, xscale="log", yscale="log")
        axes.grid(alpha=0.25)
    all_axes[0].plot([], [], color="0.4", lw=1.2, label="fitted line")
    all_axes[0].plot([], [], "--", color="0.4", lw=1, label="one read of the gradients")
    handles, labels = all_axes[0].get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=9, frameon=False)
    save(drawn, folder / "benchmark_growth.png")


def curve(axes: Any, g: Growth, what: str) -> None:
    color, title = COLORS[g.optimizer], TITLES[g.optimizer]
    sizes = np.geomspace(g.sizes[0], g.sizes[-1], 100)
    axes.plot(g.sizes, getattr(g, what), "o", color=color, ms=4, label=title)
    axes.plot(sizes, np.polyval(g.line(what), sizes), color=color, lw=1.2)
    if what == "added" and g.limit.any():
        axes.plot(g.sizes, g.limit, "--", color=color, lw=1)


def train(rows: Rows, folder: Path) -> None:
    """Whole steps of each model by batch size."""
    models = list(dict.fromkeys(r["model"] for r in rows))
    names = [name for name in dict.fromkeys(r["name"] for r in rows) if name != "optax"]
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


def speed(rows: Rows, folder: Path) -> None:
    """Speed-ups over float32 of the same library."""
    models = list(dict.fromkeys(r["model"] for r in rows))
    names = [name for name in dict.fromkeys(r["name"] for r in rows) if name not in ("float32", "torch float32")][::-1]
    drawn, panels = figure(0.3 * len(names) + 1.2, len(models), sharey=True, sharex=True, squeeze=False)
    for axes, model in zip(panels[0], models, strict=True):
        at = {r["name"]: 1 / r["ratio"] for r in rows if r["model"] == model}
        there = [name for name in names if name in at]
        colors = ["0.65" if name.startswith("torch") else "tab:blue" for name in there]
        bars = axes.barh([names.index(name) for name in there], [at[name] for name in there], color=colors)
        axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
        axes.set(title=model, xlabel="speed-up over its own float32")
        axes.margins(x=0.15)
    panels[0, 0].set_yticks(range(len(names)), names)
    save(drawn, folder / "benchmark_gpu.png")


def steps_and_growth(rows: Rows, folder: Path) -> None:
    steps(rows, folder)
    growth(rows, folder)


PLOTS: dict[str, Callable[[Rows, Path], None]] = {"step": steps_and_growth, "train": train, "gpu": speed}
