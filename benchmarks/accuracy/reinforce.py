"""float16 or bfloat16 for REINFORCE? The mismatch of sampler and trainer, and the rewards, over five seeds.

    python -m benchmarks.accuracy.reinforce --json docs/benchmarks/reinforce.json

The model, the task and the step are those of examples/reinforce.py. Before and after each run, the parameters answer
the same fresh prompts. Compared are the log-probabilities of the sampled tokens by the sampler and by the trainer.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

import jamp
from benchmarks.record import parser, record, show, write
from examples import reinforce

Row = dict[str, Any]
SEEDS, STEPS, SEQUENCES = 5, 200, 2048
LEVELS = [0, *np.arange(1, 20) / 20, 0.98, 0.99, 0.995, 0.998, 0.999, 0.9995, 0.9998, 0.9999, 1]
# The default scale does not grow within the run. The last one grows every 20 steps until it overflows.
OFTEN = "float16, growth every 20 steps"
SETUPS = {"float32": (jnp.float32, None), "bfloat16": (jnp.bfloat16, None), "float16": (jnp.float16, None)}
SETUPS[OFTEN] = (jnp.float16, jamp.DynamicLossScale(growth_interval=20, max_scale=math.inf))
# By default XLA:CPU leaves out roundings to 16 bit: some that are followed by a cast back, and some to bfloat16 inside
# the kernels of YNNPACK, although they are in the compiled HLO.
EXACT = {"xla_allow_excess_precision": False, "xla_cpu_experimental_ynn_fusion_type": ""}
# How sampler and trainer get their dtype, and whether XLA must keep every rounding.
USUAL = "16-bit weights / autocast"
WAYS = {
    USUAL: (False, True, True),
    "autocast / autocast": (True, True, True),
    "16-bit weights / 16-bit weights": (False, False, True),
    f"{USUAL}, XLA's default": (False, True, False),
    "autocast / autocast, XLA's default": (True, True, False),
}


def make_measure(dtype: DTypeLike, way: str) -> Callable[..., dict[str, Any]]:
    """A function of parameters, a key and a number of sequences: how far sampler and trainer are apart."""
    exact = EXACT if WAYS[way][2] else {}

    def compiled(fun: Callable[..., Any], by_autocast: bool) -> Callable[..., Any]:
        if dtype == jnp.float32:
            return jax.jit(fun, compiler_options=exact)
        cast = lambda params, *args: fun(jamp.cast_floating(params, dtype), *args)
        return jax.jit(jamp.autocast(fun, dtype) if by_autocast else cast, compiler_options=exact)

    sampler, trainer = compiled(reinforce.sample, WAYS[way][0]), compiled(reinforce.loss_fn, WAYS[way][1])

    def measure(params: Any, key: jax.Array, sequences: int) -> dict[str, Any]:
        prompt_key, sample_key = jax.random.split(key)
        right = reinforce.solved(prompt_key, sequences)
        tokens, sampled = sampler(params, right[:, : reinforce.DIGITS + 1], sample_key)
        _, trained = trainer(params, tokens, jnp.ones(1))
        difference = np.asarray(trained - sampled, np.float64)
        ratio, gap = np.exp(difference), np.abs(difference)
        return {
            "reward": float(jnp.mean(jnp.all(tokens == right, 1))),
            "mean": float(gap.mean()),
            "quantiles": np.quantile(gap, LEVELS).tolist(),
            "kl": float(np.mean(ratio - 1 - difference)),
            "ratio": [float(ratio.min()), float(ratio.std()), float(ratio.max())],
            "sequence_ratio": float(np.exp(difference.sum(1)).std()),
        }

    return measure


def run(quick: bool) -> Iterator[Row]:
    seeds, steps, sequences = (1, 4, 64) if quick else (SEEDS, STEPS, SEQUENCES)
    programs = {}
    for name, (dtype, loss_scale) in SETUPS.items():
        ways = WAYS if name in ("bfloat16", "float16") and not quick else [USUAL]
        init, step = reinforce.make_step(dtype, loss_scale)
        step = jax.jit(step.__wrapped__, compiler_options=EXACT)
        programs[name] = (init, step), {way: make_measure(dtype, way) for way in ways}
    for seed in range(seeds):
        start = reinforce.pretrain(*jax.random.split(jax.random.key(seed)))
        for name, ((init, step), measures) in programs.items():
            fresh = jax.random.key(seed + 2000)
            before = {way: measure(start, fresh, sequences) for way, measure in measures.items()}
            params, opt_state, history = start, init(start), []
            for key in jax.random.split(jax.random.key(seed + 1000), steps):
                params, opt_state, (reward, sampled, trained) = step(params, opt_state, key)
                gap = jnp.abs(trained - sampled).mean()
                history.append(jax.device_get((reward, gap, jamp.get_grads_finite(opt_state))))
            rewards, means, finite = (np.array(x) for x in zip(*history, strict=True))
            after = {way: measure(params, fresh, sequences) for way, measure in measures.items()}
            row = {"setup": name, "seed": seed, "final_scale": float(jamp.get_loss_scale(opt_state))}
            show(row | {"gap": after[USUAL]["mean"], "reward": after[USUAL]["reward"]})
            row |= {"rewards": rewards.tolist(), "means": means.tolist(), "skipped": np.flatnonzero(~finite).tolist()}
            yield row | {"start": before, "end": after}


if __name__ == "__main__":
    options = parser("benchmarks.accuracy.reinforce", __doc__).parse_args()
    found = record("benchmarks.accuracy.reinforce", options.quick, jax.devices()[0].device_kind) | {"rows": []}
    for row in run(options.quick):
        found["rows"].append(row)
        write(options.json, found)
