"""Which products of a language model stay in 16 bit when it is trained in float8: by the report, or by folklore.

    python -m benchmarks.accuracy.formats --json docs/benchmarks/formats.json

10.8 M parameters, six layers of 384, read bytes of Python's standard library. Four ways:

- bfloat16;
- Float8: every product that the format takes;
- "first and last": Float8, with the first and the last block and the head in bfloat16, as recipes say;
- "rules": Float8 with the rules of `rounding_report`, with the least error for which at least as many FLOPs are
  in 8 bits as with "first and last". The report is made once, after 128 steps in float32 with seed 100 and a batch
  of its own.

Decided before the first result: seeds 0 to 2, 192 steps (which is what one core of a CPU computes in an hour), the loss
of 256 windows that are held out. Differences are taken
seed by seed. "rules" are better than "first and last" if the 90 % interval of the mean difference (Student's t, two
degrees of freedom) is below zero. With three seeds, an interval of both signs says only that the ways are close.
"""

import json
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import jamp
import jamp.debug
from benchmarks import models
from benchmarks.accuracy import text_model
from benchmarks.accuracy.intervals import show_intervals
from benchmarks.accuracy.residuals import on_text
from benchmarks.accuracy.text_model import Study
from benchmarks.record import parser, processor, record, show, write

STUDY = Study(models.Shape(6, 384, 6, 256, 128), batch=4, steps=192, every=64, judged=256, learning_rate=1e-3)
QUICK = replace(text_model.QUICK, shape=models.Shape(3, 128, 2, 256, 128), steps=4)
SEEDS = range(3)
BOUNDS = (0.98, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6, 0.5, 0.4)  # as shares of the error of Float8 everywhere


def folklore(shape: models.Shape) -> dict[str, str]:
    """The first and the last block, and the head, in 16 bit."""
    return {f"*[{scope}]": "accumulate" for scope in ("block_0", f"block_{shape.layers - 1}", "head")}


def chosen(study: Study) -> dict[str, Any]:
    """The rules of each way, with their share of FLOPs in 8 bits and their error, and the curve they come from."""
    steps = 1 if study.steps == QUICK.steps else 128
    _, loss, params, batch = on_text(study, steps, seed=100)
    report = lambda rules: jamp.debug.rounding_report(loss, jamp.Float8(), rules=rules)(params, batch)
    every, first_and_last = report({}), report(folklore(study.shape))
    curve = every.curve([bound * every.gradient_error for bound in BOUNDS])
    enough = [point for point in curve.points if point.share >= first_and_last.share]
    best = min(enough, key=lambda point: point.error)
    in_16_bit = jamp.debug.rounding_report(loss, jnp.bfloat16)(params, batch).gradient_error
    ways = {
        "bfloat16": ({}, 0.0, in_16_bit),
        "Float8": ({}, every.share, every.gradient_error),
        "first and last": (folklore(study.shape), first_and_last.share, first_and_last.gradient_error),
        "rules": (best.rules, best.share, best.error),
    }
    parts = [tuple(x[i : i + 4] for x in batch) for i in range(0, 16, 4)]
    return {
        "alone": {"row": every.rows[0].scope, "measured": every.rows[0].measured},
        "of_parts": [jamp.debug.rounding_report(loss, jamp.Float8())(params, part).gradient_error for part in parts],
        "ways": [
            {"name": name, "rules": rules, "share": share, "gradient_error": error}
            for name, (rules, share, error) in ways.items()
        ],
        "curve": [{"bound": p.bound, "share": p.share, "gradient_error": p.error} for p in curve.points],
    }


if __name__ == "__main__":
    options = parser("benchmarks.accuracy.formats", __doc__).parse_args()
    study = QUICK if options.quick else STUDY
    before = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    found = before or record("benchmarks.accuracy.formats", options.quick, jax.devices()[0].device_kind)
    found = {"processor": processor(), "rows": []} | found
    data, held_out = text_model.text()

    def train(name: str, rules: dict[str, str]) -> None:
        if name != "bfloat16":
            way = partial(jamp.autocast, compute_dtype=jamp.Float8(), rules=rules)
            text_model.FORMATS[name] = way, jamp.NoOpLossScale()
        for seed in list(SEEDS)[:1] if options.quick else SEEDS:
            if not any(row["name"] == name and row["seed"] == seed for row in found["rows"]):
                found["rows"].append(text_model.train(study, name, seed, data, held_out))
                write(options.json, found)
                show(found["rows"][-1])

    for name, rules in {"first and last": folklore(study.shape), "bfloat16": {}, "Float8": {}}.items():
        train(name, rules)
    if "ways" not in found:
        found |= chosen(study)
        write(options.json, found)
    for row in found["ways"]:
        show(row)
    train("rules", found["ways"][-1]["rules"])
    for row in found["ways"]:
        row["losses"] = [x["loss"] for x in found["rows"] if x["name"] == row["name"]]
    write(options.json, found)
    if options.json:
        show_intervals(found["rows"], "first and last", label="name")
