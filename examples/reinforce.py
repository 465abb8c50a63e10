"""Fine-tune a small decoder with REINFORCE in float32, bfloat16 and float16: how far apart are sampler and trainer?

    python examples/reinforce.py

The task is to sort eight digits, with reward 1 for the right answer. After a short supervised run, REINFORCE draws
groups of answers to the same prompt, and subtracts from each reward the mean of the others in its group.

As in large systems, two programs compute the same model. The sampler has 16-bit weights and a 16-bit cache, and goes
token by token. The trainer has float32 parameters under `jamp.autocast`, and takes all tokens at once. They round at
different places. The table shows how much their log-probabilities differ, and their KL divergence. In float16, which
has three more bits for digits, expect an eighth of bfloat16's difference. The loss scale that it needs is marked below.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from tqdm import tqdm

import jamp

RUNS = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16 with jamp": jnp.float16}
DIGITS, SIGN, PROMPTS, GROUP, HEADS = 8, 10, 16, 8, 4  # SIGN is the token between question and answer


def init_params(key, layers=2, width=64):
    keys = iter(jax.random.split(key, 8))
    dense = lambda *shape: jax.random.normal(next(keys), shape) * shape[-2] ** -0.5
    blocks = {name: dense(layers, width, width) for name in "qkvo"} | {"norms": jnp.ones((layers, 2, width))}
    blocks |= {"up": dense(layers, width, 4 * width), "down": dense(layers, 4 * width, width)}
    return {"embed": dense(11, width), "place": dense(2 * DIGITS + 1, width), "blocks": blocks, "norm": jnp.ones(width)}


def norm(x, scale):
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)).astype(x.dtype) * scale


def forward(params, tokens, caches=None, start=0):
    """Log-probabilities f32[batch, length, 11] of what follows each token, and the caches with these tokens added."""
    places = start + jnp.arange(tokens.shape[1])

    def block(x, inputs):
        p, cache = inputs
        h = norm(x, p["norms"][0])
        q, k, v = ((h @ p[name]).reshape(*h.shape[:2], HEADS, -1) for name in "qkv")
        if cache:  # the keys and values of all tokens so far
            k, v = (jax.lax.dynamic_update_slice_in_dim(cache[i], new, start, 1) for i, new in enumerate((k, v)))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
        scores = jnp.where(jnp.arange(k.shape[1]) <= places[:, None], scores, -jnp.inf)
        x = x + jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(v.dtype), v).reshape(x.shape) @ p["o"]
        return x + jax.nn.gelu(norm(x, p["norms"][1]) @ p["up"]) @ p["down"], (k, v)

    x, caches = jax.lax.scan(block, params["embed"][tokens] + params["place"][places], (params["blocks"], caches))
    return jax.nn.log_softmax((norm(x, params["norm"]) @ params["embed"].T).astype(jnp.float32)), caches


def sample(params, prompts, key):
    """The prompts with sampled answers, i32[batch, 17], and the log-probabilities of the answers, f32[batch, 8]."""
    layers, width, _ = params["blocks"]["q"].shape
    empty = jnp.zeros((layers, len(prompts), 2 * DIGITS + 1, HEADS, width // HEADS), params["embed"].dtype)
    log_probs, caches = forward(params, prompts, (empty, empty))

    def next_token(carry, place):
        log_probs, caches = carry
        token = jax.random.categorical(jax.random.fold_in(key, place), log_probs)[:, None]
        following, caches = forward(params, token, caches, place)
        return (following[:, 0], caches), (token[:, 0], jnp.take_along_axis(log_probs, token, 1)[:, 0])

    _, (tokens, chosen) = jax.lax.scan(next_token, (log_probs[:, -1], caches), DIGITS + 1 + jnp.arange(DIGITS))
    return jnp.concatenate([prompts, tokens.T], 1), chosen.T


def loss_fn(params, tokens, advantages):
    """The loss, and the trainer's log-probabilities of the answers, all in one pass."""
    log_probs = forward(params, tokens[:, :-1])[0][:, DIGITS:]
    chosen = jnp.take_along_axis(log_probs, tokens[:, DIGITS + 1 :, None], 2)[..., 0]
    return -jnp.mean(advantages[:, None] * chosen), chosen


