"""Train a small residual network with BatchNorm, in Flax NNX and float16, on handwritten digits.

    pip install '.[examples,flax]'
    python examples/nnx_resnet.py

The changes for jamp are marked: an optimizer, a `value_and_grad`, and the modules' own `dtype`. The parameters, their
updates and BatchNorm's statistics stay float32.

Halfway through training, one batch contains an infinite pixel. Its forward pass writes NaN into BatchNorm's running
statistics, from which no network recovers. jamp skips the step and restores the statistics, and training continues. The
same happens when the loss scale has grown too high.

What to expect: a few steps are skipped, the statistics stay finite, and more than 95 percent of the test digits are
recognised. It takes about 20 seconds on two cores. The data are part of scikit-learn.
"""

import argparse
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import jamp
import jamp.nnx


class Block(nnx.Module):
    def __init__(self, width, dtype, rngs):
        self.convs = nnx.List([nnx.Conv(width, width, (3, 3), dtype=dtype, rngs=rngs) for _ in range(2)])
        self.norms = nnx.List(
            [nnx.BatchNorm(width, rngs=rngs) for _ in range(2)]
        )  # float32, as normalisation should be

    def __call__(self, x):
        y = nnx.relu(self.norms[0](self.convs[0](x)))
        return nnx.relu(x + self.norms[1](self.convs[1](y)))


class ResNet(nnx.Module):
    def __init__(self, width, blocks, dtype, rngs):
        self.stem = nnx.Conv(1, width, (3, 3), strides=2, dtype=dtype, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.blocks = nnx.List([Block(width, dtype, rngs) for _ in range(blocks)])
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(width, 10, dtype=dtype, rngs=rngs)

    def __call__(self, images):
        x = nnx.relu(self.norm(self.stem(images)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.drop(x.mean((1, 2)))).astype(jnp.float32)  # 1. the loss is computed in float32


def loss_fn(model, images, labels):
    return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()


@nnx.jit
def train_step(model, optimizer, images, labels):
    # 2. Replaces nnx.value_and_grad. It scales the loss, and restores the model's state on an overflow.
    loss, grads = jamp.nnx.value_and_grad(loss_fn, optimizer)(model, images, labels)
    optimizer.update(model, grads)
    return loss


@nnx.jit
def accuracy(model, images, labels):
    return jnp.mean(model(images).argmax(-1) == labels)


def batches(images, labels, size, steps, spoiled):
    """Yield shuffled batches. In the batch of the step `spoiled` one pixel is infinite."""
    rng, order = np.random.default_rng(0), np.array([], int)
    for step in range(steps):
        if len(order) < size:
            order = rng.permutation(len(labels))
        chosen, order = order[:size], order[size:]
        batch = images[chosen]
        if step == spoiled:
            batch[0, 0, 0] = np.inf
        yield batch, labels[chosen]


def main():
    parser = argparse.ArgumentParser(description="A small residual network in Flax NNX and float16.")
    parser.add_argument("--steps", type=int, default=300, help="steps to train")
    parser.add_argument("--batch", type=int, default=64, help="images per step")
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16", "float32"], help="compute dtype")
    args = parser.parse_args()

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    images, test_images, labels, test_labels = train_test_split(images, labels, stratify=labels, random_state=0)

    model = ResNet(width=16, blocks=2, dtype=args.dtype, rngs=nnx.Rngs(0))
    # 3. Replaces nnx.Optimizer. The scale may grow every 50 steps. The default of 2000 is for long runs.
    optimizer = jamp.nnx.Optimizer(
        model, optax.adamw(3e-3), wrt=nnx.Param, loss_scale=jamp.DynamicLossScale(growth_interval=50)
    )
    bar = tqdm(batches(images, labels, args.batch, args.steps, spoiled=args.steps // 2), total=args.steps)
    for step, batch in enumerate(bar, start=1):
        loss = train_step(model, optimizer, *batch)
        if step % 10 == 0 or step == args.steps:
            seen = jax.device_get(jamp.metrics(optimizer))  # waits for the device, so not at every step
            scale, skipped = f"2**{math.log2(seen['loss_scale']):g}", int(seen["overflow_steps"])
            bar.set_postfix(loss=f"{loss:.3f}", scale=scale, skipped=skipped)

    model.eval()
    finite = bool(jamp.all_finite(nnx.state(model, nnx.BatchStat)))
    print(f"{skipped} of {args.steps} steps skipped; BatchNorm's statistics are {'finite' if finite else 'nan'}.")
    print(f"Loss {loss:.3f}; {accuracy(model, test_images, test_labels):.1%} of the test digits are recognised.")


if __name__ == "__main__":
    main()
