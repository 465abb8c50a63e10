"""jamp.nnx: what is special to it. That a skip restores a model and that replicas share it: test_contract.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jaxprs import products
from norms import distance
from pages import ROOT
from processes import run_python
from trees import assert_close, bits

import jamp
import jamp.debug
import jamp.linen
import jamp.nnx

X = np.linspace(-1, 1, 48, dtype=np.float32).reshape(4, 12)
INF = np.full_like(X, np.inf)


class Net(nnx.Module):
    def __init__(self, dtype=jnp.float16, param_dtype=jnp.float32):
        rngs, dtypes = nnx.Rngs(0), {"dtype": dtype, "param_dtype": param_dtype}
        self.first = nnx.Linear(12, 12, rngs=rngs, **dtypes)
        self.shared = self.first
        self.norm = nnx.BatchNorm(12, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.seen = nnx.Variable(jnp.array(0))
        self.array = nnx.data(jnp.array(0))
        self.last = nnx.Linear(12, 2, rngs=rngs, **dtypes)

    def __call__(self, x):
        self.seen[...] += 1
        self.array = self.array + 1
        return self.last(self.drop(self.norm(self.shared(self.first(x))))).astype(jnp.float32)


def loss_fn(model, x):
    return jnp.mean(model(x) ** 2)


@functools.cache  # one optimizer and so one compilation for all that ask for the same
def made(tx=optax.sgd(0.1, momentum=0.9), wrt=nnx.Param, dtypes=()):
    model = nnx.jit(Net, static_argnums=(0, 1))(*dtypes)
    loss_scale = jamp.DynamicLossScale(init_scale=256.0)
    return model, jamp.nnx.Optimizer(model, tx, wrt=wrt, loss_scale=loss_scale)


def make(**kwargs):
    return nnx.clone(made(**kwargs))


def train_step(model, optimizer, x, wrap=lambda f: f):
    loss, grads = jamp.nnx.value_and_grad(wrap(loss_fn), optimizer)(model, x)
    optimizer.update(model, grads)
    return loss


STEP = nnx.jit(train_step, static_argnames="wrap")
GRAD = nnx.jit(lambda model, optimizer, x: jamp.nnx.value_and_grad(loss_fn, optimizer)(model, x)[1])
UPDATE = nnx.jit(lambda model, optimizer, grads: optimizer.update(model, grads))


def counts(model, optimizer):
    return int(model.seen[...]), int(model.array), int(model.drop.rngs.count[...]), int(optimizer.step[...])


def pure(*nodes):
    """Every variable and array by its path, without the optimizer's own scale and statistics."""
    own = {"loss_scale_state", "stats", "grads_finite"}
    return {path: nnx.as_pure(x) for path, x in nnx.to_flat_state(nnx.state(nodes)) if not own & {*path}}


