"""Residuals in 8 bits on eight devices: a block of codes never crosses a shard."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxprs import equations
from test_residuals import I8, LAYERS, W, X, error, grads, holds_codes, scanned

import jamp


@pytest.mark.parametrize("spec", [("d", None), (None, "d")])
def test_on_explicit_mesh_axes_no_block_crosses_a_shard(spec):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,))
    spec = PartitionSpec(*spec)

    def loss(w, x):
        for _ in range(4):
            x = jnp.tanh(jnp.einsum("ab,bc->ac", x, w, out_sharding=spec))
        return jnp.sum(jnp.einsum("ab,bc->ac", x, w, out_sharding=PartitionSpec()) ** 2)

    with jax.set_mesh(mesh):
        w, x = jax.device_put(W, NamedSharding(mesh, PartitionSpec())), jax.device_put(X, NamedSharding(mesh, spec))
        fun = jamp.recompute(loss, 1.0, residuals=I8)
        expected, found = grads(loss, w, x)[1], grads(fun, w, x)[1]
        assert max(map(error, found, expected)) < 0.02
        assert [v.sharding for v in found] == [v.sharding for v in expected]
        codes = [
            v.aval
            for eqn in equations(jax.make_jaxpr(jax.grad(fun))(w, x))
            for v in eqn.outvars
            if getattr(v.aval, "dtype", None) == I8
        ]
        assert codes
        assert all(aval.sharding.spec.index("d") == list(spec).index("d") for aval in codes)


@pytest.mark.parametrize("layer", ["block", "custom_vjp", "cond"])
def test_inside_shard_map(layer):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    inner = scanned(LAYERS[layer])
    specs = {"mesh": mesh, "in_specs": (PartitionSpec(), PartitionSpec("d")), "out_specs": PartitionSpec()}
    loss = jax.shard_map(lambda w, x: lax.psum(inner(w, x), "d"), **specs)
    x = jnp.concatenate([scale * X for scale in (1, 0.5, -1, 2, 1, 3, -2, 1)])
    expected, found = grads(loss, W, x)[1], grads(jamp.recompute(loss, 1.0, residuals=I8), W, x)[1]
    assert max(map(error, found, expected)) < 0.02
    assert holds_codes(jamp.recompute(loss, 1.0, residuals=I8), W, x)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("gathers", [True, False])
def test_weights_of_a_shard_map_stay_as_they_are(gathers, check_vma):
    """A weight that is gathered for each layer, or whose type says that it varies over the devices."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))

    def loss(w, x):
        gathered = lambda: lax.all_gather(w, "d", axis=0, tiled=True) if gathers else w
        for _ in range(4):
            x = jnp.tanh(x @ gathered())
        return lax.pmean(jnp.sum((x @ gathered()) ** 2), "d")

    specs = {"in_specs": (PartitionSpec("d" if gathers else None), PartitionSpec("d")), "out_specs": PartitionSpec()}
    fun = jax.shard_map(jamp.recompute(loss, 1.0, residuals=I8), mesh=mesh, check_vma=check_vma, **specs)
    # One device has 192 rows of each activation, and all 128 of a weight.
    x = jnp.concatenate([X] * 24)
    codes = [
        v.aval.shape
        for eqn in equations(jax.make_jaxpr(jax.grad(fun, (0, 1)))(W, x))
        for v in eqn.outvars
        if getattr(v.aval, "dtype", None) == I8
    ]
    assert (192, 128) in codes
    assert (128, 128) not in codes
