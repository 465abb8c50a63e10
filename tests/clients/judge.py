"""Run one recipe and judge it: `python -m tests.clients.judge NAME RESULT.json`, in the client's environment.

A recipe defines

    train(way)      100 steps with the client's trainer; the loss of each step. `way` is one of WAYS.
    overflow()      Plant an overflow that no scale repairs. Return (parameters before, after, the state or metrics).
    checkpoint()    Return the parameters of an undisturbed run, and of one that was saved with the client's own
                    checkpoints, restored into new objects and continued.
    metrics()       What the client's own hook logged, by name, after at least one skipped step.
    IMPOSSIBLE      For each of these that the client does not allow: why, in a few words.
    MARGIN          How far a way may end from float32, relative: the mean loss of the last 20 steps.

and, where the client has a model of its own,

    MORE            Further ways of this client, such as its own bfloat16 or its gradient accumulation.
    kept(budget)    The bytes that `jamp.memory_report` counts for the client's decoder at a memory budget, and its
                    gradients.
"""

import importlib
import json
import platform
import sys
import time
import tomllib
from importlib.metadata import version
from pathlib import Path

import jax
import numpy as np

WAYS = {
    "float32": "as the client is",
    "float16": "jamp.scaled around an autocast loss, or a loss scale",
    "bfloat16": "jamp.autocast",
    "8 bit": "jamp.autocast with Float8()",
    "bfloat16 parameters": "jamp.stochastic_rounding, and no float32 masters",
}
BUDGETS = 1.0, 0.5, 0.25


def equal(one, other):
    """Whether two trees of arrays are equal bit for bit."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.array_equal(np.asarray(x), np.asarray(y), equal_nan=True) for x, y in pairs)


def trainings(recipe, impossible):
    """A line for each way, and its relative difference from float32."""
    reference, exact = None, None
    for way in (way for way in (*WAYS, *getattr(recipe, "MORE", ())) if way not in impossible):
        started = time.monotonic()
        losses = np.asarray(recipe.train(way), np.float64)
        assert losses.shape == (100,), losses.shape
        assert np.isfinite(losses).all(), (way, losses)
        first, last = losses[:5].mean(), losses[-20:].mean()
        reference, exact = (last, losses) if reference is None else (reference, exact)
        assert way == "float32" or not np.array_equal(losses, exact), f"{way} computes what float32 computes"
        apart = last / reference - 1
        assert way == "float32" or abs(apart) <= recipe.MARGIN, (way, last, reference)
        assert last < first, (way, first, last)
        yield way, apart, f"{way:20} {first:8.4f} to {last:8.4f}  {100 * apart:+6.2f} %"
        print(f"  {way}: {time.monotonic() - started:.0f} s", flush=True)


def memory(recipe):
    """What is kept for the backward pass at each budget. The gradients are the same but for rounding."""
    kept, grads = zip(*map(recipe.kept, BUDGETS), strict=True)
    assert all(nbytes <= budget * kept[0] for nbytes, budget in zip(kept, BUDGETS, strict=True)), kept
    for other in grads[1:]:
        for x, y in zip(jax.tree.leaves(grads[0]), jax.tree.leaves(other), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5 * np.abs(x).max())
    megabytes = ", ".join(f"{nbytes / 1e6:.2f}" for nbytes in kept)
    return f"{megabytes} MB kept at budgets of {', '.join(map(str, BUDGETS))}"


def judge(recipe, impossible):
    """The lines to show and the facts behind them."""
    apart, lines = {}, ["                     loss of the first 5 and the last 20 steps, from float32"]
    for way, ratio, line in trainings(recipe, impossible):
        apart[way] = ratio
        lines.append(line)
    checks = {}
    if "overflow" not in impossible:
        before, after, skipped = recipe.overflow()
        assert equal(before, after)
        assert int(skipped) == 1, skipped
        checks["overflow"] = "1 step skipped, parameters as before"
    if "checkpoint" not in impossible:
        undisturbed, continued = recipe.checkpoint()
        assert equal(undisturbed, continued)
        checks["checkpoint"] = "saved, restored and continued: equal bit for bit"
    if "metrics" not in impossible:
        logged = {name: float(value) for name, value in recipe.metrics().items()}
        assert logged["overflow_steps"] >= 1, logged
        checks["metrics"] = ", ".join(f"{name} {logged[name]:g}" for name in ("overflow_steps", "finite_steps"))
    if hasattr(recipe, "kept"):
        checks["memory"] = memory(recipe)
    lines += [f"{name:20} {text}" for name, text in checks.items()]
    lines += [f"{name:20} not possible: {why}" for name, why in impossible.items()]
    return lines, {"from_float32": apart, "checks": checks, "impossible": impossible}


def main(name, result):
    """Run a recipe, print what it gave and write it."""
    client = tomllib.loads((Path(__file__).parent / "clients.toml").read_text())[name]
    recipe = importlib.import_module(f"tests.clients.recipes.{name}")
    started = time.monotonic()
    title = (
        f"{client['package']} {version(client['package'])}, jax {jax.__version__}, Python {platform.python_version()}"
    )
    lines, facts = judge(recipe, getattr(recipe, "IMPOSSIBLE", {}))
    output = "\n".join([title, *lines]) + "\n"
    print(output, end="")
    row = {"output": output, "seconds": round(time.monotonic() - started)}
    Path(result).write_text(json.dumps(row | facts) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