def test_state_changed_in_the_loss_function_is_kept_by_a_step_and_undone_by_a_skip():
    (model, optimizer), scanned = make(), make()
    fresh = pure(model, optimizer)
    STEP(model, optimizer, X)
    before = jax.tree.map(jnp.copy, pure(model, optimizer))
    assert {path for path in fresh if bits(fresh[path]) == bits(before[path])} == {(0, "drop", "rngs", "key")}
    assert np.isnan(STEP(model, optimizer, INF))
    assert bits(pure(model, optimizer)) == bits(before)
    # jamp's functions read and set an optimizer as it is.
    assert (float(jamp.get_loss_scale(optimizer)), int(jamp.metrics(optimizer)["overflow_steps"])) == (128.0, 1)
    with pytest.raises(jamp.LossScaleError, match="1 steps in a row"):
        jamp.check_health(optimizer, max_consecutive_overflows=0)
    optimizer = jamp.set_loss_scale(optimizer, 8.0)
    STEP(model, optimizer, X)
    assert jamp.get_loss_scale(optimizer) == 8.0
    # nnx.scan is the loop.
    scan = nnx.scan(lambda carry, x: (carry, train_step(*carry, x)), in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    nnx.jit(scan)(scanned, np.stack([X, INF, X]))
    assert counts(*scanned) == counts(model, optimizer) == (2, 2, 2, 2)
    assert_close(pure(*scanned), pure(model, optimizer))


def test_gradients_are_those_of_float32_also_of_several_arguments_and_with_has_aux():
    (half, optimizer), (full, _) = make(), make(dtypes=(jnp.float32, jnp.float32))
    half.drop.rate = full.drop.rate = 0.0
    grads = GRAD(half, optimizer, X), nnx.jit(nnx.grad(loss_fn))(full, X)  # A shared parameter has one.
    assert distance(*map(nnx.as_pure, grads)) < 2e-2
    (model, optimizer), (other, _) = make(), make()
    fun = lambda model, other, x: (loss_fn(model, x) + loss_fn(other, x), (other.last.kernel, 3))
    train = nnx.jit(lambda optimizer, *args: jamp.nnx.value_and_grad(fun, optimizer, (0, 1), has_aux=True)(*args))
    (_, (kernel, three)), grads = train(optimizer, model, other, X)
    assert (len(grads), three, int(model.seen[...]), int(other.seen[...])) == (2, 3, 1, 1)
    assert kernel[...].shape == (12, 2)
    before = jax.tree.map(jnp.copy, pure(model, other))
    train(optimizer, model, other, INF)
    assert bits(pure(model, other)) == bits(before)


def test_each_of_several_losses_undoes_what_it_did_itself():
    model, optimizer = make(wrt=nnx.PathContains("last"))
    grads, before = [GRAD(model, optimizer, x) for x in (X, INF)], bits(nnx.state((model.first, model.last)))
    UPDATE(model, optimizer, jax.tree.map(np.add, *grads))
    assert (int(model.seen[...]), int(optimizer.step[...])) == (1, 0)
    assert bits(nnx.state((model.first, model.last))) == before
    # `wrt` decides what is differentiated, checked and stepped.
    assert {path[0] for path, _ in nnx.to_flat_state(grads[0])} == {"last"}
    UPDATE(model, optimizer, grads[0])
    assert bits(nnx.state(model.first)) == bits(nnx.state(make()[0].first))
    assert int(optimizer.step[...]) == 1


def test_autocast_and_masters_combine_with_an_optimizer():
    model, optimizer = make(tx=jamp.master_params(optax.sgd(0.1)), dtypes=(None, jnp.float16))
    for x in (X, INF):
        STEP(model, optimizer, x, wrap=functools.partial(jamp.autocast, compute_dtype=jnp.float16))
    assert (int(model.seen[...]), int(optimizer.step[...])) == (1, 1)
    dtypes = lambda tree: {x.dtype.name for x in jax.tree.leaves(tree)}
    assert [dtypes(nnx.state(x, nnx.Param)) for x in (model.first, model.norm)] == [{"float16"}, {"float32"}]
    assert dtypes(optimizer.opt_state.inner_state.master_params) == {"float32"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [nnx.Optimizer, jamp.nnx.Optimizer])
def test_masters_and_moments_in_fewer_bits_step_as_they_do_in_optax(kind):
    """Part of a tree stays whole: the bias is small, and the second layer is in float32."""
    both = {"dtype": jnp.float32, "param_dtype": jnp.bfloat16}
    model = nnx.Sequential(nnx.Linear(64, 128, rngs=nnx.Rngs(0), **both), nnx.Linear(128, 64, rngs=nnx.Rngs(1)))
    tx = jamp.master_params(jamp.quantized_state(optax.adam(1e-2)), split=True)
    params, x = nnx.to_pure_dict(nnx.state(model, nnx.Param)), np.ones((4, 64), np.float32)
    params = jax.tree.map(jnp.copy, params)
    optimizer, loss_fn = kind(model, tx, wrt=nnx.Param), lambda model: jnp.mean(model(x) ** 2)

    @nnx.jit
    def train_step(model, optimizer):
        differentiate = nnx.grad(loss_fn) if kind is nnx.Optimizer else scaled(optimizer)
        grads = differentiate(model)
        optimizer.update(model, grads)
        return nnx.as_pure(grads)

    scaled = lambda optimizer: lambda model: jamp.nnx.value_and_grad(loss_fn, optimizer)(model)[1]

    in_optax = tx if kind is nnx.Optimizer else jamp.loss_scaled(tx)

    @jax.jit
    def step(grads, state, params):
        updates, state = in_optax.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = in_optax.init(params)
    for _ in range(3):
        grads = nnx.to_pure_dict(train_step(model, optimizer))
        params, state = step(grads, state, params)
    codes = [x.dtype.name for x in jax.tree.leaves(nnx.as_pure(optimizer.opt_state)) if x.dtype.itemsize == 1]
    assert sorted(codes)[-4:] == ["int8", "int8", "uint8", "uint8"]
    assert_close(nnx.to_pure_dict(nnx.state(model, nnx.Param)), params, rtol=1e-6)


def test_optax_maps_8_bit_moments_of_a_model_with_its_parameters():
    model, tx = nnx.Linear(64, 128, rngs=nnx.Rngs(0)), jamp.quantized_state(optax.adam(1e-2))
    optimizer, params = nnx.Optimizer(model, tx, wrt=nnx.Param), nnx.as_pure(nnx.state(model, nnx.Param))
    state, shapes = nnx.as_pure(optimizer.opt_state), jax.tree.map(lambda x: str(x.shape), params)
    found = optax.tree.map_params(tx, lambda x, shape: shape, state, shapes, transform_non_params=lambda _: None)
    moment = jax.tree.leaves(found, is_leaf=lambda x: hasattr(x, "codes"))[0]
    assert dict(moment.codes) == dict(moment.scales) == {"bias": "(128,)", "kernel": "(64, 128)"}


def test_a_model_under_autocast_gets_its_statistics_and_its_dropout_moves_on():
    results, low = [], jamp.autocast(loss_fn, jnp.float16)
    for fun in (low, loss_fn):
        model, _ = make(dtypes=(jnp.float32, jnp.float32))
        graphdef, state = nnx.split(model)
        step = nnx.jit(nnx.value_and_grad(fun))
        losses = [step(model, X) for _ in range(2)]
        assert losses[0][0] != losses[1][0]  # Another dropout mask.
        results.append(nnx.as_pure((losses, model.norm.mean, model.norm.var)))
        assert (int(model.seen[...]), int(model.drop.rngs.count[...]), int(model.array)) == (2, 2, 2)
    assert distance(*results) < 2e-2
    assert products(lambda s: nnx.grad(low)(nnx.merge(graphdef, s, copy=True), X), state) == {jnp.dtype(jnp.float16)}
    low(model, X)  # outside jit
    assert model.seen[...] == 3


def test_what_the_loss_function_creates_stays_and_mistakes_are_clear_errors():
    def creates(model, x):
        model.new = nnx.Variable(x[0])
        return loss_fn(model, x)

    def promotes(model, x):
        model.seen.set_value(jnp.float32(model.seen))
        return loss_fn(model, x)

    model, optimizer = make()
    grad_fn = nnx.jit(lambda f, optimizer, *args: jamp.nnx.value_and_grad(f, optimizer)(*args), static_argnums=0)
    grad_fn(creates, optimizer, model, INF)
    assert np.isinf(model.new[...]).all()
    with pytest.raises(ValueError, match=r"seen must stay int32\[\], got float32\[\]"):
        grad_fn(promotes, optimizer, model, X)
    with pytest.raises(ValueError, match="merge"):
        jamp.nnx.value_and_grad(loss_fn, nnx.state(optimizer))(model, X)


class Sowing(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        self.load = nnx.Variable(jnp.float32(0))
        self.calls = 0

    def __call__(self, x, what):
        h = self.linear(x)
        if what == "sow":
            self.sow(nnx.Intermediate, "aux", h.mean())
        elif what == "replace":
            self.load = nnx.Variable(jnp.float32(7))
        elif what == "count":
            self.calls += 1
        else:
            self.load[...] = jnp.float32(7)
        return h


@pytest.mark.filterwarnings("ignore:Using 'Module.sow")
def test_what_autocast_would_lose_of_a_module_is_an_error():
    call = jamp.autocast(lambda module, x, what: module(x, what), jnp.float16)
    for what in ("sow", "replace", "count"):
        with pytest.raises(ValueError, match="Variable"):
            call(Sowing(), jnp.ones((2, 4)), what)
    with pytest.raises(ValueError, match="capture"):
        nnx.capture(lambda module: call(module, jnp.ones((2, 4)), "sow"), nnx.Intermediate)(Sowing())
    inside = lambda module, x: nnx.capture(lambda m: m(x, "sow"), nnx.Intermediate)(module)[1]
    found = [jax.tree.leaves(f(Sowing(), jnp.ones((2, 4)))) for f in (inside, jamp.autocast(inside, jnp.float16))]
    assert len(found[0]) == 1
    assert_close(found[1], found[0], 1e-2)
    module = Sowing()
    call(module, jnp.ones((2, 4)), "assign")
    assert module.load[...] == 7


@pytest.mark.slow
def test_scaled_differentiates_a_module_and_what_it_changes_stays():
    models = [nnx.jit(Net, static_argnums=(0, 1))(jnp.float16, jnp.float32) for _ in range(2)]
    step = lambda fun: nnx.jit(nnx.value_and_grad(fun))
    found, expected = (step(fun)(model, X) for fun, model in zip((jamp.scaled(loss_fn), loss_fn), models, strict=True))
    assert_close(found[0], expected[0], 1e-3)
    assert_close(*(nnx.to_pure_dict(grads) for _, grads in (found, expected)), 1e-2)
    assert_close(*(nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngKey))) for model in models), 1e-3)
    assert (int(models[0].seen[...]), int(models[0].array), int(models[0].drop.rngs.count[...])) == (1, 1, 1)
    model, optimizer = made()
    with pytest.raises(ValueError, match=r"jamp\.scaled inside jamp\.value_and_grad"):
        jamp.nnx.value_and_grad(jamp.scaled(loss_fn), optimizer)(model, X)


