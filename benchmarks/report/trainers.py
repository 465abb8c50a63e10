"""Tables of trainers: what `jamp.scaled` costs, its retries, and the mismatch of Tunix's sampler and trainer."""

from typing import Any

import numpy as np

from benchmarks.report.accuracy import interval
from benchmarks.report.markdown import names, origin, select, table

DEVICES = {"h200": "H200", "tpu": "v5e"}


def steps(found: dict[str, Any]) -> str:
    """Memory, bytes and kernels of a step with `scaled`, beside `loss_scaled` and a step without a scale."""
    head = [f"{DEVICES[found['machine']['device']]}, compiled, not run", "temporary memory: `loss_scaled`", "`scaled`"]
    head += ["`scaled`, `retries=0`", "no scale", "bytes: `scaled`", "no scale", "kernels: `scaled`", "no scale"]
    body = []
    for model in names(found["rows"], "model"):
        rows = {row["variant"]: row for row in select(found["rows"], model=model)}
        ratio = lambda variant, key, rows=rows: f"{rows[variant][f'{key}_ratio']:.2f}"
        memory = [ratio(name, "temporary_megabytes") for name in ("scaled", "scaled, retries=0", "no scale")]
        rest = [ratio(name, key) for key in ("gigabytes", "kernels") for name in ("scaled", "no scale")]
        body.append([model, f"{rows['loss_scaled']['temporary_megabytes'] / 1e3:.2f} GB", *memory, *rest])
    return f"{table(head, body)}\n\n{origin(found)}"


def retries(found: dict[str, Any]) -> str:
    """How many steps tried again, and the held-out loss beside float32's."""
    head = ["task", "steps", "tried again", "twice", "skipped", "held-out loss: float32", "difference, 90 % interval"]
    body = []
    for task in names(found["rows"], "task"):
        low, full = (select(found["rows"], task=task, setup=name) for name in ("float16, scaled", "float32"))
        counts = [", ".join(str(row[key]) for row in low) for key in ("second_tries", "third_tries", "skipped")]
        wide, narrow = (np.array([row["held_out_loss"] for row in rows]) for rows in (full, low))
        apart = "{:+.4f} ({:+.4f} to {:+.4f})".format((narrow - wide).mean(), *interval(narrow - wide))
        body.append([task, str(low[0]["steps"]), *counts, f"{wide.mean():.4f}", apart])
    return f"{table(head, body)}\n\n{origin(found)}"


def mismatch(found: dict[str, Any]) -> str:
    """Mean absolute differences of the log-probabilities of tokens, and the reward, over seeds."""
    head = [
        "in 16 or 8 bit",
        "before training, 90 % interval",
        "after 25 updates",
        "reward after 100, lowest to highest",
    ]
    body = []
    for way in names(found["rows"], "way"):
        rows = {n: select(found["rows"], way=way, updates=n) for n in (0, 25, 100)}
        cells = []
        for n in (0, 25):
            apart = np.array([row["mean_abs"] for row in rows[n]])
            cells.append("{:.1e} ({:.1e} to {:.1e})".format(apart.mean(), *interval(apart)))
        rewards = [row["reward"] for row in rows[100]]
        name = way if way == "float32" else f"{way} alone" if "loss" in way else f"{way}: sampler and loss"
        body.append([name, *cells, f"{np.mean(rewards):.2f} ({min(rewards):.2f} to {max(rewards):.2f})"])
    return f"{table(head, body)}\n\n{origin(found)}"
