"""Pictures of the results, 800 pixels wide."""

from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from benchmarks.record import Rows
from benchmarks.report.markdown import TITLES, names, select
from benchmarks.report.tables import CUDNN, largest
from benchmarks.step.peers import AGAIN
from benchmarks.step.update import SCALED, SKIPPED
from benchmarks.timing import equal


def text_model(rows: Rows) -> Figure:
    """The held-out loss, its difference to float32's of the same seed, and the loss scale."""
    colors = {"float32": "0.4", "float16": "tab:orange", "bfloat16": "tab:blue", "float8": "tab:green"}
    drawn, panels = panels_of(3.2, 3)
    loss, difference, scale = panels[0]
    base = {row["seed"]: np.array(row["held_out_loss"]) for row in select(rows, name="float32")}
    for row in rows:
        style: dict[str, Any] = {"color": colors[row["name"]], "lw": 1}
        found, label = np.array(row["held_out_loss"]), row["name"] if row["seed"] == rows[0]["seed"] else None
        loss.plot(row["steps"], found, label=label, **style)
        if row["name"] != "float32":
            difference.plot(row["steps"], found - base[row["seed"]], **style)
        if any(row["skipped"]):
            scale.step(row["steps"], row["log2_scale"], **style)
    loss.set(ylabel="held-out loss, nats a byte", ylim=(None, 2.3))
    difference.set(ylabel="minus float32's, same seed", ylim=(-0.04, 0.04))
    scale.set(ylabel="log2 of the loss scale, float16")
    for axes in panels[0]:
        axes.set(xlabel="step")
        axes.grid(alpha=0.25)
    loss.legend(frameon=False)
    return drawn


DRAWN = ("GPT-2 124 M, 8 x 1024, scanned", "Llama, 8 layers of 1024, 8 x 1024, scanned", "Mixture", "ResNet-50")
LABEL = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # over the line that it may lie on


def panels_of(height: float, columns: int, **options: Any) -> tuple[Figure, Any]:
    with rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(8, height), layout="constrained")
        return figure, figure.subplots(1, columns, squeeze=False, **options)


def steps(rows: Rows) -> Figure:
    """Ratios to plain Optax on a CPU, one panel an optimizer; shaded: how far plain Optax is from itself."""
    rows = [row for row in largest(rows) if row["optimizer"] in SCALED]
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
    drawn.supxlabel(
        "time divided by that of plain Optax, XLA:CPU; dashed: one extra read; shaded: plain Optax again", fontsize=10
    )
    return drawn


