"""rounding_report on layers of Linen and Equinox: their scopes are rows, and a row names their line."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import jamp

KEYS = jax.random.split(jax.random.key(0), 2)


class Summed(nn.Module):
    """A residual stream that is rounded to 16 bit by hand after each layer."""

    @nn.compact
    def __call__(self, x):
        for i in range(4):
            x = x + jnp.tanh(nn.Dense(16, name=f"h_{i}")(x)) / 8
            with jax.named_scope(f"h_{i}"):
                x = x.astype(jnp.bfloat16).astype(jnp.float32)  # planted
        return nn.Dense(16, name="head")(x)


@pytest.mark.slow
def test_equal_layers_of_linen_are_one_row_with_the_error_of_all():
    x = jax.random.normal(KEYS[1], (8, 16))
    params = jax.jit(Summed().init)(KEYS[0], x)
    fun = lambda params, x: jnp.mean(Summed().apply(params, x) ** 2)
    first, *rest = jamp.debug.rounding_report(fun, jnp.bfloat16)(params, x).rows
    assert (first.operation, first.scope[-3:], first.worst) == ("convert_element_type", "h_*", "")
    assert all(row.damage < 0.8 * first.damage for row in rest)
    assert first.gradient_error == pytest.approx(first.measured[1], rel=0.7)
    assert len({(row.operation, row.source, row.backward, row.gradient_of) for row in (first, *rest)}) == len(rest) + 1


class Cumulative(eqx.Module):
    weight: jax.Array

    def __call__(self, x):
        h = jnp.cumsum(jnp.abs(x @ self.weight).astype(jnp.bfloat16), 0).astype(jnp.float32)  # planted
        return jnp.mean(jnp.sin(h))


@pytest.mark.slow
def test_the_operation_of_an_equinox_module_that_rounds_is_named():
    w, x = jax.random.normal(KEYS[0], (32, 8)) / 6, jax.random.normal(KEYS[1], (256, 32))
    report = jamp.debug.rounding_report(lambda model, x: model(x), jnp.bfloat16)(Cumulative(w), x)
    assert report.rows[0].operation == "cumsum"
    with pytest.raises(ValueError, match=r"other operations round .*cumsum at test_rounding_report\.py:\d+"):
        report.rules(error=1e-2)
