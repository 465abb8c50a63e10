"""Lints of autocast_report and rounding_report: what needs more digits than 16 bit, whatever the bound of an error."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jamp
import jamp.debug
from benchmarks import mixture, models
from benchmarks.memory import convolutions, llama

X = jax.random.normal(jax.random.key(0), (512, 32))
W = jax.random.normal(jax.random.key(1), (32, 32)) / 6
low = functools.partial(jnp.asarray, dtype=jnp.bfloat16)


def rotated(dtype, w, x):
    """Rotary positions, whose angles are computed in a dtype."""
    positions = jnp.arange(512, dtype=dtype)
    frequencies = 1 / jnp.asarray(10000, dtype) ** (jnp.arange(0, 32, dtype=dtype) / 32)
    angles = positions[:, None] * frequencies
    return jnp.mean(x @ w * jnp.cos(angles).astype(x.dtype))  # here: angles


def given_positions(w, x, positions):
    with jax.named_scope("rope"):
        angles = positions.astype(jnp.float32)[:, None] * low(w[0]).astype(jnp.float32)
    return jnp.mean(x @ w * jnp.sin(angles))


def sinusoidal(dtype, w, x):
    """Positions in a loop over layers, as a jitted function computes them."""
    angle = jax.jit(lambda i: jnp.asarray(jnp.arange(512), dtype)[:, None] / jnp.exp2(jnp.arange(32.0)).astype(dtype))
    step = lambda h, w: (jnp.tanh(h @ w + jnp.sin(angle(0)).astype(h.dtype)), None)  # here: sinusoidal
    return jnp.mean(lax.scan(step, x, jnp.stack([w, w]))[0])


def routed(choose, w, x):
    with jax.named_scope("router"):
        logits = x @ w
    values, _ = lax.top_k(choose(logits), 2)  # here: routed
    return jnp.mean(values)


def by_hand(w, x):
    """Routing in bfloat16, without autocast."""
    return routed(lambda logits: logits, low(w), low(x)).astype(jnp.float32)


def summed(w, x):
    return jnp.mean((x @ w)[0, 0] + lax.cumsum(jnp.ravel(low(x)), 0)[-1].astype(jnp.float32))  # here: summed


def averaged(w, x):
    """A mean of 2**16 elements in float16: JAX's `mean` adds in float32, and a reduction by hand does not."""
    many = jnp.ones((256, 256), jnp.float16) * x[0, 0].astype(jnp.float16)
    total = lax.reduce(many, np.float16(0), lax.add, (0, 1))
    return (x @ w)[0, 0] + total.astype(jnp.float32) / 2**16  # here: averaged


def line(text):
    with open(__file__) as file:
        (number,) = [i for i, found in enumerate(file, 1) if found.rstrip().endswith(f"# here: {text}")]
    return f"test_lints.py:{number} "


def lints(fun, *args, dtype=jnp.bfloat16, **options):
    """The lints of both reports, which are the same."""
    report = jamp.autocast_report(fun, dtype, **options)(*args)
    assert report.hints[: len(report.lints)] == report.lints
    assert jamp.debug.rounding_report(fun, dtype, **options)(*args).lints == report.lints
    return report.lints


@pytest.mark.parametrize("fun", [rotated, sinusoidal])
def test_angles_with_the_digits_of_16_bit_are_named(fun):
    (found,) = lints(functools.partial(fun, jnp.bfloat16), W, X)
    assert found.startswith(line("angles" if fun is rotated else "sinusoidal"))
    assert "of angles up to 511 with the digits of bfloat16, which is off by up to 2; compute it in float32" in found
    assert lints(functools.partial(fun, jnp.float32), W, X) == ()


def test_positions_that_16_bit_holds_are_no_finding():
    def fun(w, x):
        positions = jnp.arange(200).astype(jnp.bfloat16).astype(jnp.float32)
        return jnp.mean(x @ w) + jnp.mean(jnp.sin(positions))

    assert lints(fun, W, X) == ()
    more = lambda w, x: fun(w, x) + jnp.mean(jnp.sin(jnp.arange(300).astype(jnp.bfloat16).astype(jnp.float32)))
    assert len(lints(more, W, X)) == 1


