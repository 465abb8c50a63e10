"""One of several processes that train one sharded model together; each step is a line of JSON, for the test to read."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jamp

TX = jamp.loss_scaled(optax.adamw(1e-2), jamp.DynamicLossScale(growth_interval=3))


@jax.jit
def train_step(params, opt_state, x):
    loss_fn = lambda params, x: jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] - x) ** 2)
    loss, grads = jamp.value_and_grad(loss_fn, opt_state)(params, x)
    updates, opt_state = TX.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def main(processes, port, steps, checkpoints, process):
    """Train. In the folder `checkpoints`, if any: start from the latest and write one after each second step."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", int(processes), int(process), initialization_timeout=120)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    sharded, replicated = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    place = lambda x: jax.make_array_from_callback(x.shape, sharded, lambda index: x[index])

    rng = np.random.default_rng(0)
    params = {name: place(rng.normal(size=(16, 16)).astype(np.float32) / 4) for name in ("up", "down")}
    shapes, shardings = jax.eval_shape(TX.init, params), jax.tree.map(lambda _: sharded, params)
    shardings = optax.tree.map_params(TX, lambda _, s: s, shapes, shardings, transform_non_params=lambda _: replicated)
    state, start = (params, jax.jit(TX.init, out_shardings=shardings)(params)), 0
    if checkpoints:
        import orbax.checkpoint as ocp

        manager = ocp.CheckpointManager(checkpoints)
        if (latest := manager.latest_step()) is not None:
            like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
            state, start = manager.restore(latest, args=ocp.args.StandardRestore(like)), latest

    for step in range(start, int(steps)):
        x = np.random.default_rng(step).normal(size=(16, 16)).astype(np.float32)
        if step % 4 == 2:
            x[13] = np.inf  # in the shard of one process
        *state, loss = train_step(*state, place(x))
        mine = np.isfinite(np.concatenate([s.data for s in place(x).addressable_shards])).all()
        report = {"step": step, "my batch is finite": bool(mine), "loss": float(loss)}
        print(json.dumps(report | {k: v.item() for k, v in jamp.metrics(state[1]).items()}), flush=True)
        if checkpoints and step % 2:
            manager.save(step + 1, args=ocp.args.StandardSave(tuple(state)))
            manager.wait_until_finished()
    whole = multihost_utils.process_allgather(state, tiled=True)
    print(json.dumps([np.asarray(x).tolist() for x in jax.tree.leaves(whole)]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
