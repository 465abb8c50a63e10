"""`chunked_sum` on eight devices: rows stay where they are, and the gradients of params are added over devices once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from distributed.hlo import collectives
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jaxprs import normal

import jamp

W, X = normal(32, 64, scale=0.3, seed=1), normal(256, 32, seed=2)
Y = jnp.asarray(np.random.default_rng(3).integers(0, 64, 256))


def loss(w, x, y):
    logits = (x @ w).astype(jnp.float32)
    chosen = jnp.sum(jnp.where(jnp.arange(64) == y[:, None], logits, 0.0), -1)
    return jnp.sum(jax.nn.logsumexp(logits, -1) - chosen)


def gradients(fun, *args):
    compiled = jax.jit(jax.value_and_grad(fun, (0, 1))).lower(*args).compile()
    return compiled(*args), compiled.as_text()


def assert_close(found, wanted):
    for x, y in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4 * float(jnp.max(jnp.abs(y))))


def in_loops(text, name):
    """How many collectives of a kind stand in the bodies of loops."""
    loops = {part.partition(",")[0] for part in text.split("body=%")[1:]}
    parts = text.split("\n}\n")
    bodies = [part for part in parts if any(f"%{loop} (" in part.partition("{")[0] for loop in loops)]
    assert bodies
    return sum(body.count(f" {name}(") + body.count(f" {name}-start(") for body in bodies)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16, jnp.float16], ids=str)
def test_rows_that_are_sharded_along_the_axis_stay_where_they_are(kind, dtype):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(kind,))
    fun = jamp.chunked_sum(loss, 64)
    fun = jamp.autocast(fun, dtype) if dtype else fun
    with jax.set_mesh(mesh):
        put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
        found, text = gradients(fun, put(W), put(X, "d"), put(Y, "d"))
    wanted = jax.value_and_grad(loss, (0, 1))(W, X, Y)
    if dtype:
        for x, y in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
            assert jnp.linalg.norm(x - y) < 1e-2 * jnp.linalg.norm(y)
    else:
        assert_close(found, wanted)
    assert "all-gather" not in text
    assert "all-to-all" not in text
    assert found[1][1].sharding.is_equivalent_to(NamedSharding(mesh, P("d")), 2)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def test_a_sharded_vocabulary_and_rows_along_another_axis(kind):
    mesh = jax.make_mesh((2, 4), ("d", "v"), axis_types=(kind, kind))
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
    batched = lambda w, x, y: jnp.sum(jax.vmap(loss, (None, 0, 0))(w, x, y))
    rows = X.reshape(4, 64, 32), Y.reshape(4, 64)
    with jax.set_mesh(mesh):
        args = put(W, None, "v"), put(rows[0], "d"), put(rows[1], "d")
        found, text = gradients(jamp.chunked_sum(batched, 16, axis=1), *args)
    assert_close(found, jax.value_and_grad(batched, (0, 1))(W, *rows))
    assert f"f32[{32},{64}]" not in "".join(line for line in text.splitlines() if "all-gather" in line)


def test_an_fsdp_head_is_gathered_once_under_a_constraint():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))

    def gathered(w, x, y):
        return jamp.chunked_sum(loss, 64)(lax.with_sharding_constraint(w, NamedSharding(mesh, P())), x, y)

    found, text = gradients(gathered, put(W, "d"), put(X, "d"), put(Y, "d"))
    assert_close(found, jax.value_and_grad(loss, (0, 1))(W, X, Y))
    assert in_loops(text, "all-gather") == 0


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("vma", [True, False])
@pytest.mark.parametrize("dtype", [None, jnp.float16], ids=str)
def test_in_a_shard_map_the_gradient_of_params_is_added_over_devices_once(vma, dtype):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    fun = jamp.chunked_sum(loss, 8)
    fun = jamp.autocast(fun, dtype) if dtype else fun

    def mapped(w, x, y):
        if vma:
            return jax.value_and_grad(lambda w, x: lax.psum(fun(w, x, y), "d"), (0, 1))(w, x)
        value, (of_w, of_x) = jax.value_and_grad(fun, (0, 1))(w, x, y)
        return lax.psum(value, "d"), (lax.psum(of_w, "d"), of_x)

    shard = jax.shard_map(
        mapped, mesh=mesh, in_specs=(P(), P("d"), P("d")), out_specs=(P(), (P(), P("d"))), check_vma=vma
    )
    compiled = jax.jit(shard).lower(W, X, Y).compile()
    found, wanted = compiled(W, X, Y), jax.value_and_grad(loss, (0, 1))(W, X, Y)
    for x, y in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        assert jnp.linalg.norm(x - y) < (2e-3 if dtype else 1e-5) * jnp.linalg.norm(y)
    big = [shape for shape in collectives(compiled.as_text()).elements() if "32,64" in str(shape)]
    assert len(big) == 1
    if dtype is None:
        assert in_loops(compiled.as_text(), "all-reduce") == 0


def test_in_a_shard_map_a_vocabulary_that_is_sharded_by_hand():
    mesh = jax.make_mesh((8,), ("v",), axis_types=(AxisType.Auto,))

    def of_part(w, x, y):
        logits, first = x @ w, 8 * lax.axis_index("v")
        largest = lax.stop_gradient(lax.pmax(lax.stop_gradient(jnp.max(logits, -1)), "v"))
        total = lax.psum(jnp.sum(jnp.exp(logits - largest[:, None]), -1), "v")
        chosen = lax.psum(jnp.sum(jnp.where(first + jnp.arange(8) == y[:, None], logits, 0.0), -1), "v")
        return jnp.sum(jnp.log(total) + largest - chosen)

    for fun in (jamp.chunked_sum(of_part, 64), jamp.autocast(jamp.chunked_sum(of_part, 64), jnp.float16)):
        specs = {"in_specs": (P(None, "v"), P(), P()), "out_specs": (P(), (P(None, "v"), P()))}
        shard = jax.shard_map(jax.value_and_grad(fun, (0, 1)), mesh=mesh, **specs)
        found, wanted = jax.jit(shard)(W, X, Y), jax.value_and_grad(loss, (0, 1))(W, X, Y)
        for x, y in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
            assert jnp.linalg.norm(x - y) < 2e-3 * jnp.linalg.norm(y)


def test_what_a_function_in_a_shard_map_closes_over_is_an_error():
    def mapped(w, x, y):
        return jamp.chunked_sum(lambda none, x, y: loss(w, x, y), 8)(None, x, y)

    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    shard = jax.shard_map(mapped, mesh=mesh, in_specs=(P(), P("d"), P("d")), out_specs=P("d"))
    with pytest.raises(ValueError, match="closed-over"):
        jax.eval_shape(shard, W, X, Y)


@pytest.mark.parametrize("kinds", [(AxisType.Auto, AxisType.Explicit), (AxisType.Explicit, AxisType.Auto)])
@pytest.mark.parametrize("specs", [(P(None, "y"), P("x")), (P("x"), P()), (P("y"), P())])
def test_one_axis_of_the_mesh_may_be_explicit_and_the_other_not(kinds, specs):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=kinds)
    with jax.set_mesh(mesh):
        w, x = (jax.device_put(z, NamedSharding(mesh, spec)) for z, spec in zip((W, X), specs, strict=True))
        found = jax.jit(jax.value_and_grad(jamp.chunked_sum(loss, 64), (0, 1)))(w, x, Y)
    assert_close(jax.device_get(found), jax.device_get(jax.value_and_grad(loss, (0, 1))(W, X, Y)))