def test_the_range_of_positions_that_are_arguments_is_read():
    positions = jnp.arange(512)
    frequencies = lambda w, x, positions: given_positions(low(jnp.ones((32, 32))).astype(jnp.float32), x, positions)
    (found,) = lints(frequencies, W, X, positions)
    assert "angles up to 511" in found
    assert lints(frequencies, W, X, positions // 8) == ()
    assert jamp.autocast_report(frequencies, jnp.bfloat16)(W, X, jax.ShapeDtypeStruct((512,), jnp.int32)).lints == ()


def test_router_logits_in_16_bit_are_named_with_the_rule_that_raises_them():
    fun = functools.partial(routed, lambda logits: logits)
    (found,) = lints(fun, W, X)
    assert found.startswith(line("routed"))
    assert "top_k chooses by values with the digits of bfloat16" in found
    assert found.endswith("; rules={'dot_general[router]': 'accumulate'} raises it")
    assert lints(fun, W, X, rules={"dot_general[router]": "accumulate"}) == ()
    assert lints(functools.partial(routed, jax.nn.softmax), W, X) == ()
    (found,) = jamp.autocast_report(by_hand, jnp.bfloat16)(W, X).lints
    assert found.endswith("; rules={'dot_general[router]': 'accumulate', 'top_k': 'float32'} raises it")


@pytest.mark.filterwarnings("ignore:autocast changes no product")
@pytest.mark.parametrize("fun", [functools.partial(rotated, jnp.bfloat16), by_hand, summed])
def test_a_compute_dtype_of_float32_has_no_rule_that_raises_16_bit(fun):
    (found,) = lints(fun, W, X, dtype=jnp.float32)
    assert found.endswith("; compute it in float32 in the code")


def test_sums_of_many_terms_in_16_bit_are_named():
    (found,) = lints(summed, W, X)
    assert found.startswith(line("summed"))
    assert "cumsum adds 16384 terms in bfloat16; rules={'cumsum': 'float32'} raises it" in found
    assert lints(lambda w, x: summed(w, x[:128]), W, X) == ()
    assert lints(lambda w, x: jnp.mean(low(x @ w)).astype(jnp.float32), W, X) == ()  # JAX adds in float32


def test_a_mean_of_many_elements_in_float16_may_overflow():
    (found,) = jamp.autocast_report(averaged, jnp.float16)(W, X).lints
    assert "adds 65536 terms in float16, which overflows if their mean is 1 or more" in found


TRANSFORMERS = [(mixture, "GPT-2 124 M"), (models, "ViT-B/16"), (models, "GPT-2 124 M"), (llama, "GPT-2 124 M")]


@pytest.mark.slow_after(2)
@pytest.mark.promotes("a number from NumPy scales 16-bit queries")
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
@pytest.mark.parametrize(("module", "name"), TRANSFORMERS)
def test_the_models_of_the_benchmarks_have_no_lint(module, name, dtype):
    """At their real sizes, in float32 and by hand in 16 bit, forward and with their gradients."""
    loss, params, batch = models.problem(module, models.SHAPES[name], 8, scanned=module is not mixture)
    has_no_lint(loss, params, batch, dtype)


@pytest.mark.slow
@pytest.mark.promotes("16-bit products have float32 biases")
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
@pytest.mark.parametrize("name", ["ResNet-18", "ResNet-50", "U-Net"])
def test_the_convolutional_networks_of_the_benchmarks_have_no_lint(name, dtype):
    images, labels = jax.ShapeDtypeStruct((32, 64, 64, 3), jnp.float32), jax.ShapeDtypeStruct((32,), jnp.int32)
    loss, made, batch = {
        "ResNet-18": (models.resnet_loss, lambda: models.resnet_params(64), (images, labels)),
        "ResNet-50": (convolutions.resnet_loss, convolutions.resnet_params, (images, labels)),
        "U-Net": (convolutions.unet_loss, convolutions.unet_params, (images, images)),
    }[name]
    has_no_lint(loss, jax.eval_shape(made), batch, dtype)


def has_no_lint(loss, params, batch, dtype):
    loss = functools.partial(loss, dtype=dtype)
    for fun in (loss, jax.grad(loss if dtype else jamp.autocast(loss, jnp.bfloat16))):
        assert jamp.autocast_report(fun, jnp.bfloat16)(params, batch).lints == ()


def test_a_lint_is_in_both_tables():
    fun = functools.partial(routed, lambda logits: logits)
    for report in (jamp.autocast_report, jamp.debug.rounding_report):
        assert "top_k chooses by values" in " ".join(str(report(fun, jnp.bfloat16)(W, X)).split())


def test_a_warning_names_the_format_that_changes_no_product():
    with pytest.warns(UserWarning, match=r"^Float8 changes no product of this function"):
        jamp.debug.rounding_report(functools.partial(routed, jax.nn.softmax), jamp.Float8(min_size=32))(W, X)
