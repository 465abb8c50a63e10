"""docs/lora-serving-export.md: what it says besides its programs, which check_pages.py runs."""

import importlib.util
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pages import programs
from processes import run_python

import jamp

needs_flatbuffers = pytest.mark.skipif(
    not importlib.util.find_spec("flatbuffers"), reason="jax.export serializes with flatbuffers"
)
pytestmark = pytest.mark.promotes("the page, whose weights are in bfloat16 and its activations in float32")


@pytest.fixture(scope="module")
def page():
    """The model of the page, its base in 16 bit, and its base in codes."""
    first, _, third, *_ = programs("lora-serving-export.md")
    names = {"__name__": "page"}
    with jax.numpy_dtype_promotion("standard"):
        exec(first[0], names)
        names["frozen"] = jamp.cast_floating(names["base"], jnp.bfloat16)
        exec(third[0].partition("for format")[0], names)
    return types.SimpleNamespace(**names)


def runs(page, fun, dtype):
    """How the products of the base and those of the adapters run."""
    rows = jamp.autocast_report(fun, dtype)(page.lora, page.frozen, page.tokens).rows
    products = [row for row in rows if row.operation == "dot_general"]
    named = lambda name: {str(row.runs).split(",")[0] for row in products if row.parameter.startswith(name)}
    return named("base['layers']"), named("lora")


@pytest.mark.parametrize(("format", "narrow"), [(jamp.Int8(), "int8"), (jamp.Float8(), "float8_e4m3fn")])
def test_products_of_the_base_are_8_bit_and_those_of_the_adapters_bfloat16(page, format, narrow):
    assert runs(page, page.loss_fn, jnp.bfloat16) == ({"bfloat16"}, {"bfloat16"})
    assert runs(page, page.loss_fn, format) == ({narrow}, {"bfloat16"})


def test_without_the_cast_behind_the_embedding_the_first_norm_runs_in_bfloat16(page):
    def first_norm(dtype):
        def fun(base, tokens):
            return page.norm(base["embed"][tokens].astype(dtype)) @ base["head"]

        rows = jamp.autocast_report(fun, jnp.bfloat16)(page.frozen, page.tokens).rows
        return {str(row.runs) for row in rows if row.operation == "rsqrt"}

    assert first_norm(jnp.float32) == {"float32 -> float32"}
    assert first_norm(jnp.bfloat16) == {"bfloat16 -> bfloat16"}


def test_the_backward_pass_keeps_codes_unless_all_weights_are_dequantized_before_the_first_layer(page):
    def kept(loss_fn):
        fun = jamp.autocast(loss_fn, jnp.bfloat16)
        residuals = jax.tree.leaves(jax.vjp(lambda lora: fun(lora, page.codes, page.tokens), page.lora)[1])
        shapes = set(page.SHAPES.values())
        return {x.dtype.name for x in residuals if x.shape in shapes}

    def before(lora, base, tokens):
        is_coded = lambda x: isinstance(x, dict) and "codes" in x
        return page.loss_fn(lora, jax.tree.map(page.weight, base, is_leaf=is_coded), tokens)

    assert kept(page.loss_fn) == {"int8"}
    assert "bfloat16" in kept(before)


def test_a_budget_keeps_more_than_the_adapters_need_unless_the_base_is_in_stop_gradient(page):
    """The numbers of docs/a-model-that-does-not-fit.md."""
    of_weights = {x.shape for x in jax.tree.leaves((page.frozen, page.lora))}

    def kept(loss_fn, budget):  # MB of activations
        fun = jamp.autocast(loss_fn, jnp.bfloat16, memory_budget=budget)
        residuals = jax.tree.leaves(jax.vjp(lambda lora: fun(lora, page.frozen, page.tokens), page.lora)[1])
        return sum({id(x): x.nbytes for x in residuals if x.shape not in of_weights}.values()) / 1e6

    def stopped(lora, base, tokens):
        return page.loss_fn(lora, jax.lax.stop_gradient(base), tokens)

    budgets = 1.0, 0.5, 0.0
    numbers = [[f"{kept(fun, budget):.2f}" for budget in budgets] for fun in (page.loss_fn, stopped)]
    assert numbers == [["4.92", "2.43", "0.79"], ["4.78", "2.29", "0.53"]]
    fun = jamp.autocast(stopped, jnp.bfloat16)
    assert "bf16[512,128] convert_element_type" in str(jamp.memory_report(fun, 0)(page.lora, page.frozen, page.tokens))


