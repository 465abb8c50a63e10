"""Every format, loss scale and integration: a restored run goes on bit for bit; what does not fit is an error."""

import functools
import io
import itertools
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import contract
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx, serialization
from integrations import test_contract as frameworks
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from loss_scales import Halving
from processes import environment, run_python
from safetensors import flax as safetensors
from trees import bits

import jamp.nnx
from jamp import interop

SCALES = {
    "dynamic": jamp.DynamicLossScale(growth_interval=2, hysteresis=2),
    "adaptive": jamp.AdaptiveLossScale(windows=(2, 3, 4)),
    "static": jamp.StaticLossScale(1024.0),
    "none": jamp.NoOpLossScale(),
}
BATCHES = [contract.X * np.float32(np.inf if k in (2, 3, 6) else 1 + k / 10) for k in range(9)]
STEPS, LIVES = 54, 3  # of a process that is killed


def nnx_state(loss_scale):
    """As a user saves it: the state of the model and of the optimizer, and not the arrays alone."""
    graphdef, run = frameworks.split(loss_scale, None, jnp.float32)

    def step(run, x):
        model, optimizer = nnx.merge(graphdef, run)
        _, grads = jamp.nnx.value_and_grad(frameworks.net_loss, optimizer)(model, x)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer))

    return run, step


# What makes a run, which is all that is saved, and its step. Parameters in bfloat16 are what numpy does not know.
INTEGRATIONS = {name: adapter.make for name, adapter in (contract.ADAPTERS | frameworks.ADAPTERS).items()}
INTEGRATIONS |= {"master_params": functools.partial(INTEGRATIONS["master_params"], dtype=jnp.bfloat16)}
INTEGRATIONS |= {"nnx": nnx_state}
ROUNDED = lambda tx, *args, **kwargs: jamp.loss_scaled(
    jamp.stochastic_rounding(tx, state_dtype="bf16"), *args, **kwargs
)
INTEGRATIONS |= {"stochastic_rounding": functools.partial(contract.wrapper, ROUNDED, dtype=jnp.bfloat16)}

# A format is a pair: save(path, tree) and load(path, like), as docs/checkpoints.md has them.


def save_orbax(path, tree):
    with ocp.CheckpointManager(path) as manager:
        manager.save(7, args=ocp.args.StandardSave(tree))


def load_orbax(path, like):
    with ocp.CheckpointManager(path) as manager:
        return manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(like))


