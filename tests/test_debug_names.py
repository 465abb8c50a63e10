"""find_nonfinite names the layer and the parameter of an overflow, and does not blame a deliberate inf."""

from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import jamp
from jamp.debug import find_nonfinite

LAYERS = [f"h_{i}" for i in range(12)]


def net(params, x):
    for name in LAYERS:
        with jax.named_scope(name), jax.named_scope("attn"):
            x = jax.jit(lambda w, x: jnp.tanh(x @ w.T))(params[name]["kernel"], x)
    return x.sum()


@pytest.mark.parametrize("planted", [6e4, 1e5])  # the product overflows, or the cast
def test_an_overflow_in_one_of_12_layers_is_named_by_layer_and_parameter(planted):
    params = {name: {"kernel": jnp.full((16, 16), planted if name == "h_7" else 1.0)} for name in LAYERS}
    search = find_nonfinite(jamp.autocast(net, jnp.float16))(params, jnp.ones((2, 16)))
    assert search.finding.primitive == ("dot_general" if planted == 6e4 else "convert_element_type")
    assert (search.finding.scope, search.finding.parameter) == ("h_7/attn", "params['h_7']['kernel']")
    assert "  layer   h_7/attn with params['h_7']['kernel']" in str(search).splitlines()


def test_a_scanned_layer_is_named_by_its_iteration_and_the_stacked_parameter():
    scanned = lambda params, x: lax.scan(lambda x, w: (x @ w, None), x, params["w"])[0]
    stack = {"w": jnp.ones((12, 4, 4)).at[5].set(3e38)}
    found = find_nonfinite(scanned)(stack, jnp.ones((2, 4))).finding
    assert (found.path, found.parameter) == (("scan, iteration 5 of 12",), "params['w']")


def test_the_backward_pass_is_in_the_layer_and_the_line_in_a_library_is_named():
    def loss(params, x):
        with jax.named_scope("head"):
            return optax.tree.norm(params) + x

    found = find_nonfinite(loss, grad=True)({"w": jnp.zeros(2)}, 1.0).finding
    assert (found.scope, found.backward) == ("head", True)
    assert f"test_debug_names.py:{loss.__code__.co_firstlineno + 2} (loss) > optax/" in found.source


def buffer(x):
    return jnp.full(4, jnp.inf).at[0].set(x), jnp.int32(1)


@pytest.mark.parametrize("grad", [False, True])
def test_a_custom_rule_that_returns_a_buffer_padded_with_inf_is_not_blamed(grad):
    padded = jax.custom_vjp(buffer)
    padded.defvjp(lambda x: (buffer(x.value), None), lambda _, g: (g[0][0],), symbolic_zeros=True)
    assert not find_nonfinite(lambda x: padded(x)[0][0], grad=grad)(jnp.float32(2))


def test_a_run_of_cheap_operations_under_autocast_is_not_a_construct_of_the_user():
    fun = jamp.autocast(lambda w, x: jnp.exp(jnp.square(x @ w)) @ w, jnp.float16)
    found = find_nonfinite(fun)(jnp.ones((64, 64)), jnp.ones((64, 64))).finding
    assert (found.primitive, found.path) == ("exp", ())


JAMP = str(Path(jamp.__file__).parent)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        pytest.param(
            f"{JAMP}_train.py",  # It lies beside the package in a checkout.
            "jamp_train.py:1 (f)",
            marks=pytest.mark.skipif(
                "site-packages" in JAMP, reason="jamp is installed, with other packages beside it"
            ),
        ),
        (f"{JAMP}/_cast.py", None),
        ("/home/me/.local/lib/python3.11/site-packages/flax/nnx/rnn.py", "> flax/nnx/rnn.py:1"),
        ("/usr/lib/python3/dist-packages/flax/nnx/rnn.py", "> flax/nnx/rnn.py:1"),
        ("/home/me/project/.venv/lib/python3.11/site-packages/flax/nnx/rnn.py", "> flax/nnx/rnn.py:1"),
    ],
    ids=["beside jamp", "in jamp", "of the user", "of the system", "of a project"],
)
def test_whose_code_a_file_is(file, source):
    code = {"log": jnp.log}
    exec(compile("def f(x): return log(x)", file, "exec"), code)
    found = find_nonfinite(lambda x: code["f"](x))(jnp.zeros(3)).finding.source
    assert found.endswith(source) if source else found.startswith("test_debug_names.py") and " > " not in found
