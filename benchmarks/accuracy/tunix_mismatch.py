"""Reinforcement learning with Tunix: how far the trainer's log-probabilities are from the sampler's.

    pip install google-tunix
    python -m benchmarks.accuracy.tunix_mismatch --json docs/benchmarks/tunix_mismatch.json

A small Qwen3 learns with GRPO (`tests/clients/recipes/tunix_grpo.py`): six ways, five seeds, before training and after
25, 50 and 100 updates.
"""

import numpy as np

from benchmarks.accuracy.intervals import T, interval
from benchmarks.record import parser, record, show, write
from tests.clients.recipes.tunix_grpo import mismatch

WAYS = ("float32", "float16", "bfloat16", "8 bit", "float16 loss", "bfloat16 loss")
SEEDS = range(5)

if __name__ == "__main__":
    options = parser("benchmarks.accuracy.tunix_mismatch", __doc__).parse_args()
    found, rows = record("benchmarks.accuracy.tunix_mismatch", options.quick, "cpu", ("google-tunix",)), []
    for way in WAYS[:2] if options.quick else WAYS:
        for seed in SEEDS[:1] if options.quick else SEEDS:
            for row in mismatch(way, seed):
                rows.append({"way": way, "seed": seed} | row)
                show(rows[-1])
                write(options.json, found | {"rows": rows})
    for way in WAYS:
        apart = np.array([row["mean_abs"] for row in rows if row["way"] == way and row["updates"] == 0])
        if len(apart) in T:
            print("{}, before training: {:.1e} ({:.1e} to {:.1e})".format(way, apart.mean(), *interval(apart)))
