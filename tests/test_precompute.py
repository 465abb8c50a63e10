"""precompute: the same results, from what is computed once of the parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jaxprs import normal
from norms import distance
from trees import assert_equal

import jamp

ROW = jamp.Float8(granularity="row")
ALL = {"dot_general": "compute"}
PARAMS = {"layers": normal(3, 128, 128), "bias": normal(128, seed=1), "head": normal(128, 128, seed=2)}
X = normal(136, 128, seed=3)


def model(params, x, train=True):
    """Layers that a scan computes, and the backward pass again, and a head."""
    layer = lambda x, w: (jax.nn.gelu(x @ w / 12 + params["bias"]) + x, None)
    x, _ = lax.scan(jax.checkpoint(layer) if train else layer, x, params["layers"])
    return jax.jit(jnp.matmul)(x, params["head"])


def rollout(params, x):
    """A loop whose constants are the parameters."""
    step = lambda c: (c[0] + 1, jnp.tanh(model(params, c[1], train=False)))
    return lax.while_loop(lambda c: c[0] < 3, step, (0, x))[1]


def of_layers(params, xs):
    return lax.scan(lambda total, x: (total + model(params, x).sum(), None), 0.0, xs)[0]


def jit(fun):
    return jax.jit(fun, compiler_options={"xla_allow_excess_precision": False})  # no rounding is left out


def assert_same(tree, other):
    """Equal to the bit on a CPU. XLA:GPU chooses the kernels of each program, and their sums have other orders."""
    if jax.default_backend() == "cpu":
        assert_equal(tree, other)
    else:
        assert distance(tree, other) < 0.01


def size(tree):
    return sum(x.nbytes for x in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    ("dtype", "share"), [(jnp.bfloat16, 0.51), (jamp.Float8(), 0.26), (ROW, 0.27), (jamp.Int8(), 0.27)]
)
@pytest.mark.parametrize("fun", [model, rollout])
def test_the_results_are_those_of_the_function_and_only_small_weights_are_kept(fun, dtype, share):
    low = jamp.autocast(fun, dtype, rules=ALL)
    late = jamp.precompute(low, PARAMS, jax.ShapeDtypeStruct(X.shape, X.dtype))
    assert_same(jit(lambda late, x: late(x))(late, X), jit(low)(PARAMS, X))
    assert_same(jit(late)(X[:130]), jit(low)(PARAMS, X[:130]))  # another batch size
    assert size(late) < share * size(PARAMS)


def test_gradients_of_micro_batches_read_weights_that_are_quantized_once():
    grad = jax.grad(lambda params, x: jnp.mean(jamp.autocast(model, jamp.Float8())(params, x) ** 2))
    late = jamp.precompute(grad, PARAMS, X)
    assert_same(jit(lambda late: late(X))(late), jit(grad)(PARAMS, X))
    maxima = lambda f, *args: str(jax.make_jaxpr(f)(*args)).count("reduce_max")
    assert maxima(late, X) < maxima(grad, PARAMS, X)
    assert not [x for x in jax.tree.leaves(late) if x.dtype == jnp.float32 and x.ndim == 3]


def test_a_broadcast_and_what_depends_on_other_arguments_is_not_kept():
    fun = lambda params, x: jnp.broadcast_to(params["bias"], (136, 128)) * 2 + jnp.where(x > 0, params["head"][0], 0)
    late = jamp.precompute(fun, PARAMS, X)
    assert_equal(late(X), fun(PARAMS, X))
    assert size(late) == 2 * 128 * 4


def test_flags_stay_what_they_are_and_a_loop_over_data_keeps_its_weights_outside():
    late = jamp.precompute(model, PARAMS, X, train=False)
    assert_equal(jit(lambda late: late(X, train=False))(late), jit(model)(PARAMS, X))
    fun, xs = jamp.autocast(of_layers, jnp.bfloat16), jnp.stack([X, 2 * X])
    late = jamp.precompute(fun, PARAMS, xs)
    assert_equal(jit(lambda late: late(xs))(late), jit(fun)(PARAMS, xs))
    assert size(late) < 0.52 * size(PARAMS)


def test_a_loop_reads_parameters_as_they_are_in_their_places():
    step = lambda params: lambda x, w: (x + 2 * w[0] - w[1] + 3 * (x - params["head"]) - params["other"], None)
    fun = lambda params, x: lax.scan(step(params), x, (params["layers"], params["layers"][:, ::-1]))[0]
    params, x = jax.tree.map(jnp.round, (PARAMS | {"other": 5 * PARAMS["layers"][0]}, X[:128]))
    assert_equal(jit(jamp.precompute(fun, params, x))(x), jit(fun)(params, x))


def test_an_effect_happens_at_every_call(capsys):
    late = jamp.precompute(lambda params, x: (jax.debug.print("called"), x + params["bias"].sum())[1], PARAMS, X)
    jax.block_until_ready((late(X), late(X)))
    jax.effects_barrier()
    assert capsys.readouterr().out == "called\n" * 2


def test_a_step_with_it_compiles_once_and_errors_say_what_to_do():
    low = jamp.autocast(model, jnp.bfloat16)
    late, apply = jamp.precompute(low, PARAMS, X), jit(lambda late, x: late(x))
    other = jax.tree.map(lambda x: 2 * x, late)
    assert not np.array_equal(apply(late, X), apply(other, X))
    assert apply._cache_size() == 1
    with pytest.raises(TypeError, match=r"has no derivative\. Take the gradient first"):
        jax.grad(lambda x: late(x).sum())(X)
    with pytest.raises(TypeError, match=r"has no derivative"):
        jax.grad(lambda b: jamp.precompute(lambda w, x: (x @ w + b).sum(), PARAMS["head"], X)(X))(1.0)


OTHERS = {
    "a number": (lambda params, x, k: x @ (params["head"] * k), (X, 2), (X, 3)),
    "a flag": (lambda params, x, name: x @ getattr(jnp, name)(params["head"]), (X, "sin"), (X, "cos")),
    "a length": (lambda params, x: x @ (params["head"] / x.shape[0]), (X,), (X[:130],)),
    "an order": (
        lambda params, x: (
            x @ jnp.sin(params["layers"][int(len(x) > 130)]) + x @ jnp.sin(params["layers"][int(len(x) <= 130)])
        ),
        (X,),
        (X[:130],),
    ),
    "another parameter": (
        lambda params, x: x @ params["layers"] if len(x) > 130 else x @ (2 * params["layers"]),
        (X,),
        (X[:130],),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_values_of_the_parameters_are_an_error_and_not_another_result(name):
    fun, first, second = OTHERS[name]
    late = jamp.precompute(fun, PARAMS, *first)
    assert late(*first).shape == fun(PARAMS, *first).shape
    with pytest.raises(ValueError, match=r"Call jamp\.precompute again"):
        late(*second)


def test_constants_that_only_the_late_part_reads_may_differ():
    key = jax.random.key(3)

    def fun(params, x):
        mask = np.tri(len(x), dtype=bool)  # depends on the shape of x alone
        noise = jax.random.normal(key, x.shape)
        return jnp.where(mask, (x + noise) @ params["head"] @ x.T, 0.0)

    late = jamp.precompute(jamp.autocast(fun, jnp.bfloat16), PARAMS, X)
    assert_equal(jit(late)(X[:130]), jit(jamp.autocast(fun, jnp.bfloat16))(PARAMS, X[:130]))


def test_results_for_new_parameters_are_one_type_and_compile_once():
    low, traces = jamp.autocast(model, jnp.bfloat16), []
    apply = jax.jit(lambda late, x: (traces.append(1), late(x))[1])
    made = [jamp.precompute(low, jax.tree.map(lambda p, i=i: i * p, PARAMS), X) for i in (1.0, 2.0)]
    assert not np.array_equal(*[apply(late, X) for late in made])
    assert len(traces) == 1
    picked = jax.lax.cond(True, lambda: made[0], lambda: made[1])
    assert_equal(apply(picked, X), apply(made[0], X))
    assert hash(made[0].func) == hash(made[1].func)
    assert made[0].func != jamp.precompute(model, PARAMS, X).func


def test_another_callback_is_an_error_and_integers_of_numpy_are_not_traced():
    double, triple = (lambda a: np.asarray(a) * 2), (lambda a: np.asarray(a) * 3)

    def fun(params, x, axis, flag):
        called = jax.pure_callback(double if flag else triple, jax.ShapeDtypeStruct((128, 128), jnp.float32), params)
        return (x @ called).sum(axis)

    late = jamp.precompute(fun, PARAMS["head"], X, np.int64(1), True)
    assert_equal(late(X, np.int64(1), True), fun(PARAMS["head"], X, 1, True))
    with pytest.raises(ValueError, match=r"Call jamp\.precompute again"):
        late(X, np.int64(1), False)


def test_parameters_may_be_a_module_and_batch_sizes_symbolic():
    params = {"act": jax.nn.relu, "w": PARAMS["head"]}
    fun = lambda params, x: params["act"](x @ params["w"]) + jnp.broadcast_to(params["w"].sum(), (x.shape[0], 1))
    late = jamp.precompute(fun, params, X)
    assert_equal(jit(lambda late: late(X))(late), jit(lambda w: fun(params | {"w": w}, X))(params["w"]))
    (rows,) = jax.export.symbolic_shape("rows")
    shapes = jax.ShapeDtypeStruct((rows, 128), jnp.float32)
    exported = jax.export.export(jax.jit(lambda w, x: jamp.precompute(fun, params | {"w": w}, x)(x)))
    assert exported(PARAMS["head"], shapes).out_avals[0].shape[1] == 128
