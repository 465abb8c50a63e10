"""Operations that autocast does not know: those with products in them are a warning and a row, never silence."""

import jax
import jax.extend
import jax.numpy as jnp
import pytest
from configurations import next_checkpoint
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import hijax
from jax.interpreters import mlir
from jaxprs import normal, products

import jamp

IS_NEW = jax.__version_info__ >= (0, 12)
W, X = normal(64, 64, scale=0.125), normal(8, 64, seed=1)
inner = lambda x, w: jnp.tanh(x @ w)


def invented(hold):
    """A call of a primitive of a library, which keeps its jaxpr in its parameters as `hold` says."""
    primitive = jax.extend.core.Primitive("invented")
    run = lambda x, w, **_: inner(x, w)
    primitive.def_impl(run)
    primitive.def_abstract_eval(lambda x, w, **_: x)
    mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=False))

    def fun(w, x):
        with jax.named_scope("layer"):
            return primitive.bind(x, w, held=hold(jax.make_jaxpr(inner)(x, w)))

    return fun


class Held:
    """An object that holds a jaxpr and can be compared, as parameters must."""

    def __init__(self, closed):
        self.inside = {"closed": closed}


KINDS = {
    "a jaxpr": invented(lambda closed: closed),
    "an open jaxpr": invented(lambda closed: closed.jaxpr),
    "in a tuple": invented(lambda closed: (None, (closed, 3))),
    "in a dict": invented(lambda closed: {"fun": closed}),
    "in an object": invented(Held),
}
if hasattr(hijax, "HiPrim"):

    class Dense(hijax.HiPrim):
        """What JAX's documentation shows: an operation of a user's, defined by what it expands to."""

        def __init__(self, x, w):
            self.in_avals, self.out_aval, self.params = (x, w), x, {}
            super().__init__()

        def expand(self, x, w):
            return inner(x, w)

    KINDS["HiPrim"] = lambda w, x: Dense(jax.typeof(x), jax.typeof(w))(x, w)


@pytest.mark.parametrize("fun", KINDS.values(), ids=KINDS)
def test_an_unknown_operation_with_products_is_a_warning_and_a_row(fun):
    with pytest.warns(UserWarning, match=r"^autocast leaves \d\d.\d% of the FLOPs in float32: (invented|Dense) at .*"):
        out = jamp.autocast(lambda w, x: fun(w, x) @ w, jnp.bfloat16)(W, X)
    assert jnp.allclose(out, fun(W, X) @ W, atol=0.2)
    first = jamp.autocast_report(lambda w, x: fun(w, x) @ w, jnp.bfloat16)(W, X).rows[0]
    assert (first.category, first.after) == ("no rule", "float32, float32 -> float32")
    assert "does not know" in first.reason


def layer(w, x):
    h = checkpoint_name(jnp.tanh(x @ w), "h")
    return h @ w


CHECKPOINTS = {
    "default": jax.checkpoint(layer),
    "of a jit": jax.checkpoint(jax.jit(layer)),
    "names": jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names("h")),
    "dots": jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable),
    "with CSE": jax.checkpoint(layer, prevent_cse=False),
    "twice": jax.checkpoint(lambda w, x: jax.checkpoint(layer)(w, layer(w, x))),
    "in a scan": lambda w, x: lax.scan(lambda c, _: (jax.checkpoint(layer)(w, c), None), x, None, length=2)[0],
    "of a scan": jax.checkpoint(lambda w, x: lax.scan(lambda c, _: (layer(w, c), None), x, None, length=2)[0]),
    "in a cond": lambda w, x: lax.cond(x[0, 0] < 9, jax.checkpoint(layer), lambda w, x: x, w, x),
    "in a custom_vjp": lambda w, x: in_custom_vjp(w, x),
}
if IS_NEW:
    CHECKPOINTS["with CSE of one operand"] = jax.checkpoint(layer, prevent_cse=(True, False))


@jax.custom_vjp
def in_custom_vjp(w, x):
    return jax.checkpoint(layer)(w, x)


in_custom_vjp.defvjp(lambda w, x: jax.vjp(jax.checkpoint(layer), w, x), lambda pull_back, g: pull_back(g))


QUICK = ("names",)
CASES = [
    pytest.param(fun, id=name, marks=[pytest.mark.slow] * (name not in QUICK)) for name, fun in CHECKPOINTS.items()
]


@pytest.mark.slow
@pytest.mark.parametrize("fun", CASES)
def test_the_next_checkpoint_is_entered_like_the_old_one(fun):
    loss = lambda w, x: jnp.sum(fun(w, x) ** 2)
    # In a custom rule, products stay in the carrier.
    formats = {jnp.bfloat16: jnp.bfloat16, jamp.Float8(): jnp.float8_e4m3fn}
    if fun is CHECKPOINTS["in a custom_vjp"]:
        del formats[jamp.Float8()]
    for dtype, operands in formats.items():
        cast = jamp.autocast(loss, dtype, rules={"dot_general": "compute"})
        with next_checkpoint(IS_NEW):
            assert products(cast, W, X) == {jnp.dtype(operands)}
            report = jamp.autocast_report(loss, dtype, rules={"dot_general": "compute"})(W, X)
            assert (report.share_8_bit if report.quantized else report.share_16_bit) > 0.9
            new = jax.jit(jax.grad(jamp.scaled(cast)))(W, X)
        with next_checkpoint(False):
            old = jax.jit(jax.grad(cast))(W, X)
        assert jnp.linalg.norm(new - old) < 0.02 * jnp.linalg.norm(old)
    with next_checkpoint(IS_NEW):
        assert not jamp.debug.find_nonfinite(loss)(W, X)
