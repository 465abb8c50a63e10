"""Adaptive loss scaling: the MindSpore program, the YAML of a MindFormers run, the windows, and a resumed run.

    python tests/requirements/002_adaptive_loss_scaling.py

The usage examples of `AdaptiveLossScaleUpdateCell`, translated. docs/from-mindspore.md explains the windows.
"""

import jax
import jax.numpy as jnp
import optax

import jamp

CONFIG = {  # yaml.safe_load(open("run_pangualpha.yaml"))
    "runner_config": {"epochs": 3, "batch_size": 4, "sink_mode": True, "sink_size": 2},
    "runner_wrapper": {
        "type": "MFTrainOneStepCell",
        "scale_sense": {
            "type": "AdaptiveLossScaleUpdateCell",
            "loss_scale_value": 4294967296,
            "scale_factor": 2,
            "scale_window": 20,
            "max_scale_window": 1000,
            "min_scale_window": 20,
        },
        "use_clip_grad": True,
    },
}


def net_with_loss(net, input, labels):
    return jnp.mean((input @ net["weight"] - labels[:, None]) ** 2)


def make_train_network(optimizer):
    @jax.jit
    def train_network(net, opt_state, input, labels):
        loss, grads = jamp.value_and_grad(net_with_loss, opt_state)(net, input, labels)
        updates, opt_state = optimizer.update(grads, opt_state, net)
        return optax.apply_updates(net, updates), opt_state, loss

    return train_network


def main():
    net, data = {"weight": jnp.ones((16, 10))}, (jnp.ones((10, 16)), jnp.ones(10))
    manager = jamp.AdaptiveLossScale(
        init_scale=2**12, scale_factor=2, initial_window=20, max_window=1000, min_window=20
    )
    optimizer = jamp.loss_scaled(optax.sgd(0.1, momentum=0.9), manager)
    train_network, opt_state = make_train_network(optimizer), optimizer.init(net)
    net, opt_state, output = train_network(net, opt_state, *data)
    assert output == 225.0, "Every output is 16, every label 1."
    for _ in range(59):
        net, opt_state, _ = train_network(net, opt_state, *data)
    window = manager.window_list[opt_state.loss_scale_state.window_index]
    print(f"After 60 steps: loss scale {jamp.get_loss_scale(opt_state)}, window {window} of {manager.window_list}")
    assert (jamp.get_loss_scale(opt_state), window) == (2.0**15, 30), "The third growth lengthens the window."

    inf = data[0].at[0, 0].set(jnp.inf)
    for _ in range(3):
        net, opt_state, _ = train_network(net, opt_state, inf, data[1])
    checkpoint = jamp.interop.to_mindformers(opt_state, manager)  # opt_state itself holds all of it, too
    print(f"After 3 overflows: loss scale {checkpoint['scale_sense']}, window {checkpoint['scale_window']}")
    assert (checkpoint["scale_sense"], checkpoint["scale_window"]) == (2.0**12, 1), "The hidden window."
    resumed = opt_state._replace(loss_scale_state=jamp.interop.from_mindformers(checkpoint))
    net, resumed, _ = train_network(net, resumed, *data)
    assert jamp.get_loss_scale(resumed) == 2.0**13, "In the hidden window every finite step grows."

    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9))  # use_clip_grad: True
    # The whole CONFIG is accepted too, and warns that a loss scale does not clip.
    loss_scale = jamp.loss_scale_from_config(CONFIG["runner_wrapper"]["scale_sense"])
    print(f"From the YAML: {loss_scale}")
    assert jamp.get_loss_scale(jamp.loss_scaled(clipped, loss_scale).init(net)) == 4294967296.0


if __name__ == "__main__":
    main()
