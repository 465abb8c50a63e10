"""Brax: PPO on the inverted pendulum with `ppo.train`. The networks are what it lets you choose."""

import jax
import jax.numpy as jnp
import numpy as np
from brax import envs
from brax.training.agents.ppo import networks as ppo_networks, train as ppo

import jamp


def device_put_replicated(tree, devices):
    return jax.pmap(lambda _, tree: tree, in_axes=(0, None), devices=devices)(np.zeros(len(devices)), tree)


jax.device_put_replicated = device_put_replicated  # Brax 0.14.2 calls it, and JAX 0.10 removed it: google/brax#671

MARGIN = 0.02
OWN_OPTIMIZER = "ppo.train makes the optimizer"
IMPOSSIBLE = {
    "bfloat16 parameters": OWN_OPTIMIZER,
    "overflow": OWN_OPTIMIZER,
    "checkpoint": "Brax saves only the parameters",
    "metrics": OWN_OPTIMIZER,
}
NOTE = dict.fromkeys(("float16", "bfloat16", "8 bit"), "short rollouts")


def factory(way):
    def network_factory(*args, **kwargs):
        networks = ppo_networks.make_ppo_networks(*args, **kwargs, policy_hidden_layer_sizes=(256, 256))
        for network in (networks.policy_network, networks.value_network):
            if way == "float16":
                network.apply = jamp.scaled(jamp.autocast(network.apply, jnp.float16))
            elif way == "bfloat16":
                network.apply = jamp.autocast(network.apply, jnp.bfloat16)
            elif way == "8 bit":
                network.apply = jamp.autocast(network.apply, jamp.Float8())
        return networks

    return network_factory


def train(way):
    """100 updates, each on a rollout from a reset, so that the runs stay close, and logged on its own."""
    losses = []
    ppo.train(
        envs.get_environment("inverted_pendulum", backend="spring"),
        num_timesteps=100 * 256 * 4,
        num_envs=256,
        episode_length=20,
        batch_size=256,
        unroll_length=4,
        num_minibatches=1,
        num_updates_per_batch=1,
        num_evals=101,
        num_resets_per_eval=1,
        run_evals=False,
        learning_rate=3e-4,
        discounting=0.5,
        network_factory=factory(way),
        progress_fn=lambda _, metrics: losses.append(metrics["training/total_loss"]),
    )
    return [float(loss) for loss in losses]
