"""Fine-tuning: from a checkpoint's parameters, with frozen leaves, and with a policy, a value and a reference model."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import jamp

X = jax.random.normal(jax.random.key(1), (64, 8))
LABELS = (X[:, 0] > 0).astype(jnp.int32)
bits = lambda tree: [(x.dtype, np.asarray(x).tobytes()) for x in jax.tree.leaves(tree)]


def init(key, actions):
    make = jax.nn.initializers.lecun_normal()
    body, head = jax.random.split(jax.random.key(key))
    return {"body": {"w": make(body, (8, 16)), "b": jnp.zeros(16)}, "head": {"w": make(head, (16, actions))}}


def apply(params, x):
    params, x = jamp.cast_floating((params, x), jnp.float16)
    return (jnp.tanh(x @ params["body"]["w"] + params["body"]["b"]) @ params["head"]["w"]).astype(jnp.float32)


def classify(params, x, labels):
    return optax.softmax_cross_entropy_with_integer_labels(apply(params, x), labels).mean()


@functools.cache
def make_step(tx, loss_fn):
    @jax.jit
    def step(params, opt_state, *batch):
        loss, grads = jamp.value_and_grad(loss_fn, opt_state)(params, *batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step


def train(tx, loss_fn, params, opt_state, batches):
    """Parameters, optimizer state and losses after a step on each batch."""
    step, losses = make_step(tx, loss_fn), []
    for batch in batches:
        params, opt_state, loss = step(params, opt_state, *batch)
        losses.append(loss)
    return params, opt_state, losses


def through_a_checkpoint(path, tree):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
        return checkpointer.restore(path, jax.eval_shape(lambda: tree))


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """The parameters of a checkpoint, and what it held of the optimizer."""
    tx = jamp.loss_scaled(optax.adam(1e-2), jamp.DynamicLossScale(growth_interval=10))
    params = init(0, actions=3)
    params, opt_state, _ = train(tx, classify, params, tx.init(params), [(X, LABELS)] * 60)
    saved = {"params": params, "opt_state": opt_state}
    restored = through_a_checkpoint(tmp_path_factory.mktemp("pretrained") / "run", saved)
    assert bits(restored) == bits(saved)
    return restored["params"], restored["opt_state"]


def test_from_a_checkpoints_parameters_with_a_fresh_scaler(pretrained):
    params, old = pretrained
    loss_scale = jamp.DynamicLossScale(growth_interval=100)
    tx = jamp.loss_scaled(optax.adam(1e-3), loss_scale)
    opt_state = tx.init(params)
    assert jamp.get_loss_scale(old) == 2.0**22
    assert bits(opt_state.loss_scale_state) == bits(loss_scale.init())
    assert int(jamp.get_stats(opt_state).finite_steps) == 0
    _, opt_state, losses = train(tx, classify, params, opt_state, [(-X, 1 - LABELS)] * 20)
    assert losses[-1] < losses[0] < np.log(3)  # it starts from what it knows and goes on learning
    # Or with the optimizer of the checkpoint: only the scaler is fresh.
    kept = optax.tree.set(old, loss_scale_state=loss_scale.init())
    assert jamp.get_loss_scale(kept) == 2.0**16
    assert bits(kept.inner_state) == bits(old.inner_state)


def test_frozen_leaves_never_move_and_the_run_resumes_bit_for_bit(pretrained, tmp_path):
    params, _ = pretrained
    labels = {"body": "frozen", "head": "trained"}
    tx = jamp.loss_scaled(optax.partition({"trained": optax.adamw(1e-2), "frozen": optax.set_to_zero()}, labels))
    batches = [(X * (jnp.inf if k in (2, 7) else 1), 2 - LABELS) for k in range(10)]
    whole = train(tx, classify, params, tx.init(params), batches)
    assert bits(whole[0]["body"]) == bits(params["body"])
    assert bits(whole[0]["head"]) != bits(params["head"])
    assert int(jamp.get_stats(whole[1]).overflow_steps) == 2
    assert len(jax.tree.leaves(whole[1].inner_state)) == 3  # adam's count and two moments: nothing for frozen leaves
    half = train(tx, classify, params, tx.init(params), batches[:5])[:2]
    resumed = train(tx, classify, *through_a_checkpoint(tmp_path / "half", half), batches[5:])
    assert bits(resumed[:2]) == bits(whole[:2])


def test_a_policy_a_value_and_a_frozen_reference_model(pretrained, tmp_path):
    """One loss scale for policy and value: an overflow in either skips both. The reference is an argument."""
    reference, _ = pretrained
    models = {"policy": reference, "value": init(2, actions=1)}

    def loss_fn(models, reference, x, actions):
        reward = (actions == 2).astype(jnp.float32)
        logits, value = apply(models["policy"], x), apply(models["value"], x)[:, 0]
        log_policy, log_reference = jax.nn.log_softmax(logits), jax.nn.log_softmax(apply(reference, x))
        taken = jnp.take_along_axis(log_policy, actions[:, None], 1)[:, 0]
        gain = (reward - jax.lax.stop_gradient(value)) * taken
        to_reference = jnp.sum(jnp.exp(log_policy) * (log_policy - log_reference), -1)
        return jnp.mean((value - reward) ** 2 - gain + 0.05 * to_reference)

    tx = jamp.loss_scaled(optax.adam(2e-2))
    explore = functools.partial(jax.random.randint, shape=(64,), minval=0, maxval=3)
    batches = [(reference, X * (jnp.inf if k == 9 else 1), explore(jax.random.key(k))) for k in range(40)]
    before = bits(reference)
    whole = train(tx, loss_fn, models, tx.init(models), batches)
    third = lambda policy: jnp.mean(jax.nn.softmax(apply(policy, X))[:, 2])
    assert third(whole[0]["policy"]) > 0.5 > 0.1 > third(reference)  # it learned what is rewarded
    assert bits(reference) == before
    at_overflow = [train(tx, loss_fn, models, tx.init(models), batches[:k])[0] for k in (9, 10)]
    assert bits(at_overflow[0]) == bits(at_overflow[1])
    half = train(tx, loss_fn, models, tx.init(models), batches[:20])[:2]
    resumed = train(tx, loss_fn, *through_a_checkpoint(tmp_path / "half", half), batches[20:])
    assert bits(resumed[:2]) == bits(whole[:2])
