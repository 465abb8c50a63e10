"""Reports of sharded programs on meshes of two axes: they say what they say on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P, reshard
from jaxprs import normal

import jamp
import jamp.debug

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
PARAMS = {"up": normal(2, 16, 32) / 4, "down": normal(2, 32, 16, seed=1) / 6}
X = normal(8, 4, 16, seed=2)
# How the layers' parameters are stored; what a layer gathers them to; the hidden and the outer activations.
LAYOUTS = {
    "data": ((P(), P()), (P(), P()), P("x"), P("x")),
    "tensor": ((P(None, "y"), P("y")), (P(None, "y"), P("y")), P("x", None, "y"), P("x")),
    "fsdp": ((P(("x", "y")), P(("x", "y"))), (P(), P()), P(("x", "y")), P(("x", "y"))),
    "fsdp and tensor": ((P("x", "y"), P("y", "x")), (P(None, "y"), P("y")), P("x", None, "y"), P("x")),
}


def make_loss(layout=None):
    """The loss of a scan over two layers. On Explicit axes the program says what is gathered and how products lie."""
    used, hidden, outer = layout or ((None, None), None, None)

    def layer(x, params):
        up, down = ((reshard(w, s) if layout else w) for w, s in zip((params["up"], params["down"]), used, strict=True))
        h = jax.nn.gelu(jnp.einsum("btd,df->btf", x, up, out_sharding=hidden))
        return x + jnp.einsum("btf,fd->btd", h, down, out_sharding=outer), None

    return lambda params, x: jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)


def on_mesh(kinds, name):
    """A mesh of the kinds, the loss for it, and its arguments. Specs of Auto axes are none of the program's."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=kinds)
    stored, *used = LAYOUTS[name]
    explicit = {axis for axis, kind in zip(mesh.axis_names, kinds, strict=True) if kind is EXPLICIT}
    axes = lambda part: tuple(a for a in ((part,) if isinstance(part, str) else part or ()) if a in explicit) or None
    seen = jax.tree.map(lambda s: P(*map(axes, s)), used, is_leaf=lambda s: isinstance(s, P))
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    params = {k: put(w, P(None, *s)) for (k, w), s in zip(PARAMS.items(), stored, strict=True)}
    return mesh, make_loss(seen), (params, put(X, P(used[2][0])))


CASES = [
    ((EXPLICIT, EXPLICIT), "fsdp and tensor"),
    ((EXPLICIT, AUTO), "fsdp"),
    pytest.param((EXPLICIT, EXPLICIT), "data", marks=pytest.mark.slow),
    pytest.param((EXPLICIT, EXPLICIT), "tensor", marks=pytest.mark.slow),
    pytest.param((AUTO, EXPLICIT), "tensor", marks=pytest.mark.slow),
    pytest.param((AUTO, EXPLICIT), "fsdp and tensor", marks=pytest.mark.slow),
]


@functools.cache
def on_one_device():
    return jamp.debug.rounding_report(make_loss(), jnp.bfloat16)(PARAMS, X)


@pytest.mark.parametrize(("kinds", "name"), CASES)
def test_the_rows_of_a_rounding_report_are_those_of_one_device(kinds, name):
    alone = on_one_device()
    mesh, loss, args = on_mesh(kinds, name)
    with jax.set_mesh(mesh):
        found = jamp.debug.rounding_report(loss, jnp.bfloat16)(*args)
    rows = lambda report: sorted(
        (row.operation, row.backward, row.parameter, row.dtype, row.steps, row.flops) for row in report.rows
    )
    assert rows(found) == rows(alone)
    assert {"params['up']", "params['down']"} < {row.parameter for row in found.rows}
    assert found.opaque == alone.opaque == ()
    errors = lambda report: [report.value_error, report.gradient_error, *sorted(x.gradient_error for x in report.rows)]
    assert errors(found) == pytest.approx(errors(alone), rel=0.05)


@pytest.mark.parametrize("kinds", [(EXPLICIT, EXPLICIT), (AUTO, EXPLICIT)])
def test_the_report_and_a_warning_say_why_explicit_axes_have_no_mxfp8(kinds):
    mesh, loss, args = on_mesh(kinds, "fsdp and tensor")
    with jax.set_mesh(mesh):
        report = jamp.autocast_report(loss, jamp.MXFP8(min_size=8))(*args)
        with pytest.warns(UserWarning, match="mxfp8 has no products on explicit mesh axes"):
            jax.make_jaxpr(jamp.autocast(loss, jamp.MXFP8(min_size=8)))(*args)
    assert "mxfp8 has no products on explicit mesh axes" in " ".join(str(report).split())


@pytest.mark.parametrize("kinds", [(EXPLICIT, EXPLICIT), (AUTO, EXPLICIT)])
def test_nonfinite_report_has_the_first_position_in_the_whole_array(kinds):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=kinds)
    specs = {"rows": P(("x", "y")), "columns": P(None, ("x", "y")), "both": P("y", "x"), "one": P()}
    bad = np.zeros((8, 16), np.float32)
    bad[5, 9], bad[6, 1] = np.inf, np.nan
    with jax.set_mesh(mesh):
        tree = {name: jax.device_put(bad, NamedSharding(mesh, spec)) for name, spec in specs.items()}
        found = [str(report(tree)) for report in (jamp.debug.nonfinite_report, jax.jit(jamp.debug.nonfinite_report))]
    assert found == [str(jamp.debug.nonfinite_report(dict.fromkeys(specs, bad)))] * 2
    assert found[0].count("1 inf, 1 nan of 128, first at [5, 9]") == len(specs)
