"""Every format, loss scale and integration: a restored run goes on bit for bit; what does not fit is an error."""

import functools
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
STEPS, LIVES = 160, 20  # of a process that is killed


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
INTEGRATIONS |= {
    "mixed_precision": functools.partial(INTEGRATIONS["mixed_precision"], dtype=jnp.bfloat16),
    "nnx": nnx_state,
}


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


def load_npz(path, like):
    with path.open("rb") as file, np.load(file) as saved:
        return from_named(saved, like)


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
    "npz": (lambda path, tree: np.savez(path, **named(tree)), load_npz),
    "safetensors": (
        lambda path, tree: safetensors.save_file(named(tree), path),
        lambda path, like: from_named(safetensors.load_file(path), like),
    ),
}
FLAX_KNOWS = ("loss_scaled", "mixed_precision", "linen")  # for others it needs named arrays, as npz does
ALL = [(integration, scale) for integration in INTEGRATIONS for scale in SCALES]
SOME = [case for case in ALL if "loss_scaled" in case or "dynamic" in case]  # each integration, each loss scale


def place(tree):
    """On one device and committed to it, as Orbax restores: otherwise each step is compiled twice."""
    return jax.device_put(tree, jax.devices()[0])


@functools.cache
def start(integration, scale):
    """A fresh run, and its step."""
    run, step, *_ = INTEGRATIONS[integration](SCALES[scale])
    return place(run), jax.jit(step)


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


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("cases", [SOME, pytest.param(ALL, marks=pytest.mark.slow)], ids=["some", "all"])
def test_the_restored_run_goes_on_bit_for_bit(form, cases, tmp_path):
    cases = [case for case in cases if form != "flax" or case[0] in FLAX_KNOWS]
    together = form == "orbax"  # It is slow: one checkpoint, of each run at a step of its own.
    saved = [(case, k) for n, case in enumerate(cases) for k in ([n % 9] if together else range(9))]
    for n, group in enumerate([saved] if together else [[case] for case in saved]):
        runs = [undisturbed(*case)[k] for case, k in group]
        FORMATS[form][0](tmp_path / f"{n}.npz", runs)
        restored = load(form, tmp_path / f"{n}.npz", [start(*case)[0] for case, _ in group])
        assert bits(restored) == bits(runs)
        for run, (case, k) in zip(restored, group, strict=True):
            assert bits(go_on(start(*case)[1], place(run), k)) == bits(undisturbed(*case)[-1])


def sharding(x):
    return NamedSharding(Mesh(jax.devices(), "x"), PartitionSpec(*["x"][: x.ndim]))


def shard(tree):
    return jax.tree.map(lambda x: jax.device_put(x, sharding(x)), tree)


def continue_all(folder):
    """In a process of its own, with three devices: go on from every checkpoint in a folder, and write how it ends."""
    for path in sorted(folder.iterdir()):
        k, integration, scale, form = path.stem.split("@")
        fresh, step = start(integration, scale)
        restored = load(form, path, fresh)
        path.with_suffix(".end").write_bytes(pickle.dumps(bits(go_on(step, place(restored), int(k)))[1]))
        if form == "orbax":  # onto a sharded target, too
            onto_shards = load(form, path, shard(fresh))
            assert all(x.sharding == sharding(x) for x in jax.tree.leaves(onto_shards))
            assert bits(onto_shards) == bits(restored)
            assert bits(go_on(step, onto_shards, int(k))) == bits(go_on(step, shard(restored), int(k)))
            print("sharded")


def test_restored_in_a_new_process_the_run_goes_on_bit_for_bit(tmp_path):
    cases = ["orbax", "npz", "pickle", "flax", "safetensors", "npz"]
    cases = [*zip(INTEGRATIONS, [*SCALES, "dynamic", "adaptive"], cases, strict=True)]
    for k, (integration, scale, form) in enumerate(cases):
        FORMATS[form][0](tmp_path / f"{k}@{integration}@{scale}@{form}.npz", undisturbed(integration, scale)[k])
    devices = "--xla_force_host_platform_device_count=3"
    out = run_python(__file__, tmp_path, XLA_FLAGS=devices, PYTHONPATH=os.pathsep.join(sys.path))
    assert out == "sharded\n"
    for k, case in enumerate(cases):
        ends = tmp_path / ("@".join([str(k), *case]) + ".end")
        assert pickle.loads(ends.read_bytes()) == bits(undisturbed(*case[:2])[-1])[1]


