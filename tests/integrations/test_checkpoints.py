"""Every format, loss scale and integration: a restored run goes on bit for bit; what does not fit is an error."""

import functools
import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx, serialization
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors import flax as safetensors

import jamp.equinox
import jamp.linen
import jamp.nnx
from jamp import interop

SCALES = {
    "none": jamp.NoOpLossScale(),
    "static": jamp.StaticLossScale(1024.0),
    "dynamic": jamp.DynamicLossScale(growth_interval=2, hysteresis=2),
    "adaptive": jamp.AdaptiveLossScale(windows=(2, 3, 4)),
}
STEPS = 9
# For new processes: the jamp that the tests import, be it a checkout or an installed wheel.
PATHS = os.pathsep.join([str(Path(jamp.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
BATCHES = np.random.default_rng(0).normal(size=(STEPS, 4, 8)).astype(np.float32)
BATCHES[[2, 3, 6], 0, 0] = np.inf  # overflows
TX = optax.adamw(optax.linear_schedule(0.1, 0.01, 5))
PARAMS = {"w": jnp.linspace(-1.0, 1.0, 64).reshape(8, 8), "b": jnp.zeros(8)}


def loss_fn(params, x):
    x, params = jamp.cast_floating((x, params), jnp.float16)
    return jnp.mean(jnp.square(x @ params["w"] + params["b"] - 1).astype(jnp.float32))


# A run is all that is saved (a pytree of arrays) and a function of it and a batch: what a user jits.


def plain(loss_scale, wrap=jamp.loss_scaled, dtype=jnp.float32):
    tx = wrap(TX, loss_scale)

    def step(run, x):
        grads = jamp.grad(loss_fn, run["opt_state"])(run["params"], x)
        updates, opt_state = tx.update(grads, run["opt_state"], run["params"])
        return {"params": optax.apply_updates(run["params"], updates), "opt_state": opt_state}

    return {"params": jamp.cast_floating(PARAMS, dtype), "opt_state": tx.init(PARAMS)}, step


def grad_scaler(loss_scale):
    def step(run, x):
        _, grads = run["scaler"].value_and_grad(loss_fn)(run["params"], x)
        return run["scaler"].step(TX, run["opt_state"], run["params"], grads=grads)._asdict() | {"stepped": None}

    scaler = jamp.GradScaler(loss_scale)
    return {"params": PARAMS, "opt_state": TX.init(PARAMS), "scaler": scaler, "stepped": None}, step


def linen(loss_scale):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.BatchNorm(use_running_average=False, dtype=jnp.float16)(nn.Dense(4, dtype=jnp.float16)(x))
            return x.astype(jnp.float32)

    variables = jax.jit(Net().init)(jax.random.key(0), BATCHES[0])

    def step(state, x):
        def loss_fn(params):
            out, new = state.apply_fn({"params": params, "batch_stats": state.batch_stats}, x, mutable=["batch_stats"])
            return jnp.mean(out**2 * x[:, :4]), new

        (_, new), grads = state.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, batch_stats=new["batch_stats"])

    return jamp.linen.TrainState.create(apply_fn=Net().apply, tx=TX, loss_scale=loss_scale, **variables), step


def nnx_optimizer(loss_scale):
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.BatchNorm(8, rngs=rngs)
            self.out = nnx.Linear(8, 4, dtype=jnp.float16, rngs=rngs)

        def __call__(self, x):
            return self.out(self.norm(x)).astype(jnp.float32)

    model = Net(nnx.Rngs(0))
    graph, run = nnx.split((model, jamp.nnx.Optimizer(model, TX, wrt=nnx.Param, loss_scale=loss_scale)))

    def step(run, x):
        model, optimizer = nnx.merge(graph, run)
        _, grads = jamp.nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2 * x[:, :4]), optimizer)(model)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer))

    return run, step


def equinox(loss_scale):
    tx = jamp.loss_scaled(TX, loss_scale)
    model = eqx.filter_jit(lambda key: eqx.nn.MLP(8, 4, 4, 1, key=key))(jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_array)

    def step(run, x):
        params, opt_state = run
        loss_fn = lambda model: jnp.mean(jax.vmap(jamp.autocast(model))(x).astype(jnp.float32) ** 2)
        _, grads = jamp.equinox.filter_value_and_grad(loss_fn, opt_state)(eqx.combine(params, static))
        model, opt_state = jamp.equinox.apply_gradients(tx, grads, opt_state, eqx.combine(params, static))
        return eqx.filter(model, eqx.is_array), opt_state

    return (params, tx.init(params)), step


