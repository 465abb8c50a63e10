"""jamp.nnx: NNX models of which nothing moves on an overflow, whatever the loss function did to them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jamp
import jamp.nnx

X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 6)
INF = np.full_like(X, np.inf)
POLICY = jamp.get_policy("params=float32,compute=float16,output=float32")


class Net(nnx.Module):
    def __init__(self, dtype=POLICY.compute_dtype, param_dtype=POLICY.param_dtype):
        rngs, dtypes = nnx.Rngs(0), {"dtype": dtype, "param_dtype": param_dtype}
        self.first = nnx.Linear(6, 6, rngs=rngs, **dtypes)
        self.shared = self.first
        self.norm = nnx.BatchNorm(6, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.seen = nnx.Variable(jnp.array(0))
        self.array = nnx.data(jnp.array(0))
        self.last = nnx.Linear(6, 3, rngs=rngs, **dtypes)

    def __call__(self, x):
        self.seen[...] += 1
        self.array = self.array + 1
        return POLICY.cast_to_output(self.last(self.drop(self.norm(self.shared(self.first(x))))))


def loss_fn(model, x):
    return jnp.mean(model(x) ** 2)


@functools.cache  # one optimizer and so one compilation for all that ask for the same
def made(tx=optax.adam(1e-2), wrt=nnx.Param, dtypes=(), loss_scale=jamp.DynamicLossScale(init_scale=256.0)):
    model = Net(*dtypes)
    return model, jamp.nnx.Optimizer(model, tx, wrt=wrt, loss_scale=loss_scale)


def make(**kwargs):
    return nnx.clone(made(**kwargs))


def train_step(model, optimizer, x):
    loss, grads = jamp.nnx.value_and_grad(loss_fn, optimizer)(model, x)
    optimizer.update(model, grads)
    return loss


STEP = nnx.jit(train_step)
GRAD = nnx.jit(lambda model, optimizer, x: jamp.nnx.value_and_grad(loss_fn, optimizer)(model, x))
UPDATE = nnx.jit(lambda model, optimizer, grads: optimizer.update(model, grads))


@functools.partial(jax.jit, static_argnums=0)
def merged_step(graphdef, state, x):
    model, optimizer = nnx.merge(graphdef, state)
    return train_step(model, optimizer, x), nnx.state((model, optimizer))


def by_split_and_merge(model, optimizer, x):
    loss, state = merged_step(*nnx.split((model, optimizer)), x)
    nnx.update((model, optimizer), state)
    return loss


def values(*nodes):
    """The bytes of every variable and array, without the optimizer's own scale and statistics."""
    flat = {path: nnx.as_pure(x) for path, x in nnx.to_flat_state(nnx.state(nodes))}
    key_data = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    kept = {path: x for path, x in flat.items() if not {"loss_scale_state", "stats", "grads_finite"} & {*path}}
    return {path: np.asarray(key_data(x)).tobytes() for path, x in kept.items()}


@pytest.mark.parametrize("step", [STEP, by_split_and_merge])
def test_state_changed_in_the_loss_function_survives_a_finite_step_and_is_undone_on_an_overflow(step):
    model, optimizer = make()
    fresh = values(model, optimizer)
    step(model, optimizer, X)
    before = values(model, optimizer)
    assert {path for path in fresh if fresh[path] == before[path]} == {(0, "drop", "rngs", "key")}
    assert np.isnan(step(model, optimizer, INF))
    assert values(model, optimizer) == before
    assert optimizer.opt_state.loss_scale_state.loss_scale[...] == 128
    step(model, optimizer, X)
    assert (int(model.seen[...]), int(model.array), int(model.drop.rngs.count[...]), int(optimizer.step[...])) == (
        2,
    ) * 4