def truncate(path):
    """Leave half of a file, or of every file in a folder."""
    for file in [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize(
    ("form", "truncated", "foreign"),
    [
        ("orbax", r"Expecting|Unterminated", r"structures do not match:[^$]*loss_scale"),
        ("flax", r"incomplete input", r"(field|keys).*do not match|Missing field step"),
        ("pickle", r"truncated", r"Too few leaves"),
        ("npz", r"not a zip file", r"loss_scale|step.* is not a file in the archive"),
        ("safetensors", r"header", r"loss_scale|step"),
    ],
)
def test_a_truncated_or_foreign_checkpoint_is_an_error_and_changes_no_state(form, truncated, foreign, tmp_path):
    params, opt_state = undisturbed("loss_scaled", "dynamic")[4]
    save, restore = FORMATS[form]
    for n, run in enumerate([{"params": params, "opt_state": opt_state}, undisturbed("linen", "dynamic")[4]]):
        before = bits(run)
        save(tmp_path / f"{n}.npz", run)
        truncate(tmp_path / f"{n}.npz")
        with pytest.raises(Exception, match=truncated):
            restore(tmp_path / f"{n}.npz", run)
        save(tmp_path / f"foreign{n}.npz", {"weights": jnp.ones(3)})
        with pytest.raises((ValueError, KeyError), match=foreign):
            restore(tmp_path / f"foreign{n}.npz", run)
        assert bits(run) == before


@pytest.mark.parametrize(("old", "new"), [(a, b) for a in SCALES for b in SCALES if a != b])
def test_another_kind_of_loss_scale_is_an_error_and_its_conversion_goes_on(old, new):
    run, (fresh, step) = undisturbed("loss_scaled", old)[2], start("loss_scaled", new)
    saved = json.loads(json.dumps(interop.checkpoint_config(run, SCALES[old])))
    with pytest.raises(ValueError, match=rf"type '{old}', this run has '{new}'.*convert_loss_scale"):
        interop.check_checkpoint_config(saved, fresh, SCALES[new])
    was = jamp.loss_scale_from_config(saved["loss_scale"])  # as the message says
    like, *_ = INTEGRATIONS["loss_scaled"](was)
    interop.check_checkpoint_config(saved, like, was)
    restored = jax.tree.unflatten(jax.tree.structure(like), jax.device_get(jax.tree.leaves(run)))
    converted = jamp.convert_loss_scale(restored, SCALES[new])
    interop.check_checkpoint_config(interop.checkpoint_config(converted, SCALES[new]), fresh, SCALES[new])
    assert bits(converted[1].inner_state) == bits(run[1].inner_state)
    assert np.isfinite(step(place(converted), BATCHES[4])[0]["w"]).all()


SAVED = {"w": jnp.ones((3, 4)), "n": 3, "f": place}  # a function is no array


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


def test_what_is_no_checkpoint_config_is_an_error_that_shows_it():
    for saved, shown in (({"step": 3}, "a mapping of 'step'"), ([1], r"\[1\]"), (None, "None")):
        with pytest.raises(ValueError, match=rf"is not what .*checkpoint_config returned: got {shown}"):
            interop.check_checkpoint_config(saved, SAVED, jamp.StaticLossScale())
    # A loss scale without `to_config` is named by its class.
    assert interop.checkpoint_config({}, Halving())["loss_scale"] == {"type": "Halving"}


def test_a_plain_optax_run_goes_on_loss_scaled_and_back_to_the_same_bits():
    tx, loss_scale = contract.INNER, jamp.DynamicLossScale()
    wrapped, grads = jamp.loss_scaled(tx, loss_scale), contract.params()

    def train(tx, params, opt_state, steps=1):
        update = jax.jit(tx.update)
        for _ in range(steps):
            updates, opt_state = update(grads, opt_state, params)
            params = optax.apply_updates(params, updates)
        return params, opt_state

    params, opt_state = train(tx, contract.params(), tx.init(contract.params()))
    params, opt_state = train(wrapped, params, interop.wrap_state(opt_state, loss_scale))
    assert int(jamp.get_stats(opt_state).finite_steps) == 1
    end = train(tx, params, interop.unwrap_state(opt_state))
    assert bits(end) == bits(train(tx, contract.params(), tx.init(contract.params()), steps=3))


def train(folder):
    """In a process of its own: train to the last step from the last checkpoint, if any. Each step is announced."""
    run, step = start("loss_scaled", "dynamic")
    with ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(max_to_keep=2)) as manager:
        first = manager.latest_step() or 0
        if first:
            run = manager.restore(first, args=ocp.args.StandardRestore(run))
        for k in range(first + 1, STEPS + 1):
            run = step(run, BATCHES[k % len(BATCHES)] + np.float32(k / STEPS))
            if k % 3 == 0:
                manager.save(k, args=ocp.args.StandardSave(run))  # in the background
            print(k, flush=True)
    folder.with_suffix(".end").write_bytes(pickle.dumps(bits(run)[1]))


@pytest.mark.slow
def test_killed_at_random_steps_twenty_times_a_training_ends_with_the_same_bits(tmp_path):
    def begin(name):
        command = [sys.executable, "-W", "error", __file__, "train", str(tmp_path / name)]
        env = environment(PYTHONPATH=os.pathsep.join(sys.path))
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)

    seed = random.SystemRandom().randrange(10**6)
    rng, began = random.Random(seed), []
    for _ in range(LIVES):
        with begin("killed") as child:
            began.append(int(child.stdout.readline()))
            for _ in range(rng.randrange(4, 11)):
                child.stdout.readline()
            time.sleep(rng.uniform(0, 0.1))  # anywhere in a step or in the save behind it
            child.send_signal(signal.SIGKILL)
        assert child.returncode == -signal.SIGKILL, f"{seed=}"
    assert len(set(began)) > LIVES // 2, f"{seed=}: it hardly went on from one life to the next, {began}"
    ends = []
    for name in ("killed", "undisturbed"):
        with begin(name) as child:
            child.stdout.read()
        assert child.returncode == 0
        ends.append(pickle.loads((tmp_path / f"{name}.end").read_bytes()))
    assert ends[0] == ends[1], f"{seed=} {began}"


if __name__ == "__main__":
    (train if sys.argv[1] == "train" else continue_all)(Path(sys.argv[-1]))