@pytest.mark.skipif(not importlib.util.find_spec("flax"), reason="Flax is not installed")
def test_nnx_trains_the_adapters_alone_in_float16():
    from flax import nnx

    import jamp.nnx

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.base = nnx.Linear(128, 16, rngs=rngs, param_dtype=jnp.bfloat16, dtype=jnp.float32)
            self.lora = nnx.LoRA(128, 8, 16, rngs=rngs)

        def __call__(self, x):
            return self.base(x) + self.lora(x)

    model, x = Model(nnx.Rngs(0)), jax.random.normal(jax.random.key(0), (64, 128))
    optimizer = jamp.nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.LoRAParam)
    loss_fn = jamp.autocast(lambda model, x: jnp.mean((model(x) - 1) ** 2), jnp.float16)

    @nnx.jit
    def train_step(model, optimizer, x):
        loss, grads = jamp.nnx.value_and_grad(loss_fn, optimizer)(model, x)
        optimizer.update(model, grads)
        return loss

    before = np.asarray(model.base.kernel[...])
    losses = [float(train_step(model, optimizer, x)) for _ in range(20)]
    assert losses[-1] < 0.8 * losses[0]
    np.testing.assert_array_equal(model.base.kernel[...], before)


def shapes(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


@needs_flatbuffers
def test_a_process_without_jamp_runs_what_was_exported(page, tmp_path):
    from jax import export

    predict = jax.jit(jamp.autocast(lambda w, x: jnp.tanh(x @ w), jnp.bfloat16))
    (n,) = export.symbolic_shape("n")
    w, x = jnp.ones((16, 8)) / 3, jnp.ones((5, 16))
    exported = export.export(predict)(shapes(w), jax.ShapeDtypeStruct((n, 16), jnp.float32))
    (tmp_path / "program").write_bytes(exported.serialize())
    code = f"""
import sys, jax.numpy as jnp
from jax import export
loaded = export.deserialize(open({str(tmp_path / "program")!r}, "rb").read())
out = loaded.call(jnp.ones((16, 8)) / 3, jnp.ones((5, 16)))
assert "jamp" not in sys.modules
print(out.shape, out.dtype, float(out[0, 0]))
"""
    assert run_python("-c", code) == f"(5, 8) float32 {float(predict(w, x)[0, 0])}\n"


@needs_flatbuffers
@pytest.mark.parametrize("format", [jamp.Int8(), jamp.Float8()])
def test_8_bit_for_gpus_is_exported_with_one_check_disabled(page, format):
    from jax import export

    predict = jax.jit(jamp.autocast(page.forward, format))
    arguments = shapes((page.frozen, page.lora, page.tokens))
    with pytest.raises(ValueError, match="LayoutConstraint"):
        export.export(predict, platforms=["cpu", "cuda"])(*arguments)
    allowed = [export.DisabledSafetyCheck.custom_call("LayoutConstraint")]
    exported = export.export(predict, platforms=["cpu", "cuda"], disabled_checks=allowed)(*arguments)
    given = page.frozen, page.lora, page.tokens
    loaded = export.deserialize(exported.serialize())
    np.testing.assert_allclose(loaded.call(*given), predict(*given), atol=2e-2)


@needs_flatbuffers
def test_gradients_are_exported_at_any_budget_and_a_loaded_function_is_differentiated(page):
    from jax import export

    given = page.lora, page.frozen, page.tokens
    (n,) = export.symbolic_shape("n")
    tokens = jax.ShapeDtypeStruct((n, page.tokens.shape[1]), jnp.int32)
    for budget in (1.0, 0.5):
        loss_fn = jamp.autocast(page.loss_fn, jnp.bfloat16, memory_budget=budget)
        grad_fn = jax.jit(jax.value_and_grad(loss_fn))
        exported = export.export(grad_fn)(*shapes(given[:2]), tokens)
        check_close(export.deserialize(exported.serialize()).call(*given), grad_fn(*given))
    exported = export.export(jax.jit(loss_fn))(*shapes(given))
    loaded = export.deserialize(exported.serialize(vjp_order=1))
    check_close(jax.grad(lambda lora: loaded.call(lora, *given[1:]))(page.lora), grad_fn(*given)[1])


def check_close(found, wanted):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, rtol=0.02, atol=0.02 * float(abs(y).max()))


@needs_flatbuffers
def test_a_train_step_is_exported_if_the_types_of_its_state_are_registered():
    from jax import export

    tx, params, x = jamp.loss_scaled(optax.sgd(0.1)), {"w": jnp.ones((16, 16))}, jnp.ones((4, 16))

    def step(params, opt_state, x):
        loss_fn = jamp.autocast(lambda params: jnp.mean((x @ params["w"]) ** 2), jnp.float16)
        loss, grads = jamp.value_and_grad(loss_fn, opt_state)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    given = params, tx.init(params), x
    exported = export.export(jax.jit(step))(*shapes(given))
    with pytest.raises(ValueError, match="unregistered type"):
        exported.serialize()
    for kind in (jamp.LossScaledState, jamp.LossScaleStats, jamp.DynamicLossScaleState, optax.EmptyState):
        export.register_namedtuple_serialization(kind, serialized_name=kind.__name__)
    loaded = export.deserialize(exported.serialize())
    check_close(loaded.call(*given), jax.jit(step)(*given))