def test_an_optimizer_that_is_a_constant_of_the_jitted_step_warns():
    model, optimizer = make()
    with pytest.warns(UserWarning, match="keeps the first scale forever") as caught:
        nnx.jit(jamp.nnx.value_and_grad(loss_fn, optimizer))(model, X)
    assert [w.filename for w in caught] == [__file__]
    nnx.jit(lambda model, optimizer, x: jamp.nnx.value_and_grad(loss_fn, optimizer)(model, x))(model, optimizer, X)
    jamp.nnx.value_and_grad(loss_fn, optimizer)(model, X)


class Fp8(linen.Module):
    @linen.compact
    def __call__(self, x):
        for n in (8, 4):
            x = linen.Dense(n, dot_general_cls=linen.Fp8DirectDotGeneralOp)(x)
        return x


class Around(nnx.Module):
    """Two converted Linen modules, in a list and by themselves."""

    def __init__(self, x):
        make = lambda: nnx.bridge.ToNNX(Fp8(), rngs=nnx.Rngs(0)).lazy_init(x)
        self.list, self.scale = nnx.List([make()]), nnx.Param(jnp.float32(1.0))
        self.last = make()

    def __call__(self, x):
        return self.last(jnp.tile(self.list[0](x), (1, 2))[:, :6]) * self.scale