def test_nnx_scan_is_the_loop():
    (model, optimizer), batches = make(), np.stack([X, INF, X, X])
    scan = nnx.scan(lambda carry, x: (carry, train_step(*carry, x)), in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    nnx.jit(scan)((model, optimizer), batches)
    looped = make()
    for x in batches:
        STEP(*looped, x)
    pairs = [
        jax.tree.leaves(nnx.as_pure(nnx.state(nodes, (nnx.Param, nnx.BatchStat, nnx.RngCount))))
        for nodes in ((model, optimizer), looped)
    ]
    for mine, theirs in zip(*pairs, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-7)
    assert int(optimizer.step[...]) == 3


def test_a_split_optimizer_has_no_loss_scale_to_find_and_the_error_says_to_merge_it():
    model, optimizer = make()
    with pytest.raises(ValueError, match=r"no loss-scale state in this State\. If the state was split.*, merge"):
        jamp.nnx.value_and_grad(loss_fn, nnx.state(optimizer))(model, X)


def test_an_already_scaled_optimizer_is_an_error_that_says_two_scalers():
    with pytest.raises(ValueError, match="Two scalers"):
        make(tx=jamp.loss_scaled(optax.sgd(0.1)))


def test_jamps_functions_read_and_set_an_optimizer():
    model, optimizer = make()
    STEP(model, optimizer, INF)
    assert (float(jamp.get_loss_scale(optimizer)), bool(jamp.get_grads_finite(optimizer))) == (128.0, False)
    assert (int(jamp.metrics(optimizer)["overflow_steps"]), float(jamp.get_stats(optimizer).success_rate)) == (1, 0.0)
    with pytest.raises(jamp.LossScaleError, match="1 steps in a row"):
        jamp.check_health(optimizer, max_consecutive_overflows=0)
    optimizer = jamp.set_loss_scale(optimizer, 8.0)
    STEP(model, optimizer, X)
    assert (float(jamp.get_loss_scale(optimizer)), int(optimizer.step[...])) == (8.0, 1)


def test_the_check_of_value_and_grad_and_that_of_update_are_one_when_compiled_and_parameters_are_not_selected():
    def lowered(fun, **kwargs):
        model, optimizer = make(dtypes=(jnp.float32,), **kwargs)
        graphdef, state = nnx.split((model, optimizer))

        def step(state, x):
            model, optimizer = nnx.merge(graphdef, state)
            fun(model, optimizer, x)
            return nnx.state((model, optimizer))

        return jax.jit(step).lower(state, X).compile()

    def without_undo(model, optimizer, x):
        scale = optimizer.opt_state.loss_scale_state.loss_scale[...]
        grads = nnx.grad(lambda model: loss_fn(model, x) * scale)(model)
        optimizer.update(model, jax.tree.map(lambda g: g / scale, grads))

    count = lambda compiled: compiled.as_text().count(" is-finite(")
    mine, other = lowered(train_step), lowered(without_undo)
    assert count(mine) == count(other) > 0
    plain = lowered(lambda m, o, x: o.update(m, nnx.grad(loss_fn)(m, x)), loss_scale=jamp.NoOpLossScale())
    without = lowered(train_step, loss_scale=jamp.NoOpLossScale())
    assert without.cost_analysis()["flops"] == plain.cost_analysis()["flops"]


def test_has_aux_several_arguments_and_keywords():
    model, optimizer = make()
    fun = lambda model, other, x: (loss_fn(model, x) + loss_fn(other, x), (other.last.kernel, 3))
    other = Net()
    grad_fn = nnx.jit(jamp.nnx.value_and_grad(fun, optimizer, argnums=(0, 1), has_aux=True))
    (_, (kernel, three)), grads = grad_fn(model, other, x=X)
    assert (len(grads), three, int(model.seen[...]), int(other.seen[...])) == (2, 3, 1, 1)
    assert kernel[...].shape == (6, 3)
    before = values(model, other)
    grad_fn(model, other, x=INF)
    assert values(model, other) == before


def test_each_of_several_losses_undoes_what_it_did_itself():
    model, optimizer = make()
    grads = [GRAD(model, optimizer, x)[1] for x in (X, INF)]
    UPDATE(model, optimizer, jax.tree.map(jnp.add, *grads))
    assert (int(model.seen[...]), int(optimizer.step[...])) == (1, 0)


def test_wrt_decides_what_is_differentiated_checked_and_stepped():
    model, optimizer = make(wrt=nnx.PathContains("last"))
    before = values(model.first)
    _, grads = GRAD(model, optimizer, X)
    assert {path[0] for path, _ in nnx.to_flat_state(grads)} == {"last"}
    UPDATE(model, optimizer, grads)
    assert values(model.first) == before
    assert int(optimizer.step[...]) == 1


def test_gradients_are_those_of_float32_and_a_shared_parameter_has_one():
    (half, optimizer), full = make(), Net(jnp.float32)
    half.drop.rate = full.drop.rate = 0.0
    trees = GRAD(half, optimizer, X)[1], nnx.jit(nnx.grad(loss_fn))(full, X)
    assert len({jax.tree.structure(nnx.as_pure(tree)) for tree in trees}) == 1
    mine, true = (jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves(tree)]) for tree in trees)
    assert jnp.linalg.norm(mine - true) < 2e-2 * jnp.linalg.norm(true)


