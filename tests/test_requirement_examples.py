"""Every usage example of the five requirement documents, translated and run. docs/from-pytorch.md includes them."""

import pathlib
import pkgutil
import re
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml
from loss_scales import recorded

import jamp

ROOT = pathlib.Path(__file__).parent.parent


def loss_fn(params, batch):
    x, y = batch
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


@pytest.fixture
def params():
    return {"w": jnp.full((4, 1), 0.5), "b": jnp.zeros(1)}


@pytest.fixture
def batches():
    """Three batches; the gradients of the second overflow."""
    x = np.random.default_rng(0).normal(size=(3, 8, 4)).astype(np.float32)
    x[1, 0, 0] = np.inf
    return [(x[i], x[i].sum(axis=1, keepdims=True)) for i in range(3)]


def test_dynamic_loss_scaler(params, batches, capsys):  # 000
    # --8<-- [start:dynamic_loss_scaler]
    loss_scale = jamp.DynamicLossScale(
        init_scale=65536.0,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=2000,
    )
    state = loss_scale.init()
    stats = jamp.LossScaleStats.init(state.loss_scale)
    optimizer = jamp.optimizers.sgd(0.1)
    opt_state = optimizer.init(params)

    def scaled_loss(params, batch, state):
        return jamp.scale_loss(loss_fn(params, batch), state)

    for iteration, batch in enumerate(batches):
        scaled_grads = jax.grad(scaled_loss)(params, batch, state)
        # Unscaled before the update, with the scale that scaled.
        grads, grads_finite = jamp.unscale_and_check(scaled_grads, state)

        new_state = loss_scale.update(state, grads_finite)
        stats = stats.update(grads_finite, state.loss_scale, new_state.loss_scale)
        state = new_state

        if not grads_finite:
            print(f"Overflow detected, skipping step (scale: {state.loss_scale})")
            continue

        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)

        if iteration % 100 == 0:
            print(f"Scale: {state.loss_scale}, Overflows: {stats.overflow_steps}")
    # --8<-- [end:dynamic_loss_scaler]
    skipped = "Overflow detected, skipping step (scale: 32768.0)"
    assert capsys.readouterr().out.splitlines() == ["Scale: 65536.0, Overflows: 0", skipped]
    assert bool(jamp.all_finite(params))


def test_grad_scaler(params, batches, capsys):  # 001
    # --8<-- [start:grad_scaler]
    optimizer = jamp.optimizers.sgd(0.1)
    opt_state = optimizer.init(params)
    scaler = jamp.GradScaler()  # dynamic by default

    @jax.jit
    def train_step(params, opt_state, scaler, batch):
        scaled_grads = jax.grad(lambda params: scaler.scale(loss_fn(params, batch)))(params)
        return scaler.step(optimizer, opt_state, params, scaled_grads=scaled_grads)

    for batch in batches:
        params, opt_state, scaler, stepped = train_step(params, opt_state, scaler, batch)
    # --8<-- [end:grad_scaler]
    assert (int(scaler.stats.finite_steps), int(scaler.stats.overflow_steps), bool(stepped)) == (2, 1, True)
    assert bool(jamp.all_finite(params))
    batch = batches[1]
    # --8<-- [start:context_manager]
    # In place of the context: scaled inside, true outside.
    loss, grads = scaler.value_and_grad(loss_fn)(params, batch)
    params, opt_state, scaler, stepped = scaler.step(optimizer, opt_state, params, grads=grads)
    if not stepped:
        print(f"Skipped step due to overflow, loss {loss}")
    # --8<-- [end:context_manager]
    assert capsys.readouterr().out == "Skipped step due to overflow, loss nan\n"
    # --8<-- [start:custom_configuration]
    scaler = jamp.GradScaler.for_fp16()
    # or
    scaler = jamp.GradScaler.from_config(
        {
            "init_scale": 32768.0,
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": 3000,
        }
    )
    # --8<-- [end:custom_configuration]
    assert scaler.loss_scale == jamp.DynamicLossScale(init_scale=32768.0, growth_interval=3000)
    before, batch = params, batches[0]
    # --8<-- [start:manual_control]
    scaler = jamp.GradScaler()
    scaled_grads = jax.grad(lambda params: scaler.scale(loss_fn(params, batch)))(params)
    grads = scaler.unscale(scaled_grads)
    overflow = scaler.check_overflow(grads)

    if not overflow:
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    scaler = scaler.update(overflow=overflow)  # on an overflow too: that is what lowers the scale
    # --8<-- [end:manual_control]
    assert int(scaler.stats.finite_steps) == 1
    assert not np.array_equal(params["w"], before["w"])