def budgets(rows: Rows) -> Figure:
    """Temporary memory over FLOPs: at several memory budgets, and by hand. Each point has its name."""
    models = [name for name in names(rows, "model") if name.startswith(DRAWN)]
    by_hand = {
        "by hand": "no checkpoint",
        "by hand, dots_saveable": "dots_saveable",
        "by hand, dots_with_no_batch_dims": "no batch dims",
        "by hand, each block again": "each block",
    }
    with rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(8, 2.9 * -(-len(models) // 2)), layout="constrained")
        panels = list(figure.subplots(-(-len(models) // 2), 2, squeeze=False).flat)
    for axes in panels[len(models) :]:
        axes.set_visible(False)
    for axes, model in zip(panels, models, strict=False):
        found = {row["variant"]: row for row in select(rows, model=model)}
        least = next(iter(found.values()))["gigaflops"]
        budgets = {
            name: name.removeprefix("autocast, budget ") for name in found if name.startswith("autocast, budget")
        }
        kinds = (
            (by_hand, "o", "tab:orange", "bfloat16 by hand, with a policy of jax.checkpoint", (5, 5)),
            (budgets, "o-", "tab:blue", "autocast to bfloat16, at a memory budget", (-2, -12)),
        )
        for labels, style, color, kind, offset in kinds:
            points = [(found[name], label) for name, label in labels.items() if name in found]
            x = [100 * (row["gigaflops"] / least - 1) for row, _ in points]
            y = [row["temporary_megabytes"] / 1e3 for row, _ in points]
            axes.plot(x, y, style, color=color, label=kind, lw=1, ms=4)
            # Two budgets may make nearly one program. Its point has both names.
            same = lambda i, j, x=x, y=y: abs(x[i] - x[j]) <= 0.5 and abs(y[i] - y[j]) <= 0.05 * max(y)
            for i, (_, name) in enumerate(points):
                if not any(same(i, j) for j in range(i)):
                    label = ", ".join(points[j][1] for j in range(i, len(points)) if same(i, j))
                    side = "right" if x[i] > 7 and kind.startswith("bfloat16") else "left"
                    options = {"textcoords": "offset points", "size": 7, "color": color, "ha": side}
                    axes.annotate(label, (x[i], y[i]), (5, -11) if name == "no batch dims" else offset, **options)
        axes.set_title(model, size=9)
        axes.set(xlabel="more FLOPs of matmuls than without a checkpoint, %", ylabel="GB")
        axes.margins(x=0.1, y=0.15)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    return figure


# By the name of a row: its label, and where that stands in points from its mark.
GPT2: dict[str, tuple[str, tuple[int, int], str]] = {
    "float32": ("float32", (-8, -3), "right"),
    "by hand": ("no checkpoint", (0, 8), "center"),
    "by hand, dots_saveable": ("dots_saveable", (-2, 8), "left"),
    "by hand, each block again": ("each block", (-10, 8), "left"),
    "autocast, budget 1.0": ("jamp.autocast", (9, -4), "left"),
    "autocast, budget 0.5": ("memory_budget=0.5", (0, -14), "left"),
    "autocast, budget 0.1": ("0.1", (2, -14), "right"),
}
# With cuDNN's attention, the marks are closer to each other.
GPT2_CUDNN = GPT2 | {
    "by hand": ("no checkpoint", (8, -3), "left"),
    "autocast, budget 0.5": ("memory_budget=0.5", (-4, 22), "left"),
    "by hand, each block again": ("each block", (-14, -16), "left"),
}
KINDS = {
    "float32": "0.3",
    "bfloat16 by hand, with a policy of jax.checkpoint": "tab:orange",
    "jamp, bfloat16": "tab:blue",
}


def gpt2(rows: Rows) -> Figure:
    """Time over temporary memory of a step of GPT-2, by hand and with jamp, by attention."""
    figure, panels = panels_of(3.4, 2, sharey=True)
    for axes, end, labels in zip(panels[0], ("", CUDNN), (GPT2, GPT2_CUDNN), strict=True):
        found = {row["name"]: row for row in rows}
        for name, (label, offset, side) in labels.items():
            if not (row := found.get(name + end)):
                continue
            kind = 2 if name.startswith("autocast") else int(name != "float32")
            color = list(KINDS.values())[kind]
            at = row["temporary_gigabytes"], row["milliseconds"]
            axes.plot(*at, "o", color=color, ms=6, zorder=2 + kind)
            options = {"textcoords": "offset points", "size": 9, "color": color, "ha": side}
            axes.annotate(label, at, offset, **options)
        axes.set(xscale="log", yscale="log", xlim=(2.3, 30), ylim=(18, 90))
        axes.set_xticks([3, 5, 10, 20], ["3", "5", "10", "20"])
        axes.set_yticks([20, 30, 50, 80], ["20", "30", "50", "80"])
        axes.minorticks_off()
        axes.grid(alpha=0.25)
        axes.set_title(f"attention {'by cuDNN' if end else 'written in JAX'}", size=10)
    panels[0][0].set_ylabel("milliseconds a step")
    figure.supxlabel("temporary memory, GB", fontsize=10)
    marks = [Line2D([], [], color=color, marker="o", ls="", label=kind) for kind, color in KINDS.items()]
    figure.legend(handles=marks, loc="outside upper center", ncols=3, frameon=False, fontsize=9)
    return figure