INTEGRATIONS = {
    "loss_scaled": plain,
    "mixed_precision": functools.partial(plain, wrap=jamp.mixed_precision, dtype=jnp.bfloat16),
    "GradScaler": grad_scaler,
    "linen": linen,
    "nnx": nnx_optimizer,
    "equinox": equinox,
}


# A format is a pair: save(path, tree) and load(path, like), as docs/checkpoints.md has them.


def save_orbax(path, tree):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)


def load_orbax(path, like):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, like)


def save_managed(path, tree):
    with ocp.CheckpointManager(path) as manager:
        manager.save(7, args=ocp.args.StandardSave(tree))


def load_managed(path, like):
    with ocp.CheckpointManager(path) as manager:
        return manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(like))


def named(tree):
    return {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def from_named(saved, like):
    """The tree of named arrays. numpy knows no bfloat16: it gives two bytes, which are seen as one again."""
    leaves = [jnp.asarray(np.asarray(saved[name]).view(x.dtype)) for name, x in named(like).items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def flax_knows(tree):
    """Not a GradScaler, an nnx.State or an Equinox module."""
    parts = jax.tree.leaves(serialization.to_state_dict(tree), is_leaf=lambda x: not isinstance(x, dict))
    return all(x is None or hasattr(x, "dtype") for x in parts)


def save_flax(path, tree):
    path.write_bytes(serialization.to_bytes(tree if flax_knows(tree) else named(tree)))


def load_flax(path, like):
    if flax_knows(like):
        return serialization.from_bytes(like, path.read_bytes())
    return from_named(serialization.msgpack_restore(path.read_bytes()), like)


def load_npz(path, like):
    with path.open("rb") as file, np.load(file) as saved:
        return from_named(saved, like)


def load_pickle(path, like):
    return jax.tree.unflatten(jax.tree.structure(like), pickle.loads(path.read_bytes()))


FORMATS = {
    "orbax": (save_orbax, load_orbax),
    "manager": (save_managed, load_managed),
    "flax": (save_flax, load_flax),
    "pickle": (lambda path, tree: path.write_bytes(pickle.dumps(jax.device_get(jax.tree.leaves(tree)))), load_pickle),
    "npz": (lambda path, tree: np.savez(path, **named(tree)), load_npz),
    "safetensors": (
        lambda path, tree: safetensors.save_file(named(tree), path),
        lambda path, like: from_named(safetensors.load_file(path), like),
    ),
}
CASES = [(i, s, f) for i in INTEGRATIONS for s in SCALES for f in FORMATS]
SHARDED = [("loss_scaled", "dynamic", "orbax"), ("loss_scaled", "adaptive", "manager")]
ONE_EACH = list(zip(INTEGRATIONS, [*SCALES, "dynamic", "adaptive"], FORMATS, strict=True))


@functools.cache
def start(integration, scale):
    """A fresh run, and its step."""
    run, step = INTEGRATIONS[integration](SCALES[scale])
    return place(run), jax.jit(step)


def place(tree):
    """On one device and committed to it, as Orbax restores: otherwise each step is compiled twice."""
    return jax.device_put(tree, jax.devices()[0])


def go_on(step, run, k):
    for x in BATCHES[k:]:
        run = step(run, x)
    return run


@functools.cache
def undisturbed(integration, scale):
    """The states before each step, and after the last."""
    run, step = start(integration, scale)
    return [run] + [run := step(run, x) for x in BATCHES]


def load(form, path, like):
    """Restored into a tree that has nothing but zeros."""
    return FORMATS[form][1](path, jax.tree.map(jnp.zeros_like, like))


def bits(tree):
    return [(x.dtype, np.shape(x), np.asarray(x).tobytes()) for x in jax.tree.leaves(tree)]


def marked(integration, scale, form):
    quick = scale in ("dynamic", "adaptive") or integration in ("loss_scaled", "linen")
    return pytest.param(integration, scale, form, marks=[] if quick else pytest.mark.slow)


@pytest.mark.parametrize(("integration", "scale", "form"), [marked(*case) for case in CASES])
def test_saved_at_any_step_the_restored_run_goes_on_bit_for_bit(integration, scale, form, tmp_path):
    runs, (fresh, step) = undisturbed(integration, scale), start(integration, scale)
    # Orbax is slow: one step of each run, another one for each.
    for k in [CASES.index((integration, scale, form)) % STEPS] if form in ("orbax", "manager") else range(STEPS):
        FORMATS[form][0](tmp_path / f"{k}.npz", runs[k])
        restored = load(form, tmp_path / f"{k}.npz", fresh)
        assert jax.tree.structure(restored) == jax.tree.structure(fresh)
        assert bits(restored) == bits(runs[k])
        assert bits(go_on(step, place(restored), k)) == bits(runs[-1])


def shard(tree):
    mesh = Mesh(jax.devices(), "x")
    spec = lambda x: PartitionSpec(*[None, "x"][: x.ndim] if x.ndim > 1 else [])
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, spec(x))), tree)