def test_adaptive_loss_scale(params, batches):  # 002
    # --8<-- [start:mindspore]
    net = {"weight": jnp.ones((16, 10))}
    manager = jamp.AdaptiveLossScale(
        init_scale=2**12, scale_factor=2, initial_window=20, max_window=1000, min_window=20
    )
    optimizer = jamp.loss_scaled(jamp.optimizers.sgd(0.1, momentum=0.9), manager)
    opt_state = optimizer.init(net)

    def net_with_loss(net, input, labels):
        return jnp.mean((input @ net["weight"] - labels[:, None]) ** 2)

    @jax.jit
    def train_network(net, opt_state, input, labels):
        loss, grads = jamp.value_and_grad(net_with_loss, opt_state)(net, input, labels)
        updates, opt_state = optimizer.update(grads, opt_state, net)
        return optax.apply_updates(net, updates), opt_state, loss

    input, labels = jnp.ones((10, 16)), jnp.ones(10)
    net, opt_state, output = train_network(net, opt_state, input, labels)
    # --8<-- [end:mindspore]
    assert (float(output), int(jamp.get_stats(opt_state).finite_steps)) == (225.0, 1)
    # --8<-- [start:mindformers]
    manager = jamp.AdaptiveLossScale(init_scale=1, scale_factor=2, initial_window=20, max_window=1000, min_window=20)
    optimizer = jamp.loss_scaled(jamp.optimizers.sgd(0.1, momentum=0.9), manager)

    def train(params, opt_state, dataset):
        for batch in dataset:
            loss, grads = jamp.value_and_grad(loss_fn, opt_state)(params, batch)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            params = optax.apply_updates(params, updates)
        return params, opt_state, loss

    params, opt_state, loss = train(params, optimizer.init(params), batches)

    # In a checkpoint, opt_state holds all of the scale's state, so a resumed run goes on exactly.
    checkpoint = jamp.interop.to_mindformers(opt_state, manager)
    # --8<-- [end:mindformers]
    assert (checkpoint["scale_window"], checkpoint["scale_window_down_count"]) == (20, 1)
    assert bool(jnp.isfinite(loss))
    # --8<-- [start:yaml]
    config = {  # yaml.safe_load(open("run.yaml"))
        "runner_config": {"epochs": 3, "batch_size": 4, "sink_mode": True, "sink_size": 2},
        "runner_wrapper": {
            "type": "MFTrainOneStepCell",
            "scale_sense": {
                "type": "AdaptiveLossScaleUpdateCell",
                "loss_scale_value": 4294967296,
                "scale_factor": 2,
                "scale_window": 20,
                "max_scale_window": 1000,
                "min_scale_window": 20,
            },
            "use_clip_grad": True,
        },
    }
    optimizer = jamp.loss_scaled(
        optax.chain(optax.clip_by_global_norm(1.0), jamp.optimizers.sgd(0.1, momentum=0.9)),  # use_clip_grad
        jamp.loss_scale_from_config(config),
    )
    # --8<-- [end:yaml]
    [block] = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "docs" / "from-mindspore.md").read_text(), re.M | re.S)
    assert yaml.safe_load(block) == config
    assert float(jamp.get_loss_scale(optimizer.init(jnp.ones(2)))) == 4294967296.0


def test_the_example_of_003_runs(capsys):
    scaler = runpy.run_path(str(ROOT / "examples" / "from_pytorch.py"))["main"](num_epochs=2)
    # The first two overflow in float16 at a loss scale of 2**16, 2**15.
    assert (int(scaler.stats.finite_steps), int(scaler.stats.overflow_steps)) == (18, 2)
    first, last = (float(line.split()[3].rstrip(";")) for line in capsys.readouterr().out.splitlines())
    assert last < first


