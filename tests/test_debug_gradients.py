"""Which argument jamp.debug differentiates, what it says about other gradients, and what advice names which dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp
from jamp._jaxprs.interpret import stacked
from jamp.debug import find_nonfinite, lost_updates, rounding_report

X = jnp.linspace(0.1, 2.0, 64).reshape(8, 8)


def root(k):
    return jnp.where(k > 1.5, jnp.sqrt(k - 1.5), 0.0)


def words(search):
    return " ".join(str(search).split())


@pytest.mark.parametrize("k", [1.5, np.float64(1.5), np.float32(1.5), jnp.float32(1.5)])
def test_numbers_have_gradients_as_for_jax(k):
    assert jnp.isnan(jax.grad(root)(k))
    for fun, arg in ((root, k), (lambda p: root(p["k"]), {"k": k}), (lambda p: root(p[0] * p[1]), (k, jnp.ones(())))):
        search = find_nonfinite(fun, grad=True)(arg)
        assert search
        assert search.finding.backward
        assert "division by zero" in search.finding.cause


def test_complex_numbers_have_gradients():
    magnitude = lambda z: jnp.sqrt(jnp.real(z * jnp.conj(z)))
    assert jnp.isnan(jax.grad(magnitude)(0j))
    assert find_nonfinite(magnitude, grad=True)(0j).finding.backward


def test_numbers_beside_flags_and_functions_are_options():
    def fun(model, x):
        return jnp.sum(model["act"](x * model["w"])) if model["rate"] > 0 and model["flag"] else jnp.sum(x)

    model = {"w": jnp.zeros(()), "rate": 0.5, "flag": True, "act": jnp.sqrt}
    search = find_nonfinite(fun, grad=True)(model, X)
    assert search.finding.backward
    assert rounding_report(lambda m, x: jnp.sum(jnp.tanh(x @ x) * m["w"]), jnp.bfloat16)(model, X).gradient_error >= 0


def test_the_report_of_rounding_is_of_the_gradients_of_a_number():
    fun = lambda k, x: jnp.mean(jnp.tanh(k * (x @ x)))
    of_number, of_array = (rounding_report(fun, jnp.bfloat16)(k, jnp.eye(16) + 0.01) for k in (0.3, jnp.float32(0.3)))
    assert of_number.gradient_error == of_array.gradient_error > 0


def test_functions_of_numbers_have_the_gradients_of_jax():
    state = jamp.StaticLossScale(8.0).init()
    fun = lambda k: k**2
    assert jamp.value_and_grad(fun, state)(3.0) == (9.0, 6.0)
    assert jamp.grad(fun, state)(3.0) == jax.grad(jamp.scaled(fun))(3.0) == 6.0
    assert jax.grad(jamp.recompute(fun, 0.5))(3.0) == jax.grad(jamp.autocast(fun, jnp.float16))(3.0) == 6.0


def test_a_search_without_gradients_says_that_they_may_be_nan():
    text = words(find_nonfinite(root)(1.5))
    assert text.startswith("Found nothing: ")
    assert "a gradient may be inf or nan: find_nonfinite(fun, grad=True)" in text


def test_a_search_with_gradients_says_of_which_argument():
    loss = lambda data, theta: jnp.sum(data) + root(theta)
    search = find_nonfinite(loss, grad=True)(X, 1.5)
    assert not search
    text = words(search)
    assert "the gradients are with respect to data. For theta: find_nonfinite(jax.grad(fun, argnums=1))" in text
    assert find_nonfinite(jax.grad(loss, argnums=1))(X, 1.5)
    swapped = find_nonfinite(lambda n, theta, data: n * loss(data, theta), grad=True)(1, 2.0, X)
    assert "with respect to theta. For data: find_nonfinite(jax.grad(fun, argnums=2))" in words(swapped)
    assert "argnums" not in words(find_nonfinite(root, grad=True)(2.0))
    assert "argnums" not in words(find_nonfinite(lambda x, i: x[i], grad=True)(X[0], 1))


def test_a_search_that_was_asked_for_gradients_does_not_advise_it():
    masked = lambda x: jnp.where(x > 0, jnp.log(x), 1.0)
    assert "find_nonfinite(fun, grad=True)" in words(find_nonfinite(masked)(-X))
    texts = [words(find_nonfinite(lambda n, f=f: f(jnp.ones(2) * n), grad=True)(2)) for f in (masked, jnp.sum)]
    texts += [words(find_nonfinite(f, grad=True)(x)) for f in (masked, jnp.sum, root) for x in (-X, 2.0, -1.0, X)]
    texts.append(words(find_nonfinite(lambda n: jnp.where(n > 1, 1.0, jnp.log(jnp.zeros(()) - n)), grad=True)(2)))
    assert not [text for text in texts if "grad=True" in text]
    assert "no argument holds floating arrays" in texts[1]
    assert "no argument holds floating arrays" in texts[-1]


OPERATIONS = {
    "division": lambda x: 1 / (x - x),
    "overflow": lambda x: (x / x) * np.finfo(x.dtype).max * 2,
    "sum": lambda x: jnp.sum(x / x * np.finfo(x.dtype).max),
    "product": lambda x: (x / x * np.finfo(x.dtype).max) @ x,
    "on the way": lambda x: (x[0, :3] / x[0, :3] * np.finfo(x.dtype).max) @ jnp.asarray([1, 1, -1], x.dtype),
    "cholesky": lambda x: jnp.linalg.cholesky(-x),
    "solve": lambda x: jnp.linalg.solve(x * 0, x),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_advice_names_the_dtype_of_the_operation_or_a_wider_one(name, dtype):
    with jax.enable_x64(True):
        cure = find_nonfinite(OPERATIONS[name])(X.astype(dtype)).finding.cure
    others = {"float32": ["float16", "float32:"], "float64": ["float16", "float32", "in float64", "full_precision"]}
    assert not [other for other in others[dtype] if other in cure and "identity" not in cure]
    assert "identity" not in cure or cure.endswith(f"of its diagonal in {dtype}")


def test_a_loop_of_many_steps_takes_time_in_proportion():
    """XLA compiles a concatenation in a time that grows with the square of the number of its operands."""
    text = jax.make_jaxpr(lambda xs: stacked(xs))([jnp.ones(3)] * 1000)
    longest = max(len(eqn.invars) for eqn in text.eqns)
    assert longest < 100
    xs = [jnp.full((2, 3), float(i)) for i in range(11)]
    np.testing.assert_array_equal(stacked(xs), jnp.stack(xs))
    np.testing.assert_array_equal(stacked(xs[:1]), jnp.stack(xs[:1]))


def test_the_update_of_a_number_is_lost_as_that_of_an_array():
    for number in (1.0, jnp.float32(1.0)):
        assert str(lost_updates({"k": number}, {"k": 1e-9 * jnp.ones(())})).startswith(
            "rounding loses updates of 1 of 1"
        )
    assert str(lost_updates({"k": 1.0}, {"k": 1e-9})).startswith("rounding loses updates of 1 of 1")
    assert str(lost_updates({"k": 1}, {"k": None})).startswith("rounding loses updates of 0 of")


def test_a_number_is_a_constant_in_a_report_of_memory():
    fun = lambda k, x: jnp.sum(k * jnp.tanh(x))
    kept = lambda k: jamp.memory_report(fun)(k, X).kept
    assert kept(2.0) < kept(jnp.asarray(2.0))
