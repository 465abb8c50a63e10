"""jamp.plot: what is drawn, and that texts do not overlap, on white and on black."""

import itertools

import jax
import jax.numpy as jnp
import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import optax
import pytest
from jaxprs import normal

import jamp
import jamp.plot
from jamp.debug import ErrorCurve, ErrorPoint, MemoryCurve, MemoryPoint, compare, underflow_report
from jamp.history import History

STATE = jamp.StaticLossScale(2.0**16).init()
GRADS = {f"blocks_{i}_with_a_long_name": {"kernel": normal(64, 8, seed=i, scale=1e-7)} for i in range(9)}
WILD = GRADS | {"a": jnp.zeros(3), "b": jnp.float32([1e-37, 1e30]), "c": jnp.float32([jnp.inf, 1.0])}


def history(config):
    recorded, tx = History(first_step=50), jamp.loss_scaled(optax.sgd(0.1), config)
    state, update = tx.init(jnp.ones(2)), jax.jit(tx.update)
    for i in range(60):
        _, state = update(np.float32([1, np.inf if i % 25 in (20, 21, 22) else 1]), state)
        recorded.append(state)
    return recorded


DYNAMIC, ADAPTIVE = map(history, (jamp.DynamicLossScale(growth_interval=5), jamp.AdaptiveLossScale(windows=(2, 4, 8))))
W, X = normal(16, 16, scale=0.3), normal(8, 16)
network = lambda w, x, factor=1.0: jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w * factor) ** 2)
COMPARED = {dtype: compare(network, jamp.autocast(network, dtype))(W, X) for dtype in ("float16", "bfloat16")}
COMPARED["a mistake"] = compare(network, lambda w, x: network(w, x, 1.1))(W, X)
CURVE = MemoryCurve(tuple(MemoryPoint(b, int(b * 4e9 + 1e9), int(8e9), 2e12 - b * 5e11) for b in (1.0, 0.5, 0.1, 0)))
ERRORS = ((0.5, 0.09, 0.74), (0.2, 0.09, 0.74), (0.1, 0.08, 0.7), (0.06, 0.052, 0.31), (0.01, 0.049, 0.0))
RULES = ErrorCurve("float8", tuple(ErrorPoint(*x, {}) for x in ERRORS))
FIGURES = {
    "dynamic": lambda: jamp.plot.loss_scale_history(DYNAMIC),
    "adaptive": lambda: jamp.plot.loss_scale_history(ADAPTIVE),
    "range": lambda: jamp.plot.gradient_range(GRADS, STATE),
    "wild range": lambda: jamp.plot.gradient_range(WILD, STATE),
    "layers": lambda: jamp.plot.layer_ranges(underflow_report(GRADS, STATE)),
    "wild layers": lambda: jamp.plot.layer_ranges(underflow_report(WILD, STATE)),
    "bfloat16": lambda: jamp.plot.layer_ranges(underflow_report(WILD, STATE, jnp.bfloat16)),
    "differences": lambda: jamp.plot.differences(COMPARED),
    "memory": lambda: jamp.plot.memory_curve({"gradient": CURVE}),
    "errors": lambda: jamp.plot.error_curve({"float8": RULES}),
}
STYLES = [("default", name) for name in FIGURES]
STYLES += [("dark_background", name) for name in ("adaptive", "range", "layers")]
SLOW = [("default", "layers"), ("default", "range"), *STYLES[-2:]]  # as with wild gradients and in the other style


@pytest.fixture(autouse=True)
def without_a_window():
    mpl.use("Agg")
    yield
    plt.close("all")


@pytest.mark.slow_after(4)
@pytest.mark.parametrize(
    ("style", "name"), [pytest.param(*case, marks=[pytest.mark.slow] * (case in SLOW)) for case in STYLES]
)
def test_a_figure_is_800_pixels_wide_with_labels_and_no_overlapping_text(style, name):
    with plt.style.context(style):
        figure = FIGURES[name]()
        figure.canvas.draw()
    assert figure.canvas.get_width_height()[0] == 800
    axes = figure.axes[0]
    labels = {"differences": "relative", "memory": "temporary memory, GB", "errors": "relative error"}
    assert labels.get(name, "powers of 2") in axes.get_xlabel() + axes.get_ylabel()
    ticks = [t for t in axes.get_xticklabels() if axes.viewLim.x0 <= t.get_position()[0] <= axes.viewLim.x1]
    texts = [*axes.texts, axes.xaxis.label, axes.yaxis.label, *ticks, *axes.get_yticklabels()]
    texts += [t for legend in figure.legends for t in legend.get_texts()]
    boxes = [(t.get_window_extent(), t.get_text()) for t in texts if t.get_text()]
    assert all(box.x0 >= 0 and box.x1 <= 800 for box, _ in boxes)
    assert not [(a, b) for (box, a), (other, b) in itertools.combinations(boxes, 2) if box.overlaps(other)]
    ink, paper = (np.array(mpl.colors.to_rgb(c)) for c in (axes.xaxis.label.get_color(), figure.get_facecolor()))
    assert abs(ink - paper).min() > 0.5