X8 = np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 6)
OWG = "_overwrite_with_gradient"
fp8_loss = lambda model, x: jnp.mean((model(x) - 1.0) ** 2)
WRT = nnx.Any(nnx.Param, lambda path, x: type(x).__name__ == OWG)
named = lambda state: {path: np.asarray(nnx.as_pure(x)) for path, x in nnx.to_flat_state(state)}


def of_scaled_loss(model, scale, x):
    """The gradients of an fp8 model, from each function that unscales some, of a loss that is scaled."""
    diff = nnx.DiffState(0, WRT)
    loss_scale = jamp.StaticLossScale(scale)
    state, scaler = loss_scale.init(), jamp.GradScaler(loss_scale)
    optimizer = jamp.nnx.Optimizer(model, optax.sgd(0.1), wrt=WRT, loss_scale=loss_scale)
    yield jamp.nnx.value_and_grad(fp8_loss, optimizer)(model, x)[1]
    yield jamp.nnx.value_and_grad(fp8_loss, state, argnums=diff)(model, x)[1]
    scaled = nnx.grad(lambda model, x: jamp.scale_loss(fp8_loss(model, x), state), argnums=diff)(model, x)
    yield jamp.unscale_and_check(scaled, state)[0]
    yield scaler.unscale(scaled)
    yield nnx.grad(jamp.scaled(fp8_loss, scale), argnums=diff)(model, x)
    graph, params, rest = nnx.split(model, WRT, ...)
    pure = lambda params: fp8_loss(nnx.merge(graph, params, jax.tree.map(lambda x: x, rest), copy=True), x)
    yield jamp.grad(pure, state)(params)
    yield scaler.value_and_grad(pure)(params)[1]
    yield jax.grad(jamp.scaled(pure, scale))(params)
    # The updates of an optimizer that unscales are its true gradients.
    tx = jamp.loss_scaled(optax.identity(), loss_scale, unscale=True)
    yield tx.update(scaled, tx.init(params), params)[0]


@pytest.mark.slow
def test_fp8_histories_of_a_converted_module_are_neither_unscaled_nor_checked():
    model, state = Around(X8), jamp.StaticLossScale().init()
    right = named(nnx.grad(fp8_loss, argnums=nnx.DiffState(0, WRT))(model, X8))
    assert sum("kernel_scale" in path for path in right) == 4
    for found in of_scaled_loss(model, 1024.0, X8):
        for path, x in named(found).items():
            if "output_grad_amax_history" in path:  # It is of the scaled gradients.
                np.testing.assert_allclose(x, right[path] * 1024, rtol=1e-2)
            else:
                np.testing.assert_allclose(x, right[path], rtol=0.05, atol=1e-4, err_msg=str(path))
    grads = nnx.grad(fp8_loss, argnums=nnx.DiffState(0, WRT))(model, X8)
    nan = lambda tree: jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), tree)
    is_variable = lambda x: isinstance(x, nnx.Variable)
    poisoned = jax.tree.map(lambda x: nan(x) if type(x).__name__ == OWG else x, grads, is_leaf=is_variable)
    assert jamp.all_finite(poisoned)
    assert not jamp.all_finite(nnx.as_pure(poisoned))  # without the types
    assert not any("scale" in path and "Fp8" in path for path in jamp.debug.underflow_report(grads, state).paths)


