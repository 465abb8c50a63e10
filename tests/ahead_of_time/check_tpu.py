"""What XLA makes of a step for a TPU v5e, compiled without one: `pip install libtpu`, then run pytest on this file."""

import os

# Before libtpu is loaded: there is no TPU to ask about.
os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from distributed import test_sharding
from distributed.hlo import SCALAR, collectives
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding

import jamp
from benchmarks import hlo

jax.config.update("jax_enable_compilation_cache", False)  # A cached program for an absent device cannot be read.
KINDS = [AxisType.Auto, AxisType.Explicit]


@pytest.fixture(scope="module", autouse=True)
def mesh_of_tpus():
    devices = np.array(topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices)
    with pytest.MonkeyPatch.context() as patch:
        make = lambda shape, names, *, axis_types: Mesh(devices.reshape(shape), names, axis_types=axis_types)
        patch.setattr(jax, "make_mesh", make)
        yield


@pytest.mark.parametrize("layout", test_sharding.LAYOUTS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_the_check_of_a_step_is_one_scalar_all_reduce_for_each_way_to_shard(kind, layout):
    texts = [test_sharding.compiled(kind, layout, on)[0].as_text() for on in (True, False)]
    with_scaling, without = map(collectives, texts)
    assert set(with_scaling - without) == (set() if layout == "data" else {SCALAR})
    # Scalars that are reduced in one operation cross together. `up` and `down` name the axes in two orders.
    instructions = [text.count(" all-reduce(") for text in texts]
    assert instructions[0] - instructions[1] <= {"data": 0, "fsdp": 1, "fsdp and tensor": 2}[layout]


@pytest.mark.promotes("optax.adamw")
def test_the_check_reads_the_gradients_in_the_same_pass_as_a_clips_norm():
    """A reduction of integers or bools would not."""
    params = {f"layer_{i}": jax.ShapeDtypeStruct((2240, 2240), jnp.float32) for i in range(8)}
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    moved = lambda tx: compiled_step(tx, params).cost_analysis()["bytes accessed"]
    assert moved(jamp.loss_scaled(tx)) < 1.02 * moved(tx)


@pytest.mark.promotes("optax.adamw")
def test_8_bit_state_halves_the_bytes_of_a_step_for_arrays_beyond_fast_memory():
    """With eight arrays, XLA computed the updates and the codes in two kernels, which both read the state."""
    wide = {f"layer_{i}": jax.ShapeDtypeStruct((4096, 4096), jnp.float32) for i in range(8)}
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), wide)
    small = jamp.stochastic_rounding(jamp.quantized_state(optax.adamw(1e-3)))
    found, whole = compiled_step(small, params), compiled_step(optax.adamw(1e-3), wide)
    assert hlo.count(found.as_text()).bytes < 0.45 * hlo.count(whole.as_text()).bytes
    assert found.memory_analysis().temp_size_in_bytes < 4 * 4096 * 4096


def compiled_step(tx, params):
    one = SingleDeviceSharding(topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0])
    on_one = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), tree)

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    args = on_one((params, jax.eval_shape(tx.init, params), params))
    return jax.jit(step, donate_argnums=(0, 1)).lower(*args).compile()


def test_the_compiler_keeps_the_recomputation_of_autocast(monkeypatch):
    def block(x, w):
        y = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)
        return x + jax.nn.gelu(y @ w) @ w.T, None

    loss = lambda ws, x: jnp.mean(jax.lax.scan(block, x, ws)[0] ** 2)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    device = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]
    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32, sharding=SingleDeviceSharding(device))
    memory, flops = {}, {}
    for recompute in (True, False):
        fun = jamp.autocast(loss, jnp.bfloat16, recompute=recompute)
        compiled = jax.jit(jax.grad(fun)).lower(shape(3, 256, 1024), shape(2**15, 256)).compile()
        memory[recompute] = compiled.memory_analysis().temp_size_in_bytes
        flops[recompute] = compiled.cost_analysis()["flops"]
    assert 0 < memory[True] < 0.6 * memory[False]
    assert flops[True] < 1.1 * flops[False]


def test_a_weight_gradient_is_written_in_float32_and_reduced_in_float32():
    def loss(w, x):
        return jnp.mean(jnp.square(jnp.tanh(x @ w) @ w.T))

    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    shape = lambda spec, *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32, sharding=NamedSharding(mesh, spec))
    args = shape(P(), 512, 1024), shape(P("data"), 64, 512, 512)
    for rules, wide in ((None, True), ({"dot_general[gradient]": "compute"}, False)):
        text = jax.jit(jax.grad(jamp.autocast(loss, jnp.bfloat16, rules=rules))).lower(*args).compile().as_text()
        reduced = [line.partition(" all-reduce(")[0] for line in text.splitlines() if " all-reduce(" in line]
        assert any(("f32[512,1024]" if wide else "bf16[") in types for types in reduced), reduced
        assert any("bf16[512,1024]" in types or "bf16[1024,512]" in types for types in reduced) != wide


def test_a_loss_in_chunks_holds_the_logits_of_one():
    """Of 8192 rows and 32768 words: in chunks of 1024, with the head cast once, before the loop."""

    def loss_sum(head, hidden, targets):
        logits = (hidden @ head).astype(jnp.float32)
        chosen = jnp.sum(jnp.where(jnp.arange(32768) == targets[:, None], logits, 0.0), -1)
        return jnp.sum(jax.nn.logsumexp(logits, -1) - chosen)

    shapes = ((1024, 32768), jnp.float32), ((8192, 1024), jnp.float32), ((8192,), jnp.int32)
    device = SingleDeviceSharding(jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,)).devices.flat[0])
    args = [jax.ShapeDtypeStruct(*x, sharding=device) for x in shapes]
    compiled = lambda fun: jax.jit(jax.grad(jamp.autocast(fun, jnp.bfloat16), argnums=(0, 1))).lower(*args).compile()
    chunked, whole = compiled(jamp.chunked_sum(loss_sum, 1024)), compiled(loss_sum)
    temporary = lambda program: program.memory_analysis().temp_size_in_bytes
    logits = 8192 * 32768 * 2
    assert temporary(whole) > logits
    assert temporary(chunked) < logits / 2 + 1024 * 32768 * 6  # and the head, in 16 bit, and its gradient, in 32 bit
