"""What loss scaling adds to a training step on many devices, by compilation: `python -m benchmarks.memory.devices`.

The step of a transformer with the shapes of a 7 B-parameter model is compiled for TPU v5p slices of 1 to 4096 devices,
with and without loss scaling. No array is made and no TPU is needed, but `pip install libtpu` is. Parameters and
optimizer state are sharded over all devices (FSDP), the batch is one sequence for each device, layers are scanned and
rematerialised. One device holds a quarter of the layers: more do not fit.
"""

import os
import re
from collections import Counter
from functools import partial
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import jamp
from benchmarks import hlo
from benchmarks.models import rms_norm, updated
from benchmarks.record import parser, record, show, write

SLICES = {1: "v5p:2x2x1", 8: "v5p:2x2x2", 64: "v5p:4x4x4", 512: "v5p:8x8x8", 4096: "v5p:16x16x16"}
LAYERS, WIDTH, HIDDEN, HEADS, VOCABULARY, LENGTH = 32, 4096, 11008, 32, 32768, 2048
TX = optax.adamw(1e-4)
# Every parameter is sharded along its dimension of 4096.
SHAPES = {
    "embed": ((VOCABULARY, WIDTH), P(None, "data")),
    "head": ((WIDTH, VOCABULARY), P("data")),
    "blocks": {
        **{name: ((WIDTH, WIDTH), P(None, "data")) for name in "qkvo"},
        **{name: ((WIDTH, HIDDEN), P(None, "data")) for name in ("gate", "up")},
        "down": ((HIDDEN, WIDTH), P(None, None, "data")),
        **{name: ((WIDTH,), P(None, "data")) for name in ("norm1", "norm2")},
    },
}


def loss_fn(params: Any, tokens: jax.Array, kind: AxisType) -> jax.Array:
    """Mean cross entropy of the next token, computed in bfloat16; each weight is gathered where it is used."""
    place = jax.sharding.reshard if kind == AxisType.Explicit else jax.lax.with_sharding_constraint
    gather = lambda w: place(w.astype(jnp.bfloat16), P())
    on_batch = lambda x: place(x, P("data"))

    @partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable)
    def block(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        w = jax.tree.map(gather, w)
        h = rms_norm(x, w["norm1"])
        q, k, v = (on_batch((h @ w[name]).reshape(*h.shape[:2], HEADS, -1)) for name in "qkv")
        x = on_batch(x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ w["o"])
        h = rms_norm(x, w["norm2"])
        return on_batch(x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]), None

    x = on_batch(jax.nn.one_hot(tokens, VOCABULARY, dtype=jnp.bfloat16) @ gather(params["embed"]))
    x, _ = jax.lax.scan(block, x, params["blocks"])
    logits = on_batch((x @ gather(params["head"])).astype(jnp.float32))
    return -jnp.mean(jax.nn.log_softmax(logits[:, :-1]) * jax.nn.one_hot(tokens[:, 1:], VOCABULARY)) * VOCABULARY


def compile_step(scaled: bool, devices: int, kind: AxisType) -> Any:
    tx = jamp.loss_scaled(TX) if scaled else TX

    def train_step(params: Any, state: Any, tokens: jax.Array) -> Any:
        transformed = jamp.value_and_grad(loss_fn, state) if scaled else jax.value_and_grad(loss_fn)
        loss, grads = transformed(params, tokens, kind)
        return *updated(tx, grads, params, state), loss

    topology = topologies.get_topology_desc(platform="tpu", topology_name=SLICES[devices])
    mesh = Mesh(np.array(topology.devices[:devices]), "data", axis_types=(kind,))
    on_mesh = lambda spec: NamedSharding(mesh, spec)
    like = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    layers = LAYERS if devices > 1 else LAYERS // 4

    def parameter(path: Any, shape: tuple[tuple[int, ...], P]) -> jax.ShapeDtypeStruct:
        stacked = (layers,) if path[0].key == "blocks" else ()
        return jax.ShapeDtypeStruct((*stacked, *shape[0]), jnp.float32, sharding=on_mesh(shape[1]))

    params = jax.tree.map_with_path(parameter, SHAPES, is_leaf=lambda x: isinstance(x, tuple))
    tokens = jax.ShapeDtypeStruct((devices, LENGTH), jnp.int32, sharding=on_mesh(P("data")))
    replicated = {"transform_non_params": lambda _: on_mesh(P())}
    with jax.set_mesh(mesh):
        state = jax.eval_shape(tx.init, params)
    shardings = optax.tree.map_params(tx, lambda _, p: p.sharding, state, params, **replicated)
    sharded = jax.tree.map(like, state, shardings)
    with jax.set_mesh(mesh):
        return jax.jit(train_step, donate_argnums=(0, 1)).lower(params, sharded, tokens).compile()


def collectives(text: str) -> Counter[tuple[str, float]]:
    """(opcode, bytes of the result) of each operand of each collective; what a loop repeats counts once."""
    opcodes = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute"
    found = re.findall(rf"= (.*?) ({opcodes})(?:-start)?\(", text)
    return Counter((opcode, hlo.size(array)) for types, opcode in found for array in hlo.ARRAY.findall(types))


def compare(devices: int, kind: AxisType) -> dict[str, Any]:
    plain, ours = (compile_step(scaled, devices, kind) for scaled in (False, True))
    texts = [collectives(compiled.as_text()) for compiled in (plain, ours)]
    memory = [compiled.memory_analysis().temp_size_in_bytes / 1e6 for compiled in (plain, ours)]
    return {
        "devices": devices,
        "axes": kind.name,
        "collectives": texts[0].total(),
        "megabytes_of_collectives": sum(size * n for (_, size), n in texts[0].items()) / 1e6,
        "added_collectives": [[*key, n] for key, n in (texts[1] - texts[0]).items()],
        "temporary_megabytes": memory[0],
        "added_temporary_megabytes": memory[1] - memory[0],
    }


if __name__ == "__main__":
    arguments = parser("benchmarks.memory.devices", __doc__)
    arguments.add_argument("--devices", type=int, nargs="+", choices=SLICES, default=list(SLICES))
    arguments.add_argument("--axes", nargs="+", choices=["Auto", "Explicit"], default=["Auto", "Explicit"])
    options = arguments.parse_args()
    rows = []
    for kind in options.axes:
        for devices in options.devices[: 1 if options.quick else None]:
            rows.append(compare(devices, AxisType[kind]))
            show(rows[-1])
    write(options.json, record("benchmarks.memory.devices", options.quick, "compiled for TPU v5p") | {"rows": rows})
