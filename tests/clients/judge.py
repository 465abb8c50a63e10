"""Run one recipe and judge it: `python -m tests.clients.judge NAME RESULT.json`, in the client's environment.

A recipe defines

    train(way)      100 steps with the client's trainer; the loss of each step. `way` is one of WAYS.
    overflow()      Plant an overflow that no scale repairs. Return (parameters before, after, the state or metrics).
    checkpoint()    Return the parameters of an undisturbed run, and of one that was saved with the client's own
                    checkpoints, restored into new objects and continued.
    metrics()       What the client's own hook logged, by name, after at least one skipped step.
    IMPOSSIBLE      For each of these that the client does not allow: why, in a few words.
    MARGIN          How far a way may end from float32, relative: the mean loss of the last 20 steps.
    reported()      Float32 parameters, and a loss of the client as a function of them, by name: "float32..." where
                    the recipe calls autocast, "bfloat16..." in the client's own bfloat16. With more than 4096 tokens,
                    and positions up to 2047 if it has any.
    LINTS           By name, a part of the text of each lint of `jamp.autocast_report` that is true. Default: none.

and, where the client has a model of its own,

    MORE            Further ways of this client, such as its own bfloat16 or its gradient accumulation.
    kept(budget)    The bytes that `jamp.memory_report` counts for the client's decoder at a memory budget, and its
                    gradients.
    losses(n)       The parameters of a decoder with a vocabulary of n words, and losses as functions of them, by name:
                    the client's of "whole logits", the same "in chunks" by `jamp.chunked_sum`, and the client's others.
    decoders()      Float32 parameters, and log-probabilities of tokens as functions of them, by name: in "float32", in
                    the client's own "bfloat16", and the latter with a "float32 head". The head is in a
                    `jax.named_scope("head")`.
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
import jax.numpy as jnp
import numpy as np

import jamp

WAYS = {
    "float32": "as the client is",
    "float16": "jamp.scaled around an autocast loss, or a loss scale",
    "bfloat16": "jamp.autocast",
    "8 bit": "jamp.autocast with Float8()",
    "bfloat16 parameters": "jamp.stochastic_rounding, and no float32 masters",
}
BUDGETS = 1.0, 0.5, 0.25
VOCABULARY = 32_768


def equal(one, other):
    """Whether two trees of arrays are equal bit for bit."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.array_equal(np.asarray(x), np.asarray(y), equal_nan=True) for x, y in pairs)


def assert_close(one, other, rtol, atol):
    """Whether two trees of arrays are equal but for rounding. `atol` is relative to the largest number of an array."""
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=atol * np.abs(x).max())


def distance(one, other):
    """The norm of the difference of two trees of arrays, relative to the norm of the second."""
    norm = lambda tree: np.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for x in jax.tree.leaves(tree)))
    one, other = jax.device_get((jax.tree.leaves(one), jax.tree.leaves(other)))
    return norm([x - y for x, y in zip(one, other, strict=True)]) / norm(other)


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
        assert_close(grads[0], other, rtol=1e-3, atol=1e-5)
    megabytes = ", ".join(f"{nbytes / 1e6:.2f}" for nbytes in kept)
    return f"{megabytes} MB kept at budgets of {', '.join(map(str, BUDGETS))}"


def chunks(recipe):
    """The client's loss of whole logits, and in chunks: equal but for rounding, and less temporary memory."""
    params, losses = recipe.losses(VOCABULARY)
    compiled = {name: jax.jit(jax.value_and_grad(loss)).lower(params).compile() for name, loss in losses.items()}
    temporary = {name: x.memory_analysis().temp_size_in_bytes for name, x in compiled.items()}
    print(f"  temporary memory: {temporary}", flush=True)
    assert temporary["in chunks"] < temporary["whole logits"], temporary
    (loss, grads), (chunked_loss, chunked_grads) = (compiled[name](params) for name in ("whole logits", "in chunks"))
    assert_close(loss, chunked_loss, rtol=1e-5, atol=0)
    assert_close(grads, chunked_grads, rtol=1e-5, atol=1e-5)
    megabytes = ", ".join(f"{name} {nbytes / 1e6:.0f} MB" for name, nbytes in temporary.items())
    return f"temporary memory with {VOCABULARY:,} words: {megabytes}"


def raised(recipe):
    """A rule for the head of the client's own bfloat16: its product is float32, as in a model with a float32 head."""
    params, decoders = recipe.decoders()
    ruled = {}
    for category in ("accumulate", "float32"):
        rule = {"dot_general[head]": category}
        rows = jamp.autocast_report(decoders["bfloat16"], jnp.bfloat16, rules=rule)(params).rows
        of_head = [row for row in rows if row.operation == "dot_general[head]"]
        assert any("bfloat16" in row.before and row.after.endswith("-> float32") for row in of_head), of_head
        assert {row.category for row in of_head} == {category}, of_head
        ruled[f"rule {category}"] = jamp.autocast(decoders["bfloat16"], jnp.bfloat16, rules=rule)
    # Else XLA leaves out roundings of 16-bit code, in each program others.
    options = {"xla_allow_excess_precision": False}

    def results(log_probs):
        loss = lambda params: (lambda x: (-x.mean(), x))(log_probs(params).astype(jnp.float32))
        grads, found = jax.jit(jax.grad(loss, has_aux=True), compiler_options=options)(params)
        return {"log-probabilities": found, "gradients": grads}

    found = {name: results(log_probs) for name, log_probs in (decoders | ruled).items()}
    lines = []
    for what in ("log-probabilities", "gradients"):
        for other in ("float32 head", "float32"):
            apart = {name: distance(found[name][what], found[other][what]) for name in ("bfloat16", *ruled)}
            assert apart["bfloat16"] < 0.05, apart
            # Under "accumulate", the cotangent is rounded as before.
            bound = {"log-probabilities": 1.0, "gradients": 1.1}[what] * apart["bfloat16"]
            assert all(apart[name] < bound for name in ruled), apart  # False for NaN
            numbers = ", ".join(f"{name} {x:.3g}" for name, x in apart.items())
            lines.append(f"{what} from {other}, relative: {numbers}")
    return f"\n{'':21}".join(lines)


def linted(recipe):
    """The lints of each loss and of its gradient are those that the recipe expects."""
    counts = {}
    for name, (params, loss) in recipe.reported().items():
        is_own, found = name.startswith("bfloat16"), {}
        for dtype in (jnp.bfloat16,) if is_own else (jnp.bfloat16, jnp.float16, jamp.Float8()):
            for fun in (loss, jax.grad(loss if is_own else jamp.autocast(loss, dtype))):
                report = jamp.autocast_report(fun, dtype)(params)
                assert not is_own or any("bfloat16" in row.before for row in report.rows), f"{name} is in float32"
                found |= dict.fromkeys(report.lints)
        for text in found:
            print(f"  lint, {name}: {text}", flush=True)
        true = getattr(recipe, "LINTS", {}).get(name, ())
        assert all(any(part in text for part in true) for text in found), (name, found)
        assert all(any(part in text for text in found) for part in true), (name, true, found)
        counts[name] = len(found)
    return ", ".join(f"{name} {n}" for name, n in counts.items())


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
    checks["lints"] = linted(recipe)
    if hasattr(recipe, "kept"):
        checks["memory"] = memory(recipe)
    if hasattr(recipe, "losses"):
        checks["losses in chunks"] = chunks(recipe)
    if hasattr(recipe, "decoders"):
        checks["rule for the head"] = raised(recipe)
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