def test_the_loss_scale_is_drawn_with_skipped_steps_marked_and_windows_shaded():
    axes = FIGURES["dynamic"]().axes[0]
    scale, skipped = (line.get_data() for line in axes.lines)
    np.testing.assert_array_equal(scale, [np.arange(50, 110), np.log2(DYNAMIC["loss_scale"])])
    np.testing.assert_array_equal(skipped[0], [70, 71, 72, 95, 96, 97])
    windows = np.count_nonzero(np.diff(ADAPTIVE["window_index"])) + 1
    assert [len(FIGURES[name]().axes[0].patches) for name in ("dynamic", "adaptive")] == [0, windows]
    assert windows > 2


def test_gradients_are_counted_before_and_after_scaling_and_by_layer():
    axes = jamp.plot.gradient_range(jnp.float32([2**-20, 1.5 * 2**-20, 2**-3, 0]), STATE).axes[0]
    bars = [(p.get_x(), p.get_height()) for p in axes.patches if p.get_width() == 1]
    assert bars == [(-20, 50), (-3, 25), (-4, 50), (13, 25)]
    assert "25 % of the gradients are 0" in axes.get_xlabel()
    assert {t.get_text() for t in axes.texts} == {"0", "subnormal", "float16 normal", "inf"}
    grads = {"a": jnp.float32([2**-38, 2**-45, 2**-20]), "b": jnp.zeros(2), "c": jnp.float32([1.0, 2**-8])}
    axes = jamp.plot.layer_ranges(underflow_report(grads, STATE)).axes[0]
    bars = [(p.get_x(), p.get_x() + p.get_width()) for p in axes.patches if p.get_height() == pytest.approx(0.6)]
    assert bars == [(-29, -4), (8, 16)]
    assert [t.get_text() for t in axes.get_yticklabels()] == ["a", "b", "c"]
    beside = [t.get_text() for t in axes.texts if "%" in t.get_text() or "all" in t.get_text()]
    assert beside == ["33.3 %", "all 0", "0.0 %"]


def test_a_long_path_is_cut_in_the_middle_so_that_layers_stay_apart():
    name = {"attention": {"query_projection": {"kernel": jnp.ones(3)}}}
    figure = jamp.plot.layer_ranges(underflow_report({f"layer_{i:02d}": name for i in range(12)}, STATE))
    labels = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert [label[:8] for label in labels] == [f"layer_{i:02d}" for i in range(12)]
    assert all(label.endswith("/kernel") for label in labels)


def test_differences_are_drawn_in_order_and_the_first_jump_is_marked():
    lines = FIGURES["differences"]().axes[0].lines
    assert [line.get_label() for line in lines[:3]] == ["float16", "bfloat16", "a mistake"]
    low, lower = (np.median(line.get_ydata()) for line in (lines[1], lines[0]))
    assert 4 < low / lower < 16  # three more bits
    found = COMPARED["a mistake"]
    assert lines[3].get_label().startswith("first in a mistake: ")
    assert "test_plot.py:" in lines[3].get_label()
    assert lines[3].get_xydata().tolist() == [[found.rows.index(found.first), found.first.difference]]


def test_errors_are_drawn_with_a_point_for_each_bound_that_is_reached():
    axes = FIGURES["errors"]().axes[0]
    assert [line.get_label() for line in axes.lines] == ["float8"]
    np.testing.assert_allclose(axes.lines[0].get_xydata(), [[0.052, 31], [0.08, 70], [0.09, 74], [0.09, 74]])
    assert [t.get_text() for t in axes.texts] == ["0.06", "0.1", "0.5, 0.2"]


def test_nothing_to_draw_is_an_error_that_says_so():
    with pytest.raises(ValueError, match="reach"):
        jamp.plot.error_curve({"float8": ErrorCurve("float8", RULES.points[-1:])})
    with pytest.raises(ValueError, match="no operation differs"):
        jamp.plot.differences({"same": compare(network, network)(W, X)})
    with pytest.raises(ValueError, match="no leaves"):
        jamp.plot.layer_ranges(underflow_report({}, STATE))
