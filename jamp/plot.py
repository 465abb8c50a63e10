"""Plots of loss scales, gradients, differences, errors, memory. They need Matplotlib: `pip install 'jamp-jax[plot]'`.

Every function returns a Matplotlib figure that follows `plt.style.use`. If you make many, close each with
`plt.close(figure)`.
"""

import itertools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jamp import _table
from jamp._leaves import split_gradients
from jamp._step.accessors import get_loss_scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from jamp.debug import Comparison, ErrorCurve, MemoryCurve, UnderflowReport
    from jamp.history import History

__all__ = ["differences", "error_curve", "gradient_range", "layer_ranges", "loss_scale_history", "memory_curve"]
__dir__ = lambda: __all__

# Readable on white and on black.
_BLUE, _ORANGE, _RED, _GREY = "#3b8ed0", "#f08c2e", "#e0433c", "#8c8c8c"
_LOWEST = -60.0  # the power of two below which all magnitudes share a bin


def loss_scale_history(history: "History") -> "Figure":
    """Plot the loss scale over the steps, in powers of two, with each skipped step marked.

    The growth windows of an adaptive loss scale are shaded, longer ones darker, and numbered by their position in the
    window list. The hidden window of one step is number -1.

    Args:
      history: A `jamp.History`. Drawing waits for its steps.

    Raises:
      ValueError: If no step was recorded.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp, jamp.plot
      >>> opt_state, history = jamp.loss_scaled(optax.sgd(0.1)).init(jnp.ones(2)), jamp.History()
      >>> history.append(opt_state)
      >>> figure = jamp.plot.loss_scale_history(history)
    """
    if not len(history):
        raise ValueError("The history is empty: call `history.append(opt_state)` after each step.")
    figure, axes = _new((8, 4))
    steps = history.first_step + np.arange(len(history))
    scale, finite = np.log2(history["loss_scale"]), history["grads_finite"]
    if "window_index" in history.names:
        _shade_windows(axes, steps, history["window_index"])
    axes.step(steps, scale, where="post", color=_BLUE, label="loss scale")
    if not finite.all():
        axes.plot(steps[~finite], scale[~finite], "v", color=_RED, label=f"skipped steps ({int((~finite).sum())})")
    low, high = math.floor(scale.min()) - 1, math.ceil(scale.max()) + 1
    _powers(axes.yaxis, low, high)
    axes.set(xlabel="step", ylabel="loss scale (powers of 2)", ylim=(low, high))
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure


def _shade_windows(axes: "Axes", steps: Any, index: Any) -> None:
    ends = np.flatnonzero(np.diff(index))
    for start, stop in zip([0, *(ends + 1)], [*ends, len(index) - 1], strict=True):
        depth = 0.08 + 0.4 * (index[start] - index.min()) / max(1, np.ptp(index))
        left, right = steps[start], steps[stop] + 1
        axes.axvspan(left, right, color=_GREY, alpha=float(depth), linewidth=0)
        if right - left > 0.04 * len(index):
            at = axes.get_xaxis_transform()
            axes.text((left + right) / 2, 0.02, str(index[start]), ha="center", va="bottom", transform=at, size="small")
    axes.plot([], [], "s", color=_GREY, alpha=0.5, label="growth window, by its number")


def gradient_range(grads: Any, state: Any) -> "Figure":
    """Plot the magnitudes of the gradients before and after scaling, and the range of float16.

    Args:
      grads: The true gradients, from `jamp.value_and_grad`. Gradients that underflowed in the backward pass are 0. To
        see those too, pass the gradients of a float32 model.
      state: A loss-scale state, or any pytree that holds exactly one.

    Raises:
      ValueError: If no gradient is finite and nonzero, or `state` holds no loss-scale state or several.

    Examples:
      >>> import jax.numpy as jnp, jamp, jamp.plot
      >>> figure = jamp.plot.gradient_range({"w": jnp.array([1e-8, 1e-3])}, jamp.StaticLossScale(1024.0).init())

    References:
      Micikevicius et al., Mixed Precision Training, ICLR 2018, figure 3.
    """
    sizes = [np.abs(np.asarray(x).astype(np.complex128)).ravel() for x in split_gradients(grads)[0]]
    size = np.concatenate([*sizes, np.zeros(0)])
    some = size[(size > 0) & np.isfinite(size)]
    if not some.size:
        raise ValueError(f"There is nothing to draw: none of {size.size} gradients is finite and nonzero.")
    scale = float(get_loss_scale(state))
    figure, axes = _new((8, 4))
    ends = []
    for values, color, label in (
        (some, _ORANGE, "true gradients"),
        (some * scale, _BLUE, f"times the loss scale, {_power(scale)}"),
    ):
        bins, counts = np.unique(np.floor(np.log2(values)).clip(_LOWEST), return_counts=True)
        axes.bar(bins, 100 * counts / size.size, width=1, align="edge", color=color, alpha=0.6, label=label)
        ends += [bins[0], bins[-1] + 1]
    _limits(axes, min(ends), max(ends))
    zeros = 100 * np.mean(size == 0)
    axes.set(
        xlabel=f"magnitude (powers of 2); {zeros:.3g} % of the gradients are 0", ylabel="share of the gradients (%)"
    )
    axes.margins(y=0.18)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure


def layer_ranges(report: "UnderflowReport") -> "Figure":
    """Plot the range of the scaled gradients of each leaf as a bar, and the range of the report's dtype.

    Args:
      report: The result of `jamp.debug.underflow_report`.

    Raises:
      ValueError: If the report has no leaves.

    Examples:
      >>> import jax.numpy as jnp, jamp, jamp.debug, jamp.plot
      >>> report = jamp.debug.underflow_report({"w": jnp.array([1e-8, 1e-3])}, jamp.StaticLossScale(1024.0).init())
      >>> figure = jamp.plot.layer_ranges(report)
    """
    names = [_short(path) for path in report.paths]
    if not names:
        raise ValueError("The report has no leaves: pass the gradients of a model to `underflow_report`.")
    figure, axes = _new((8, 1.6 + 0.26 * len(names)))
    scale = np.log2(float(report.loss_scale))
    with np.errstate(divide="ignore"):
        low, high = (np.log2(np.asarray(x, np.float64)) + scale for x in (report.smallest, report.largest))
    drawn = np.isfinite(low)
    top = np.where(np.isfinite(high), high, np.log2(float(jnp.finfo(report.dtype).max)) + 2)
    for y in np.flatnonzero(drawn).tolist():
        bad = float(report.headroom[y]) < 0
        axes.barh(y, max(top[y] - low[y], 0.3), left=low[y], height=0.6, color=_RED if bad else _BLUE)
    for y, lost in enumerate(np.asarray(report.zero_scaled).tolist()):
        note = f"{100 * float(lost):.1f} %" if drawn[y] else "all 0"
        axes.text(1.01, y, note, transform=axes.get_yaxis_transform(), va="center", size="small")
    axes.text(1.01, 1.01, "lost", transform=axes.transAxes, va="bottom", size="small")
    _limits(axes, min(low[drawn], default=0.0), max(top[drawn], default=0.0), report.dtype)
    axes.set(yticks=range(len(names)), yticklabels=names, ylim=(len(names) - 0.4, -0.6))
    axes.set_xlabel(f"magnitude of the gradients times the loss scale, {_power(2.0**scale)} (powers of 2)")
    return figure


def differences(comparisons: "Mapping[str, Comparison]") -> "Figure":
    """Plot how the differences that `jamp.debug.compare` finds grow from the arguments to the results.

    Only operations whose difference reaches a result are drawn, in the order of the program. A mark is the first one
    that rounding does not explain. The legend names it.

    Args:
      comparisons: The results of `compare` by their names, such as the names of dtypes.

    Raises:
      ValueError: If no operation of any of them differs.

    Examples:
      >>> import jax.numpy as jnp, jamp, jamp.debug, jamp.plot
      >>> fun, x = lambda x: jnp.sin(x @ x), jnp.eye(16) / 3
      >>> found = {dtype: jamp.debug.compare(fun, jamp.autocast(fun, dtype))(x) for dtype in ("float16", "bfloat16")}
      >>> figure = jamp.plot.differences(found)
    """
    figure, axes = _new((8, 4))
    colors = itertools.cycle((_BLUE, _ORANGE, _GREY, _RED))
    is_drawn = False
    for (name, found), color in zip(comparisons.items(), colors, strict=False):
        rows = [(i, row) for i, row in enumerate(found.rows) if row.difference > 0]
        axes.semilogy([i for i, _ in rows], [row.difference for _, row in rows], color=color, label=name, linewidth=1)
        first = [(i, row) for i, row in rows if row is found.first]
        for i, row in first:
            label = f"first in {name}: {row.operation} at {_table.fit(row.source.partition(' > ')[0], 30)}"
            axes.semilogy([i], [row.difference], "v", color=color, label=label)
        is_drawn |= bool(rows)
    if not is_drawn:
        raise ValueError("There is nothing to draw: no operation differs.")
    axes.set(xlabel="operations of both functions, in order", ylabel="relative difference")
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure


def memory_curve(curves: "Mapping[str, MemoryCurve]") -> "Figure":
    """Plot the temporary memory of a function over the products that it computes more, a point for each budget.

    Args:
      curves: What `jamp.debug.memory_curve` returns, by names, such as "bfloat16". FLOPs are shown to the fewest
        of all points.

    Raises:
      ValueError: If there is no curve.

    Examples:
      >>> import jax, jax.numpy as jnp, jamp, jamp.debug, jamp.plot
      >>> loss = lambda w, x: jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w) @ w)
      >>> curve = jamp.debug.memory_curve(lambda budget: jax.grad(jamp.recompute(loss, budget)), (1.0, 0))
      >>> figure = jamp.plot.memory_curve({"float32": curve(jnp.ones((64, 64)), jnp.ones((512, 64)))})
    """
    if not curves:
        raise ValueError("There is nothing to draw: no curve.")
    figure, axes = _new((8, 4))
    fewest = min(point.flops for curve in curves.values() for point in curve.points)
    for (name, curve), color in zip(curves.items(), itertools.cycle((_BLUE, _ORANGE, _GREY, _RED)), strict=False):
        points = sorted(curve.points, key=lambda point: (point.flops, -point.temporary))
        x = [100 * (point.flops - fewest) / (fewest or 1.0) for point in points]
        y = [point.temporary / 1e9 for point in points]
        axes.plot(x, y, "o-", color=color, label=name, linewidth=1)
        for i, point in enumerate(points):
            if i == 0 or math.dist((x[i], y[i]), (x[i - 1], y[i - 1])) > 0:  # several budgets may make one program
                axes.annotate(f"{point.budget}", (x[i], y[i]), (4, 4), textcoords="offset points", size="small")
    axes.set(xlabel="FLOPs of products that are computed again, %", ylabel="temporary memory, GB")
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    return figure