def solved(key, count):
    """Prompts with the right answers, i32[count, 17]."""
    digits = jax.random.randint(key, (count, DIGITS), 0, 10)
    return jnp.concatenate([digits, jnp.full((count, 1), SIGN), jnp.sort(digits)], 1)


def pretrain(init_key, key, steps=80):
    """Supervised, in float32: all runs begin with these parameters."""
    tx, params = optax.adam(2e-3), init_params(init_key)

    def step(carry, key):
        grads, _ = jax.grad(loss_fn, has_aux=True)(carry[0], solved(key, PROMPTS * GROUP), jnp.ones(1))
        updates, opt_state = tx.update(grads, carry[1])
        return (optax.apply_updates(carry[0], updates), opt_state), None

    return jax.jit(jax.lax.scan, static_argnums=0)(step, (params, tx.init(params)), jax.random.split(key, steps))[0][0]


def make_step(dtype, loss_scale=None, rules=None):
    # 1. Wrap the optimizer. float16 gets a dynamic loss scale, and the other dtypes none.
    tx = jamp.loss_scaled(optax.adam(3e-4), loss_scale or jamp.loss_scale_for(dtype))
    # 2. The trainer's matrix products in 16 bit.
    fn = loss_fn if dtype == jnp.float32 else jamp.autocast(loss_fn, dtype, rules=rules)

    def step(params, opt_state, key):
        prompt_key, sample_key = jax.random.split(key)
        right = jnp.repeat(solved(prompt_key, PROMPTS), GROUP, 0)
        tokens, sampled = sample(jamp.cast_floating(params, dtype), right[:, : DIGITS + 1], sample_key)
        rewards = jnp.all(tokens == right, 1).astype(jnp.float32).reshape(PROMPTS, GROUP)
        advantages = (rewards - rewards.mean(1, keepdims=True)).ravel() * GROUP / (GROUP - 1)
        # 3. Scale the loss, and unscale the gradients.
        (_, trained), grads = jamp.value_and_grad(fn, opt_state, has_aux=True)(params, tokens, advantages)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, (rewards.mean(), sampled, trained)

    return tx.init, jax.jit(step, compiler_options={"xla_allow_excess_precision": False})  # Keep the casts.


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="REINFORCE in float32, bfloat16, and float16 with jamp.")
    parser.add_argument("--steps", type=int, default=200, help="steps of REINFORCE of each run")
    parser.add_argument("--seed", type=int, default=0, help="the seed of parameters, prompts and samples")
    parser.add_argument("--out", type=Path, default=Path("out"), help="the folder for reinforce.png")
    args = parser.parse_args()
    start, table, tenth = pretrain(*jax.random.split(jax.random.key(args.seed))), [], max(args.steps // 10, 1)
    left, right = (fig := Figure(figsize=(8, 3.6), layout="constrained")).subplots(1, 2)
    for (name, dtype), color in zip(RUNS.items(), ["0.6", "C1", "C0"], strict=True):
        init, step = make_step(dtype)
        params, opt_state, history = start, init(start), []
        for key in (bar := tqdm(jax.random.split(jax.random.key(args.seed + 1000), args.steps), desc=name)):
            params, opt_state, out = step(params, opt_state, key)
            history.append(jax.device_get(out))
            bar.set_postfix(reward=f"{out[0]:.2f}", skipped=int(jamp.get_stats(opt_state).overflow_steps))
        rewards, sampled, trained = (np.stack(x) for x in zip(*history, strict=True))
        gap, skipped = np.abs(trained - sampled), jamp.get_stats(opt_state).overflow_steps
        cells = f"{gap.mean():12.1e}{gap.max():12.1e}{(gap**2).mean() / 2:9.0e}{rewards[:tenth].mean():8.2f}"
        table.append(f"{name:18}{cells} to {rewards[-tenth:].mean():.2f}{skipped:9}")
        left.semilogy(gap.mean((1, 2)), color=color)
        right.plot(np.convolve(rewards, np.ones(tenth) / tenth, "valid"), color=color, label=name)
    print("                   mean |diff|  max |diff|       KL        reward  skipped", *table, sep="\n")
    left.set(xlabel="step", ylabel="mean |difference of log-probabilities|")
    right.set(xlabel="step", ylabel="reward, moving average")
    right.legend()
    args.out.mkdir(parents=True, exist_ok=True)
    fig.savefig(args.out / "reinforce.png")
    print(f"The curves are in {args.out / 'reinforce.png'}.")