def named(tree):
    return {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def from_named(saved, like):
    """The tree of named arrays. numpy knows no bfloat16: it gives two bytes, which are seen as one again."""
    leaves = [jnp.asarray(np.asarray(saved[name]).view(x.dtype)) for name, x in named(like).items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


FORMATS = {
    "orbax": (save_orbax, load_orbax),
    "flax": (
        lambda path, tree: path.write_bytes(serialization.to_bytes(tree)),
        lambda path, like: serialization.from_bytes(like, path.read_bytes()),
    ),
    "pickle": (
        lambda path, tree: path.write_bytes(pickle.dumps(jax.device_get(jax.tree.leaves(tree)))),
        lambda path, like: jax.tree.unflatten(jax.tree.structure(like), pickle.loads(path.read_bytes())),
    ),
    "npz": (
        lambda path, tree: np.savez(path, **named(tree)),
        lambda path, like: from_named(np.load(io.BytesIO(path.read_bytes())), like),
    ),
    "safetensors": (
        lambda path, tree: safetensors.save_file(named(tree), path),
        lambda path, like: from_named(safetensors.load_file(path), like),
    ),
}
ERRORS = {  # of a truncated and of a foreign checkpoint
    "orbax": (r"Expecting|Unterminated", r"structures do not match:[^$]*loss_scale"),
    "flax": (r"incomplete input", r"(field|keys).*do not match|Missing field step"),
    "pickle": (r"truncated", r"Too few leaves"),
    "npz": (r"not a zip file", r"loss_scale|step.* is not a file in the archive"),
    "safetensors": (r"header", r"loss_scale|step"),
}
FLAX_KNOWS = ("loss_scaled", "master_params", "linen")  # for others it needs named arrays, as npz does
# Every integration, and every loss scale in one of them.
CASES = [(name, list(SCALES)[i % len(SCALES)]) for i, name in enumerate(INTEGRATIONS)]
CASES += [("loss_scaled", scale) for scale in SCALES if ("loss_scaled", scale) not in CASES]


# On one device and committed to it, as Orbax restores: otherwise each step is compiled twice.
place = lambda tree: jax.device_put(tree, jax.devices()[0])
go_on = lambda case, k, run: functools.reduce(start(*case)[1], BATCHES[k:], run)


@functools.cache
def start(integration, scale):  # a fresh run, and its step
    run, step, *_ = INTEGRATIONS[integration](SCALES[scale])
    return place(run), jax.jit(step)


@functools.cache
def undisturbed(integration, scale):  # the states before each step, and after the last
    run, step = start(integration, scale)
    return [run] + [run := step(run, x) for x in BATCHES]


def saved(form):
    """What is saved in one format: integrations under loss scales, each at a step of its own."""
    return [(c, n % 9) for n, c in enumerate(CASES, start=len(form)) if form != "flax" or c[0] in FLAX_KNOWS]


def continue_all(folder):
    """In a process of its own, with three devices: go on from every checkpoint, bit for bit."""
    sharding = lambda x: NamedSharding(Mesh(jax.devices(), "x"), PartitionSpec(*["x"] * (x.shape[:1] == (3,))))
    shard = lambda tree: jax.tree.map(lambda x: jax.device_put(x, sharding(x)), tree)
    for form, (_, load) in FORMATS.items():
        path, runs = folder / f"{form}.npz", saved(form)
        zeros = jax.tree.map(jnp.zeros_like, [start(*case)[0] for case, _ in runs])
        restored = load(path, zeros)
        assert bits(restored) == bits([undisturbed(*case)[k] for case, k in runs])
        for run, (case, k) in zip(restored, runs, strict=True):
            assert bits(go_on(case, k, place(run))) == bits(undisturbed(*case)[-1])
        if form == "orbax":  # onto a sharded target, too
            onto_shards = load(path, shard(zeros))
            assert all(x.sharding == sharding(x) for x in jax.tree.leaves(onto_shards))
            assert bits(onto_shards) == bits(restored)
            assert bits(go_on(*runs[0], onto_shards[0])) == bits(go_on(*runs[0], shard(restored[0])))
        print(form)


@pytest.mark.slow
def test_restored_in_a_new_process_every_run_goes_on_bit_for_bit(tmp_path):
    for form, (save, _) in FORMATS.items():
        save(tmp_path / f"{form}.npz", [undisturbed(*case)[k] for case, k in saved(form)])
    variables = {"XLA_FLAGS": "--xla_force_host_platform_device_count=3", "PYTHONPATH": os.pathsep.join(sys.path)}
    printed = run_python(__file__, "continue_all", tmp_path, **variables)
    assert printed.split() == list(FORMATS)


@pytest.mark.parametrize("form", FORMATS)
def test_a_truncated_or_foreign_checkpoint_is_an_error_and_changes_no_state(form, tmp_path):
    (save, restore), (truncated, foreign) = FORMATS[form], ERRORS[form]
    params, opt_state = undisturbed("loss_scaled", "dynamic")[4]
    for n, run in enumerate([{"params": params, "opt_state": opt_state}, undisturbed("linen", "dynamic")[4]]):
        before, path = bits(run), tmp_path / f"{n}.npz"
        save(path, run)
        for file in (file for file in (path, *path.rglob("*")) if file.is_file()):
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        with pytest.raises(Exception, match=truncated):
            restore(path, run)
        save(tmp_path / f"foreign{n}.npz", {"weights": jnp.ones(3)})
        with pytest.raises((ValueError, KeyError), match=foreign):
            restore(tmp_path / f"foreign{n}.npz", run)
        assert bits(run) == before


WAYS = {form: FORMATS[form] for form in ("orbax", "flax")} | {
    "equinox": (eqx.tree_serialise_leaves, eqx.tree_deserialise_leaves),
    "levanter": (  # each field by its name, in NamedTuples that it recognises by their base
        lambda path, tree: np.savez(path, **dict(by_name(tree))),
        lambda path, like: from_named(np.load(path), like),
    ),
}


def by_name(x, path=""):
    """The leaves of a tree by path, where a NamedTuple is a class whose only base is tuple."""
    if type(x).__bases__ == (tuple,):
        return [leaf for name in x._fields for leaf in by_name(getattr(x, name), f"{path}.{name}")]
    items = x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, (tuple, list)) else None
    return [(path, x)] if items is None else [leaf for k, v in items for leaf in by_name(v, f"{path}[{k!r}]")]


@pytest.mark.parametrize("way", WAYS)
def test_every_state_survives_each_way_of_walking_a_tree(way, tmp_path):
    rounding = jamp.stochastic_rounding(optax.adam(0.1), state_dtype="bf16")
    inner = {"masters": jamp.master_params(optax.adam(0.1)), "rounding": rounding, "plain": optax.adam(0.1)}
    inner |= {"split": jamp.master_params(contract.quantized(optax.adam(0.1)), split=True)}
    wrappers = {name: functools.partial(jamp.loss_scaled, tx, unscale=True) for name, tx in inner.items()}
    wrappers |= {"true": functools.partial(jamp.loss_scaled, optax.adam(0.1))}
    params = {"w": jnp.full(3, 1.5, jnp.bfloat16), "b": jnp.ones(2)}
    init = lambda: {f"{a} {b}": wrap(x).init(params) for a, wrap in wrappers.items() for b, x in SCALES.items()}
    tree = jax.jit(init)()
    save, load = WAYS[way]
    save(tmp_path / "saved.npz", tree)
    restored = load(tmp_path / "saved.npz", jax.tree.map(jnp.zeros_like, tree))
    assert bits(restored) == bits(tree)
    assert {type(x).__name__ for x in restored.values()} == {"LossScaledState", "ScaledGradsState"}


def test_8_bit_moments_of_another_block_size_are_an_error_in_msgpack_too():
    params = {"w": jnp.ones((64, 256))}
    small, usual = (jamp.loss_scaled(jamp.quantized_state(optax.adam(0.1), block_size=size)) for size in (64, 128))
    update = jax.jit(small.update)
    _, state = update(params, small.init(params), params)
    saved = serialization.to_bytes(state)
    restored = serialization.from_bytes(usual.init(params), saved)
    with pytest.raises(ValueError, match=r"state\[0\]\.mu\['w'\] .*=128, got 64"):
        jax.eval_shape(usual.update, params, restored, params)
    again = serialization.from_bytes(small.init(params), saved)
    assert bits(update(params, again, params)) == bits(update(params, state, params))
    assert int(again.inner_state.rounding_count) == 1


def test_another_loss_scale_or_what_does_not_fit_is_an_error_that_names_both():
    fresh = {name: start("loss_scaled", name)[0] for name in SCALES}
    for old, new in itertools.permutations(SCALES, 2):
        config = json.loads(json.dumps(interop.checkpoint_config(fresh[old], SCALES[old])))
        with pytest.raises(ValueError, match=f"'{old}', this run has '{new}'.*convert_loss_scale"):
            interop.check_checkpoint_config(config, fresh[new], SCALES[new])
        was = jamp.loss_scale_from_config(config["loss_scale"])  # as the message says
        interop.check_checkpoint_config(config, INTEGRATIONS["loss_scaled"](was)[0], was)
        converted = jamp.convert_loss_scale(fresh[old], SCALES[new])
        interop.check_checkpoint_config(interop.checkpoint_config(converted, SCALES[new]), fresh[new], SCALES[new])
    arrays, static = {"w": jnp.ones((3, 4)), "n": 3}, jamp.StaticLossScale()
    config = json.loads(json.dumps(interop.checkpoint_config(arrays | {"f": place}, static)))  # not an array
    interop.check_checkpoint_config(config, jax.eval_shape(lambda: arrays), jamp.StaticLossScale(2.0))  # other numbers
    was, damaged = r"\['w'\] was saved as float32\[3,4\], the state has ", "checkpoint_config"
    for wrong, like, message in (
        (config, arrays | {"w": jnp.ones((3, 4), jnp.float16)}, was + r"float16\["),
        (config, arrays | {"w": jnp.ones((4, 4))}, was + r"float32\[4,4\]"),
        (config, {"w": arrays["w"]}, r"\['n'\] was saved as int32\[\], the state has no such array"),
        (config, arrays | {"b": jnp.ones(4)}, r"\['b'\] was not saved, the state has float32\[4\]"),
        (config, [jnp.ones(1)] * 9, r"\[2\] was not saved, the state has float32\[1\], and 8 more"),
        *((x, arrays, damaged) for x in ({"step": 3}, [1], None, {})),
        *((config | {"loss_scale": x}, arrays, damaged) for x in (None, {}, {"type": 3}, 8.0)),
        *((config | {"arrays": x}, arrays, damaged) for x in (None, {"n": None}, {"w": 3}, ["w"])),
    ):
        with pytest.raises(ValueError, match=message):
            interop.check_checkpoint_config(wrong, like, static)
    # A loss scale without `to_config` is named by its class.
    wide = interop.checkpoint_config({"w": np.zeros(2), "n": np.int64(3)}, static)["arrays"]
    assert wide == {"['n']": "int64[]", "['w']": "float64[2]"}  # also without x64
    assert interop.checkpoint_config({}, Halving())["loss_scale"] == {"type": "Halving"}


def test_a_run_without_a_loss_scale_is_described_without_one():
    params = {"w": jnp.ones((4, 2), jnp.bfloat16)}
    tx = optax.chain(optax.clip_by_global_norm(1.0), jamp.master_params(optax.adamw(1e-3), split=True))
    state = {"params": params, "opt_state": tx.init(params)}
    config = json.loads(json.dumps(interop.checkpoint_config(state)))
    assert config == interop.checkpoint_config(state, jamp.NoOpLossScale())
    interop.check_checkpoint_config(config, jax.eval_shape(lambda: state))
    wide = state | {"params": {"w": jnp.ones((4, 2))}}
    with pytest.raises(ValueError, match=r"\['params'\]\['w'\] was saved as bfloat16\[4,2\], the state has float32"):
        interop.check_checkpoint_config(config, wide)
    # A loss scale that was forgotten, in the state or in its shapes.
    scaled = jamp.loss_scaled(tx).init(params)
    for tree in (scaled, {"opt_state": jax.eval_shape(lambda: scaled)}, jamp.GradScaler()):
        for call in (interop.checkpoint_config, lambda tree: interop.check_checkpoint_config(config, tree)):
            with pytest.raises(ValueError, match="configuration"):
                call(tree)
    interop.checkpoint_config(jamp.loss_scaled(tx, jamp.NoOpLossScale()).init(params))


def train(folder):
    """In a process of its own: train to the last step from the last checkpoint, if any. Each step is announced."""
    run, step = start("loss_scaled", "dynamic")
    with ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(max_to_keep=2)) as manager:
        if first := manager.latest_step() or 0:
            run = manager.restore(first, args=ocp.args.StandardRestore(run))
        for k in range(first + 1, STEPS + 1):
            run = step(run, BATCHES[k % len(BATCHES)] + np.float32(k / STEPS))
            if k % 3 == 0:
                manager.save(k, args=ocp.args.StandardSave(run))  # in the background
            print(k, flush=True)
    folder.with_suffix(".end").write_bytes(pickle.dumps(bits(run)[1]))


@pytest.mark.slow
def test_killed_at_random_steps_three_times_a_training_ends_with_the_same_bits(tmp_path):
    path, seed, began = os.pathsep.join(sys.path), random.SystemRandom().randrange(10**6), []
    command = [sys.executable, "-W", "error", __file__, "train", tmp_path / "killed"]
    options, rng = {"env": environment(PYTHONPATH=path), "stdout": subprocess.PIPE, "text": True}, random.Random(seed)
    for _ in range(LIVES):
        with subprocess.Popen(command, **options) as child:
            began.append(int(child.stdout.readline()))
            for _ in range(rng.randrange(4, 11)):
                child.stdout.readline()
            time.sleep(rng.uniform(0, 0.1))  # anywhere in a step or in the save behind it
            child.kill()
        assert child.returncode == -signal.SIGKILL, f"{seed=}"
    assert len(set(began)) > LIVES // 2, f"{seed=}: it hardly went on from one life to the next, {began}"
    for name in ("killed", "undisturbed"):
        train(tmp_path / name)
    assert (tmp_path / "killed.end").read_bytes() == (tmp_path / "undisturbed.end").read_bytes(), f"{seed=} {began}"


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))