def continue_all(folder):
    """In a process of its own, with eight devices: go on from every checkpoint in a folder, and write how it ends."""
    for path in sorted(folder.iterdir()):
        k, integration, scale, form = path.stem.split("@")
        fresh, step = start(integration, scale)
        restored = load(form, path, fresh)
        ends = go_on(step, place(restored), int(k))
        path.with_suffix(".end").write_bytes(pickle.dumps(bits(ends)))
        if form in ("orbax", "manager") and integration == "loss_scaled":  # onto a sharded target, too
            like = shard(fresh)
            onto_shards = load(form, path, like)
            assert [x.sharding for x in jax.tree.leaves(onto_shards)] == [x.sharding for x in jax.tree.leaves(like)]
            assert bits(onto_shards) == bits(restored)
            assert bits(go_on(step, onto_shards, int(k))) == bits(go_on(step, shard(restored), int(k)))
            print("sharded", form)


@pytest.mark.parametrize("cases", [ONE_EACH, pytest.param(CASES, marks=pytest.mark.slow)], ids=["one each", "all"])
def test_restored_in_a_new_process_the_run_goes_on_bit_for_bit(cases, tmp_path):
    cases = {(n % STEPS, *case): undisturbed(*case[:2]) for n, case in enumerate([*cases, *SHARDED])}
    for (k, integration, scale, form), runs in cases.items():
        FORMATS[form][0](tmp_path / f"{k}@{integration}@{scale}@{form}.npz", runs[k])
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "PYTHONPATH": PATHS}
    command = [sys.executable, "-W", "error", __file__, str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.splitlines()) == {"sharded orbax", "sharded manager"}
    for case, runs in cases.items():
        ends = tmp_path / ("@".join(map(str, case)) + ".end")
        assert pickle.loads(ends.read_bytes()) == bits(runs[-1]), case


