"""A PyTorch training loop with GradScaler, translated to JAX line by line.

    python examples/from_pytorch.py

The PyTorch original:

    for input, target in data_loader:
        optimizer.zero_grad()
        with autocast(device_type="cuda", dtype=torch.float16):
            output = model(input)
            loss = loss_fn(output, target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""

import jax
import jax.numpy as jnp

import jamp

optimizer = jamp.optimizers.sgd(1e-3)  # optim.SGD(model.parameters(), lr=1e-3)


def model(params, input):  # nn.Linear(10, 1)
    return input @ params["weight"] + params["bias"]


@jamp.autocast  # with autocast(device_type="cuda", dtype=torch.float16):
def loss_fn(params, input, target):  # nn.MSELoss()
    return jnp.mean((model(params, input) - target) ** 2)


@jax.jit
def train_step(params, opt_state, scaler, input, target):
    # scaler.scale(loss).backward(): scales the loss internally, and returns the true loss and gradients. Gradients are
    # values, so zero_grad is not needed.
    loss, grads = scaler.value_and_grad(loss_fn)(params, input, target)
    # scaler.step(optimizer); scaler.update(): it checks the gradients, skips on an overflow and adapts the scale.
    params, opt_state, scaler, _ = scaler.step(optimizer, opt_state, params, grads=grads)
    return params, opt_state, scaler, loss


def main(num_epochs=3):
    keys = jax.random.split(jax.random.key(0), 3)
    params = {"weight": 0.3 * jax.random.normal(keys[0], (10, 1)), "bias": jnp.zeros(1)}
    opt_state = optimizer.init(params)
    scaler = jamp.GradScaler()
    data_loader = list(
        zip(jax.random.normal(keys[1], (10, 8, 10)), jax.random.normal(keys[2], (10, 8, 1)), strict=True)
    )

    for epoch in range(num_epochs):
        for input, target in data_loader:
            params, opt_state, scaler, loss = train_step(params, opt_state, scaler, input, target)
        print(f"epoch {epoch}: loss {float(loss):.3f}; {scaler.get_stats()}")
    return scaler


if __name__ == "__main__":
    main()