@pytest.mark.parametrize("unscale", [False, True])
def test_an_fp8_model_trains_as_in_linen_also_through_a_skip(unscale):
    """The histories are replaced, in a step that is applied, and the optimizer does not see them."""
    model = nnx.bridge.ToNNX(Fp8(), rngs=nnx.Rngs(0)).lazy_init(X8)
    tx, loss_scale = optax.sgd(1e-2, momentum=0.9), jamp.DynamicLossScale(init_scale=64.0, growth_interval=3)
    variables = {"params": {}, OWG: {}}
    for path, x in nnx.to_flat_state(nnx.state(model, WRT)):
        nested = variables[OWG if type(x).__name__ == OWG else "params"]
        for key in path[:-1]:
            nested = nested.setdefault(key, {})
        nested[path[-1]] = jnp.array(x[...])
    train = jamp.linen.TrainState.create(
        apply_fn=Fp8().apply, params=variables, tx=tx, loss_scale=loss_scale, unscale=unscale
    )
    optimizer = jamp.nnx.Optimizer(model, tx, wrt=WRT, loss_scale=loss_scale, unscale=unscale)
    of_linen = lambda params, x: jnp.mean((train.apply_fn(params, x) - 1.0) ** 2)

    @jax.jit
    def linen_step(train, x):
        if not unscale:
            return train.apply_gradients(grads=train.value_and_grad(of_linen)(train.params, x)[1])
        return train.apply_gradients(grads=jax.grad(lambda p: jamp.scale_loss(of_linen(p, x), train))(train.params))

    @nnx.jit
    def nnx_step(model, optimizer, x):
        if unscale:
            scaled = lambda model: jamp.scale_loss(fp8_loss(model, x), optimizer)
            grads = nnx.grad(scaled, argnums=nnx.DiffState(0, WRT))(model)
        else:
            _, grads = jamp.nnx.value_and_grad(fp8_loss, optimizer)(model, x)
        optimizer.update(model, grads)

    assert OWG not in str(jax.tree.structure(nnx.state(optimizer)))
    for x in (X8, X8 * np.float32(np.nan), 2 * X8, 3 * X8):
        before = bits(named(nnx.state(model, WRT)))
        train = linen_step(train, x)
        nnx_step(model, optimizer, x)
        assert (bits(named(nnx.state(model, WRT))) == before) == bool(np.isnan(x).any())
        for path, found in named(nnx.state(model, WRT)).items():
            nested = train.params["params" if path[-1] in ("kernel", "bias") else OWG]
            for key in path:
                nested = nested[key]
            np.testing.assert_allclose(found, nested, rtol=1e-4, atol=1e-6, err_msg=str(path))
    assert int(optimizer.step[...]) == int(train.step) == 3
    assert float(jamp.get_loss_scale(optimizer)) == float(jamp.get_loss_scale(train)) == 32.0


@pytest.mark.slow
def test_the_program_of_the_page_shards_every_state_on_eight_devices_and_two_go_on(tmp_path):
    code = """
import sys
from pages import programs
[code] = [code for code, _ in programs("frameworks/flax-nnx-equinox.md") if "CheckpointManager" in code]
exec(compile(code.replace("tempfile.mkdtemp()", repr(sys.argv[1])), "model.py", "exec"))
states = [x for x in jax.tree.leaves(nnx.state((model, optimizer))) if x.ndim]
assert not any(x.sharding.is_fully_replicated for x in states)
mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))
target = jax.tree.map(with_sharding, shapes, jax.tree.map(sharding_of, shapes))
with ocp.CheckpointManager(folder) as manager:
    state = manager.restore(1, args=ocp.args.StandardRestore(target))
batch = jax.device_put(jax.device_get(batch), NamedSharding(mesh, P("data")))
fewer = nnx.merge(graph, state)
first, second = (float(train_step(*fewer, batch)) for _ in range(2))
print(len(states), jax.tree.leaves(nnx.state(fewer))[0].sharding.mesh.size, second < first)
"""
    printed = run_python(
        "-c", code, str(tmp_path), XLA_FLAGS="--xla_force_host_platform_device_count=8",
        PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}",
    )  # fmt: skip
    assert printed.split() == ["20", "2", "True"]