def truncate(path):
    """Leave half of a file, or of every file in a folder."""
    for file in [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


ERRORS = {  # of a truncated checkpoint, and of one that holds {"weights": ...}
    "orbax": (r"Expecting|Unterminated", r"structures do not match:[^$]*loss_scale"),
    "manager": (r"Expecting|Unterminated", r"structures do not match:[^$]*loss_scale"),
    "flax": (r"incomplete input", r"(field|keys).*do not match|Missing field step"),
    "pickle": (r"truncated", r"Too few leaves"),
    "npz": (r"not a zip file", r"loss_scale|step.* is not a file in the archive"),
    "safetensors": (r"header", r"loss_scale|step"),
}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("integration", ["loss_scaled", "linen"])
def test_a_truncated_or_foreign_checkpoint_is_an_error_and_the_runs_own_state_is_untouched(form, integration, tmp_path):
    run = undisturbed(integration, "dynamic")[4]
    (save, restore), (truncated, foreign), before = FORMATS[form], ERRORS[form], bits(run)
    save(tmp_path / "truncated.npz", run)
    truncate(tmp_path / "truncated.npz")
    with pytest.raises(Exception, match=truncated):
        restore(tmp_path / "truncated.npz", run)
    save(tmp_path / "foreign.npz", {"weights": jnp.ones(3)})
    with pytest.raises((ValueError, KeyError), match=foreign):
        restore(tmp_path / "foreign.npz", run)
    assert bits(run) == before


@pytest.mark.parametrize(("old", "new"), [(a, b) for a in SCALES for b in SCALES if a != b])
def test_another_kind_of_loss_scale_is_an_error_that_names_both_and_the_conversion_goes_on(old, new, tmp_path):
    run = undisturbed("loss_scaled", old)[2]
    save_orbax(tmp_path / "run", run)
    saved = json.loads(json.dumps(interop.checkpoint_config(run, SCALES[old])))
    fresh, step = start("loss_scaled", new)
    with pytest.raises(ValueError, match=rf"type '{old}', this run has '{new}'.*convert_loss_scale"):
        interop.check_checkpoint_config(saved, fresh, SCALES[new])
    was = jamp.loss_scale_from_config(saved["loss_scale"])  # as the message says
    like, _ = plain(was)
    interop.check_checkpoint_config(saved, like, was)
    restored = jamp.convert_loss_scale(load_orbax(tmp_path / "run", like), SCALES[new])
    interop.check_checkpoint_config(interop.checkpoint_config(restored, SCALES[new]), fresh, SCALES[new])
    assert bits(restored["opt_state"].inner_state) == bits(run["opt_state"].inner_state)
    assert jnp.isfinite(step(restored, BATCHES[4])["params"]["w"]).all()


SAVED = {"w": jnp.ones((3, 4)), "n": 3, "f": loss_fn}  # a function is no array


@pytest.mark.parametrize(
    ("like", "message"),
    [
        (SAVED | {"w": jnp.ones((3, 4), jnp.float16)}, r"\['w'\] was saved as float32\[3,4\], the state has float16\["),
        (SAVED | {"w": jnp.ones((4, 4))}, r"\['w'\] was saved as float32\[3,4\], the state has float32\[4,4\]"),
        ({"w": SAVED["w"]}, r"\['n'\] was saved as int32\[\], the state has no such array"),
        (SAVED | {"b": jnp.ones(4)}, r"\['b'\] was not saved, the state has float32\[4\]"),
        ([jnp.ones(1)] * 9, r"\[2\] was not saved, the state has float32\[1\], and 8 more"),
    ],
    ids=["dtype", "shape", "missing", "new", "many"],
)
def test_another_dtype_or_shape_or_array_is_an_error_that_names_both(like, message):
    saved = json.loads(json.dumps(interop.checkpoint_config(SAVED, jamp.StaticLossScale())))
    abstract = jax.eval_shape(lambda: {k: v for k, v in SAVED.items() if k != "f"})
    interop.check_checkpoint_config(saved, abstract, jamp.StaticLossScale(2.0))  # other numbers of one kind
    with pytest.raises(ValueError, match=message):
        interop.check_checkpoint_config(saved, like, jamp.StaticLossScale())


@pytest.mark.parametrize("saved", [{"step": 3}, [1], None])
def test_something_else_than_a_checkpoint_config_is_an_error_that_shows_it(saved):
    with pytest.raises(
        ValueError, match=r"is not what .*checkpoint_config returned: got (a mapping of 'step'|\[1\]|None)"
    ):
        interop.check_checkpoint_config(saved, SAVED, jamp.StaticLossScale())


def test_a_loss_scale_without_to_config_is_named_by_its_class():
    halving = type("Halving", (), {"init": None, "update": None})()
    assert interop.checkpoint_config({}, halving)["loss_scale"] == {"type": "Halving"}


def test_a_checkpoint_of_plain_optax_state_goes_on_loss_scaled_and_back_to_the_same_bits(tmp_path):
    tx, grads = optax.sgd(0.1, momentum=0.9), [jax.tree.map(lambda p, k=k: p + k, PARAMS) for k in range(3)]

    def train(tx, params, opt_state, grads):
        for g in grads:
            updates, opt_state = tx.update(g, opt_state, params)
            params = optax.apply_updates(params, updates)
        return {"params": params, "opt_state": opt_state}

    first = train(tx, PARAMS, tx.init(PARAMS), grads[:1])
    save_orbax(tmp_path / "plain", first)
    restored = load("orbax", tmp_path / "plain", first)
    wrapped = jamp.loss_scaled(tx, SCALES["dynamic"])
    opt_state = interop.wrap_state(restored["opt_state"], SCALES["dynamic"])
    middle = train(wrapped, restored["params"], opt_state, grads[1:2])
    assert int(jamp.get_stats(middle).finite_steps) == 1
    save_orbax(tmp_path / "scaled", middle)
    last = interop.unwrap_state(load("orbax", tmp_path / "scaled", middle))
    assert bits(train(tx, **last, grads=grads[2:])) == bits(train(tx, PARAMS, tx.init(PARAMS), grads))


def test_the_programs_of_the_page_run_in_their_order(tmp_path, monkeypatch, capsys):
    page, namespace = Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md", {}
    monkeypatch.chdir(tmp_path)
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        exec(compile(block, page.name, "exec"), namespace)
    assert "type 'dynamic', this run has 'adaptive'" in capsys.readouterr().out


if __name__ == "__main__":
    continue_all(Path(sys.argv[1]))