def test_half_precision_parameters_keep_their_dtype_under_masters():
    model, optimizer = make(tx=jamp.master_params(optax.adam(1e-2)), dtypes=(jnp.float16, jnp.float16))
    for x in (X, INF):
        STEP(model, optimizer, x)
    assert (model.first.kernel[...].dtype, int(optimizer.step[...])) == (jnp.float16, 1)
    assert {x.dtype for x in jax.tree.leaves(optimizer.opt_state.inner_state.master_params)} == {jnp.dtype(jnp.float32)}


def test_autocast_combines_with_an_optimizer():
    model, optimizer = make(dtypes=(None,))

    def step(model, optimizer, x):
        _, grads = jamp.nnx.value_and_grad(jamp.autocast(loss_fn), optimizer)(model, x)
        optimizer.update(model, grads)

    graphdef, state = nnx.split((model, optimizer))
    assert "f16[" in str(jax.make_jaxpr(lambda state: step(*nnx.merge(graphdef, state, copy=True), X))(state))
    for x in (X, INF):
        nnx.jit(step)(model, optimizer, x)
    assert (int(model.seen[...]), int(optimizer.step[...])) == (1, 1)
    assert {x.dtype for x in jax.tree.leaves(nnx.state(model, nnx.Param))} == {jnp.dtype(jnp.float32)}


def test_replicas_under_an_axis_name_skip_and_undo_together():
    model = Net()
    optimizer = jamp.nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param, axis_name="replicas")
    graphdef, state = nnx.split((model, optimizer))

    def step(x):
        model, optimizer = nnx.merge(graphdef, state, copy=True)
        train_step(model, optimizer, x)
        return model.seen[...], optimizer.step[...]

    seen, steps = jax.jit(jax.vmap(step, axis_name="replicas"))(np.stack([X, INF]))
    assert (seen.tolist(), steps.tolist()) == ([0, 0], [0, 0])


def test_a_changed_dtype_is_an_error_and_what_the_loss_function_creates_stays():
    def loss(model, x):
        model.new = nnx.Variable(x[0])
        return loss_fn(model, x)

    def promotes(model, x):
        model.seen.set_value(jnp.float32(model.seen))
        return loss_fn(model, x)

    model, optimizer = make()
    nnx.jit(jamp.nnx.value_and_grad(loss, optimizer))(model, INF)
    assert np.isinf(model.new[...]).all()
    with pytest.raises(ValueError, match=r"seen changed from int32\[\] to float32\[\]"):
        jamp.nnx.value_and_grad(promotes, optimizer)(model, X)
