"""Train a small language model on a mesh of any size, with sharded parameters and optimizer state.

A decoder-only transformer learns to predict the next byte of Python's own standard library, in plain JAX. Parameters,
optimizer state and batch are sharded over all devices (FSDP). The loss scale and its counts are replicated. The train
step is that of the README, without sharding annotations. The shardings come from the arrays.

    pip install '.[examples]'
    python examples/fsdp_transformer.py                # on all devices of this machine
    python examples/fsdp_transformer.py --devices 8    # on eight simulated CPU devices
    python examples/fsdp_transformer.py --devices 4 --processes 2    # in two processes, connected over loopback

Here the loss scale may grow every 5 steps and has no ceiling. It rises until a gradient overflows on some device, and
then all devices skip that step. In a long run, keep the defaults. On a cluster, start the program once on each host,
call `jax.distributed.initialize()` without arguments, and delete `launch`.
"""

import argparse
import math
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from tqdm import trange

import jamp

LAYERS, WIDTH, HEADS, CONTEXT, BATCH = 2, 128, 4, 64, 16
TX = jamp.loss_scaled(
    optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    jamp.DynamicLossScale(growth_interval=5, max_scale=math.inf),
)


def init_params(key):
    def dense(rows, columns):
        nonlocal key
        key, subkey = jax.random.split(key)
        return jax.random.normal(subkey, (rows, columns)) * rows**-0.5

    sizes = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    blocks = [{name: dense(*size) for name, size in sizes.items()} for _ in range(LAYERS)]
    return {"embed": dense(256, WIDTH), "position": dense(CONTEXT, WIDTH), "blocks": blocks, "head": dense(WIDTH, 256)}


def loss_fn(params, tokens):
    x = params["embed"][tokens[:, :-1]] + params["position"]
    for block in params["blocks"]:
        q, k, v = jnp.split((norm(x) @ block["qkv"]).reshape(*x.shape[:2], HEADS, -1), 3, axis=-1)
        x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ block["out"]
        x = x + jax.nn.gelu(norm(x) @ block["up"]) @ block["down"]
    return optax.softmax_cross_entropy_with_integer_labels(norm(x) @ params["head"], tokens[:, 1:]).mean()


def norm(x):
    return jax.nn.standardize(x, axis=-1)


@jax.jit
def train_step(params, opt_state, tokens):
    half_loss_fn = jamp.autocast(loss_fn, jnp.float16)  # products in float16; softmax, variance and the loss in float32
    loss, grads = jamp.value_and_grad(half_loss_fn, opt_state)(params, tokens)
    updates, opt_state = TX.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def create(mesh):
    """Make the parameters and the optimizer state on the mesh. Each device makes its own shards."""
    init = lambda: init_params(jax.random.key(0))
    shapes = jax.eval_shape(init)
    on = lambda spec: NamedSharding(mesh, spec)
    shardings = jax.tree.map(lambda x: on(P("data") if x.shape[0] % mesh.size == 0 else P()), shapes)
    params = jax.jit(init, out_shardings=shardings)()
    # Moments are sharded like their parameters. The loss scale and all counts are replicated.
    state = jax.eval_shape(TX.init, shapes)
    states = optax.tree.map_params(TX, lambda _, s: s, state, shardings, transform_non_params=lambda _: on(P()))
    return params, jax.jit(TX.init, out_shardings=states)(params)


def get_batch(text, index, mesh):
    """Make batch number `index`, i32[batch, CONTEXT + 1]. Each process makes the rows of its own devices."""
    size = math.ceil(BATCH / mesh.size) * mesh.size
    starts = np.random.default_rng(index).integers(len(text) - CONTEXT, size=size)
    rows = text[starts[:, None] + np.arange(CONTEXT + 1)].astype(np.int32)
    return jax.make_array_from_callback(rows.shape, NamedSharding(mesh, P("data")), lambda where: rows[where])


def launch(processes):
    """Start this program `processes` times and wait. Show the output of the first process, and all errors."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, *sys.argv, "--port", str(port), "--process"]
    started = [subprocess.Popen([*command, str(i)], stdout=subprocess.DEVNULL if i else None) for i in range(processes)]
    sys.exit(max(abs(process.wait()) for process in started))


def main():
    parser = argparse.ArgumentParser(description="A language model in float16 on a mesh of any size.")
    parser.add_argument("--steps", type=int, default=300, help="steps to train")
    parser.add_argument("--devices", type=int, help="the number of simulated CPU devices, in all processes together")
    parser.add_argument("--processes", type=int, default=1, help="how many processes to start")
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.processes > 1 and args.process is None:
        launch(args.processes)
    if args.devices or args.processes > 1:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", (args.devices or args.processes) // args.processes)
    if args.processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{args.port}", args.processes, args.process)

    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = np.frombuffer(b"\n".join(file.read_bytes() for file in files)[:2_000_000], np.uint8)
    params, opt_state = create(mesh)
    losses, decisions = [], []  # on the device, to avoid waiting
    for step in (bar := trange(args.steps, disable=jax.process_index() > 0)):
        if step == 1:  # the first step compiles
            start = time.perf_counter()
        tokens = get_batch(text, step, mesh)
        params, opt_state, loss = train_step(params, opt_state, tokens)
        losses.append(loss)
        decisions.append(jamp.get_grads_finite(opt_state))
        if step % 10 == 0 or step == args.steps - 1:
            bar.set_postfix(loss=f"{loss:.3f}", scale=f"2**{math.log2(jamp.get_loss_scale(opt_state)):g}")
    speed = (args.steps - 1) * tokens.shape[0] * CONTEXT / (time.perf_counter() - start) if args.steps > 1 else math.nan

    # The decision of each device, from its own copy of the flags: bool[devices, steps].
    mine = np.array([[shard.data.item() for shard in flag.addressable_shards] for flag in decisions]).T
    everywhere = multihost_utils.process_allgather(mine).reshape(-1, args.steps)
    if jax.process_index() == 0:
        print(f"{mesh.size} devices in {jax.process_count()} processes, {speed:,.0f} tokens per second")
        print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}, loss scale 2**{math.log2(jamp.get_loss_scale(opt_state)):g}")
        agreed = "agreed on" if (everywhere == everywhere[0]).all() else "DISAGREED on some of"
        print(f"{len(everywhere)} devices {agreed} all {args.steps} steps: {np.sum(~everywhere[0])} were skipped")


if __name__ == "__main__":
    main()