def test_amp_optimizer(params, batches):  # 004
    # --8<-- [start:amp_optimizer]
    optimizer = jamp.optimizers.adam(0.001)
    amp_optimizer = jamp.loss_scaled(optimizer)  # WrapOptimizer
    opt_state = amp_optimizer.init(params)

    @jax.jit
    def train_step(params, opt_state, batch):
        loss, grads = jamp.value_and_grad(loss_fn, opt_state)(params, batch)
        updates, opt_state = amp_optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    for batch in batches:
        params, opt_state, loss = train_step(params, opt_state, batch)
    # --8<-- [end:amp_optimizer]
    assert (int(jamp.get_stats(opt_state).overflow_steps), bool(jamp.all_finite((params, loss)))) == (1, True)
    # --8<-- [start:step_amp]
    scaler = jamp.GradScaler()
    optimizer = jamp.optimizers.adam(0.001)
    opt_state = optimizer.init(params)

    def scaled_loss(params, batch, scaler):
        return scaler.scale(loss_fn(params, batch))

    for batch in batches:
        scaled_grads = jax.grad(scaled_loss)(params, batch, scaler)
        # StepAmp:
        params, opt_state, scaler, stepped = scaler.step(optimizer, opt_state, params, scaled_grads=scaled_grads)
    # --8<-- [end:step_amp]
    assert (int(scaler.stats.overflow_steps), bool(stepped), bool(jamp.all_finite(params))) == (1, True, True)
    # --8<-- [start:create_adam]
    optimizer = jamp.loss_scaled(jamp.optimizers.adam(0.001))  # CreateAdam
    opt_state = optimizer.init(params)
    # --8<-- [end:create_adam]
    opt_state = optimizer.update(jamp.grad(loss_fn, opt_state)(params, batches[0]), opt_state, params)[1]
    assert float(jamp.optimizers.get_learning_rate(opt_state)) == pytest.approx(0.001)


@pytest.mark.promotes("optax.apply_updates to bfloat16 parameters, and the loss of these")
def test_amp_optimizer_with_bfloat16_parameters(params, batches):
    # --8<-- [start:convert_parameters]
    optimizer = jamp.mixed_precision(jamp.optimizers.adam(0.001))
    opt_state = optimizer.init(params)  # float32 masters, from the float32 parameters
    assert jamp.check_castable(params, jnp.bfloat16) == []
    params = jamp.cast_floating(params, jnp.bfloat16)
    # --8<-- [end:convert_parameters]
    update = lambda params: optimizer.update(jamp.grad(loss_fn, opt_state)(params, batches[0]), opt_state, params)[0]
    stepped = jax.eval_shape(lambda params: optax.apply_updates(params, update(params)), params)
    assert {x.dtype for x in jax.tree.leaves((params, stepped))} == {jnp.dtype(jnp.bfloat16)}


PAGE = (ROOT / "docs" / "from-pytorch.md").read_text()


def test_the_table_has_every_member_and_each_that_works_is_there_under_its_name():
    found = re.findall(r"\| `([\w.]+)` \| Here \| \|\n\|---\|---\|---\|\n((?:\|.*\|\n)+)", PAGE)
    cells = lambda row: [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
    tables = {name: [cells(row) for row in rows.splitlines()] for name, rows in found}  # member, here, status
    plain = lambda member: re.sub(r"\(.*\)", "", member).strip("`").removeprefix("the ")
    names = {owner: [plain(member) for member, _, _ in rows] for owner, rows in tables.items()}
    # The members of the classes that the requirements define, and of torch's class as torch has it.
    assert names == {owner: members.split() for owner, members in recorded("required_members.json").items()}
    for member, here, status in (rows := [row for rows in tables.values() for row in rows]):
        assert here, member
        found = [pkgutil.resolve_name(name) for name in re.findall(r"`(jamp(?:\.\w+)+)`", here)]
        assert status == "replaced" or (status == "works" and found), member
    works = sum(status == "works" for _, _, status in rows)
    assert f"{len(rows)} members: {works} work, {len(rows) - works} are replaced, none is missing." in PAGE


def test_every_example_that_the_page_includes_is_there_and_every_example_is_included():
    included, source = re.findall(r'^--8<-- "([^":]+)(?::(\w+))?"$', PAGE, re.M), pathlib.Path(__file__).read_text()
    sections = re.findall(r"# --8<-- \[start:(\w+)\]\n.*?# --8<-- \[end:\1\]", source, re.DOTALL)
    assert sorted(name for _, name in included if name) == sorted(sections)
    assert all((ROOT / path).is_file() for path, _ in included)