def error_curve(curves: "Mapping[str, ErrorCurve]") -> "Figure":
    """Plot the share of the FLOPs in few bits over the error, a point for each bound that rules reach.

    Args:
      curves: What `report.curve()` of a `jamp.debug.RoundingReport` returns, by names, such as "float8".

    Raises:
      ValueError: If no curve has a bound that rules reach.

    Examples:
      >>> import jax, jax.numpy as jnp, jamp, jamp.debug, jamp.plot
      >>> loss = lambda w, x: jnp.mean((jnp.tanh(x @ w) @ w) ** 2)
      >>> w = jax.random.normal(jax.random.key(0), (128, 128)) / 12
      >>> report = jamp.debug.rounding_report(loss, jamp.Float8())(w, jnp.ones((128, 128)))
      >>> figure = jamp.plot.error_curve({"float8": report.curve((0.5, 0.2))})
    """
    drawn = {name: [x for x in curve.points if x.is_reached] for name, curve in curves.items()}
    if not any(drawn.values()):
        raise ValueError("There is nothing to draw: no rules reach a bound.")
    figure, axes = _new((8, 4))
    for (name, found), color in zip(drawn.items(), itertools.cycle((_BLUE, _ORANGE, _GREY, _RED)), strict=False):
        points = sorted(found, key=lambda point: point.error)
        axes.plot(
            [x.error for x in points], [100 * x.share for x in points], "o-", color=color, label=name, linewidth=1
        )
        # Several bounds may have the same rules.
        for error, share in dict.fromkeys((x.error, x.share) for x in points):
            bounds = ", ".join(f"{x.bound:g}" for x in points if (x.error, x.share) == (error, share))
            axes.annotate(bounds, (error, 100 * share), (4, 4), textcoords="offset points", size="small")
    axes.set(xlabel="relative error of the gradients, or of the value", ylabel="FLOPs in few bits, %", xscale="log")
    axes.set_ylim(0, 100)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    return figure


def _new(size: tuple[float, float]) -> tuple["Figure", "Axes"]:
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        raise ImportError("jamp.plot needs matplotlib: `pip install 'jamp-jax[plot]'`.") from None
    figure, axes = plt.subplots(figsize=size, dpi=100, layout="constrained")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _limits(axes: "Axes", low: float, high: float, dtype: DTypeLike = "float16") -> None:
    """Shade the ranges that a dtype cannot hold, and name them above the axes."""
    info = jnp.finfo(dtype)
    least, normal, end = (math.log2(float(x)) for x in (info.smallest_subnormal, info.smallest_normal, info.max))
    zero = least - 1  # half the smallest number rounds to 0
    low, high = min(zero - 5, max(low, _LOWEST)), max(end + 4, min(high, end + 20))
    for left, right, color, alpha in ((low, zero, _RED, 0.15), (zero, normal, _GREY, 0.25), (end, high, _RED, 0.15)):
        axes.axvspan(left, right, color=color, alpha=alpha, linewidth=0, zorder=0)
    names = ((low, zero, "0"), (zero, normal, "subnormal"), (normal, end, f"{info.dtype} normal"), (end, high, "inf"))
    at = axes.get_xaxis_transform()
    for left, right, name in names:
        if right - left > 0.012 * len(name) * (high - low):  # otherwise the names would overlap
            axes.text((left + right) / 2, 1.01, name, transform=at, ha="center", va="bottom", size="small")
    _powers(axes.xaxis, low, high)
    axes.set_xlim(low, high)


def _powers(axis: Any, low: float, high: float) -> None:
    """Set about ten ticks at powers of two."""
    step = max(1, 2 ** math.ceil(math.log2(max(1.0, (high - low) / 12))))
    ticks = range(math.ceil(low / step) * step, math.floor(high) + 1, step)
    axis.set_ticks(ticks, [f"$2^{{{n}}}$" for n in ticks])


def _power(scale: float) -> str:
    exponent = math.log2(scale)
    return f"$2^{{{exponent:.0f}}}$" if exponent == round(exponent) else f"{scale:g}"


def _short(path: str, most: int = 28) -> str:
    """A short form of a path: blocks/0/down."""
    plain = (
        path.replace("']['", "/").replace("'][", "/").replace("]['", "/").replace("][", "/").strip("[]'.")
        or "the array"
    )
    return _table.fit(plain, most)
