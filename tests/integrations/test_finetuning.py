"""Fine-tuning of a checkpoint's parameters: as a policy with frozen leaves, with a value and a reference model."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from trees import bits

import jamp

normal = lambda *shape, seed=0, scale=1.0: scale * jax.random.normal(jax.random.key(seed), shape)
X = np.asarray(normal(64, 8, seed=1))
LABELS = (X[:, 0] > 0).astype(np.int32)
SGD = optax.sgd(0.1, momentum=0.9)


init = lambda outputs: {"body": normal(8, 16, scale=8**-0.5), "head": normal(16, outputs, scale=0.25)}


def apply(params, x):
    params, x = jamp.cast_floating((params, x), jnp.float16)
    return (jnp.tanh(x @ params["body"]) @ params["head"]).astype(jnp.float32)


cross_entropy = optax.softmax_cross_entropy_with_integer_labels
classify = lambda params, x, labels: cross_entropy(apply(params, x), labels).mean()


def policy_and_value(models, reference, x, actions):
    reward, value = (actions == 2).astype(jnp.float32), apply(models["value"], x)[:, 0]
    policy, given = (jax.nn.log_softmax(apply(params, x)) for params in (models["policy"], reference))
    gain = (reward - jax.lax.stop_gradient(value)) * jnp.take_along_axis(policy, actions[:, None], 1)[:, 0]
    return jnp.mean((value - reward) ** 2 - gain + 0.05 * jnp.sum(jnp.exp(policy) * (policy - given), -1))


def make_train(tx, loss_fn):
    @jax.jit
    def step(params, opt_state, *batch):
        updates, opt_state = tx.update(jamp.grad(loss_fn, opt_state)(params, *batch), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    # The parameters and the optimizer state before each batch, and at the end.
    return lambda run, batches: [run] + [run := step(*run, *batch) for batch in batches]


def through_a_checkpoint(path, tree):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
        return checkpointer.restore(path, jax.eval_shape(lambda: tree))


@pytest.mark.slow
def test_a_pretrained_model_is_finetuned_with_a_fresh_scaler_and_frozen_leaves(tmp_path):
    """One loss scale for policy and value: an overflow in either skips both. The reference is an argument."""
    params, tx = init(3), jamp.loss_scaled(SGD, jamp.DynamicLossScale(growth_interval=10))
    pretrained = make_train(tx, classify)((params, tx.init(params)), [(X, LABELS)] * 60)[-1]
    reference, old = through_a_checkpoint(tmp_path / "pretrained", pretrained)
    assert bits((reference, old)) == bits(pretrained)
    assert classify(reference, X, LABELS) < 0.5 * classify(params, X, LABELS)
    kept = optax.tree.set(old, loss_scale_state=jamp.DynamicLossScale().init())  # to go on with the momentum
    assert (jamp.get_loss_scale(old), jamp.get_loss_scale(kept)) == (2.0**22, 2.0**16)
    assert bits(kept.inner_state) == bits(old.inner_state)

    parts = {"trained": SGD, "frozen": optax.set_to_zero()}
    labels = {"policy": {"body": "frozen", "head": "trained"}, "value": "trained"}
    models, tx = {"policy": reference, "value": init(1)}, jamp.loss_scaled(optax.partition(parts, labels))
    assert bits(tx.init(models).loss_scale_state) == bits(jamp.DynamicLossScale().init())
    explored = np.random.default_rng(0).integers(3, size=(60, 64), dtype=np.int32)
    batches = [(reference, X * np.float32(np.inf if k in (9, 40) else 1), row) for k, row in enumerate(explored)]
    before, train = bits(reference), make_train(tx, policy_and_value)
    runs = train((models, tx.init(models)), batches)
    third = lambda policy: jnp.mean(jax.nn.softmax(apply(policy, X))[:, 2])
    trained, opt_state = runs[-1]
    assert third(trained["policy"]) > 0.5 > 0.1 > third(reference)  # It learned what is rewarded.
    assert bits(reference) == before
    assert bits(trained["policy"]["body"]) == bits(reference["body"])
    assert bits(runs[9][0]) == bits(runs[10][0]) != bits(runs[11][0])
    assert int(jamp.get_stats(opt_state).overflow_steps) >= 2
    assert len(jax.tree.leaves(opt_state.inner_state)) == 3  # momenta: nothing for frozen leaves
    assert bits(train(through_a_checkpoint(tmp_path / "half", runs[30]), batches[30:])[-1]) == bits(runs[-1])
