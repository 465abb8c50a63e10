"""The page for those who come from MindSpore: its programs run, and both sides of each translation agree."""

import ast
import inspect
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml

import jamp

PAGE = (Path(__file__).parents[1] / "docs" / "from-mindspore.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
PROGRAMS = [text for language, text in BLOCKS if language == "python"]
THEIRS = [text for text in PROGRAMS if re.search("^(import|from) mind", text, re.MULTILINE)]
OURS = [text for text in PROGRAMS if text not in THEIRS]
[DOCUMENT] = [text for language, text in BLOCKS if language == "yaml"]


@pytest.fixture(scope="module")
def after(tmp_path_factory):
    """The variables after each of jamp's programs on the page, which run one after the other."""
    directory, variables, history = tmp_path_factory.mktemp("page"), {}, []
    (directory / "run_pangualpha.yaml").write_text(DOCUMENT)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        for text in OURS:
            exec(compile(text, "from-mindspore.md", "exec"), variables)
            history.append(dict(variables))
    return history


def cell_arguments(program):
    """The arguments of the one AdaptiveLossScaleUpdateCell that a MindSpore program makes, as a mapping."""
    names = ["loss_scale_value", "scale_factor", "scale_window", "max_scale_window", "min_scale_window"]
    [call] = [
        node
        for node in ast.walk(ast.parse(program))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("AdaptiveLossScaleUpdateCell")
    ]
    value = lambda node: eval(compile(ast.Expression(node), "", "eval"))
    given = {name: value(node) for name, node in zip(names, call.args, strict=False)}
    return {"type": "AdaptiveLossScaleUpdateCell"} | given | {word.arg: value(word.value) for word in call.keywords}


def test_the_page_has_both_programs_and_the_translations_of_their_loss_scales_agree(after):
    assert (len(THEIRS), len(OURS)) == (2, 6)
    for theirs, ours in zip(THEIRS, after, strict=False):
        assert jamp.loss_scale_from_config(cell_arguments(theirs)) == ours["manager"]
    assert after[0]["manager"] == jamp.AdaptiveLossScale(2**12, initial_window=20)
    assert after[1]["manager"] == jamp.AdaptiveLossScale(1, initial_window=20)


def test_the_mindspore_program_takes_the_steps_of_momentum_and_grows_at_the_20th(after):
    variables = after[0]
    # Every output is 16 against a label of 1, each weight serves 10 of the 100 outputs: a gradient of 3, times 0.1.
    assert float(variables["loss"]) == 225.0
    np.testing.assert_allclose(variables["params"]["weight"], 0.7, rtol=1e-6)
    params, opt_state, momentum, weight = variables["params"], variables["opt_state"], 3.0, 0.7
    for step in range(2, 41):
        params, opt_state, _ = variables["train_network"](params, opt_state, variables["x"], variables["labels"])
        momentum = 0.9 * momentum + 0.2 * (16 * weight - 1)
        weight -= 0.1 * momentum
        assert bool(jamp.get_grads_finite(opt_state))
        assert float(jamp.get_loss_scale(opt_state)) == 2.0**12 * 2 ** (step // 20)
    np.testing.assert_allclose(params["weight"], weight, rtol=1e-4)


def test_the_mindformers_program_trains_in_float16_from_a_scale_of_1(after):
    variables = after[1]
    assert len(variables["losses"]) == 128
    assert variables["losses"][-1] < 0.01 * variables["losses"][0]
    # 20, 20, 20, 30, 30 steps: 128 steps hold five growths.
    assert float(jamp.get_loss_scale(variables["opt_state"])) == 2.0**5
    assert int(variables["opt_state"].loss_scale_state.window_index) == 1


def test_the_yaml_block_of_mindformers_is_taken_as_it_stands(after):
    document = yaml.safe_load(DOCUMENT)
    assert document == {
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
    expected = jamp.AdaptiveLossScale(2**32, 2, min_window=20, max_window=1000, initial_window=20)
    assert after[2]["loss_scale"] == expected == jamp.loss_scale_from_config(document)
    assert float(jamp.get_loss_scale(after[2]["opt_state"])) == 2.0**32


def test_clipping_in_the_chain_sees_the_true_gradients(after):
    tx, params = after[2]["tx"], {"w": jnp.zeros(2)}
    opt_state = tx.init(params)
    grads = jamp.grad(lambda p: 30.0 * p["w"][0] + 40.0 * p["w"][1], opt_state)(params)
    updates, _ = jax.jit(tx.update)(grads, opt_state, params)
    np.testing.assert_allclose(updates["w"], [-0.06, -0.08], rtol=1e-6)  # 0.1 of the gradient at norm 1, not at 2**32


def test_resuming_keeps_the_scale(after):
    assert float(jamp.get_loss_scale(after[3]["opt_state"])) == 2.0**18
    assert float(jamp.get_loss_scale(after[4]["opt_state"])) == 2.0**16
    new = after[4]["tx"].init(after[4]["params"])
    assert jax.tree.structure(after[4]["opt_state"]) == jax.tree.structure(new)


@pytest.mark.parametrize("run", ["rounded", "with_masters"])
def test_full_16_bit_training_keeps_float32_in_the_optimizer_and_trains(after, run):
    params, opt_state, losses = after[5][run]
    assert {x.dtype.name for x in jax.tree.leaves(params)} == {"float16"}
    inner = [x for x in jax.tree.leaves(opt_state.inner_state) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert len(inner) == (4 if run == "rounded" else 6)  # Adam's two moments of two parameters, and the masters
    assert {x.dtype.name for x in inner} == {"float32"}
    assert losses[-1] < 0.01 * losses[0]


@pytest.mark.parametrize("wrap", [jamp.loss_scaled, jamp.mixed_precision])
def test_full_16_bit_training_recovers_from_a_scale_that_is_far_too_high(after, wrap):
    _, opt_state, losses = after[5]["train_in_half"](wrap(optax.adam(1e-2), jamp.AdaptiveLossScale(2.0**40)))
    stats = jamp.get_stats(opt_state)
    assert 5 < int(stats.overflow_steps) < 40
    assert float(jamp.get_loss_scale(opt_state)) == 2.0 ** (40 + int(stats.increases) - int(stats.overflow_steps))
    assert losses[-1] < 0.01 * losses[0]


def test_every_argument_in_the_table_of_the_page_exists():
    [row] = re.findall(r"`AdaptiveLossScale\((.*?)\)`", PAGE)[:1]
    assert {word.strip().rstrip("=") for word in row.split(",")} <= set(
        inspect.signature(jamp.AdaptiveLossScale).parameters
    )
    mapped = {"type": "DynamicLossScaleUpdateCell", "loss_scale_value": 8, "scale_factor": 4, "scale_window": 3}
    assert jamp.loss_scale_from_config(mapped) == jamp.DynamicLossScale(
        init_scale=8, growth_factor=4, backoff_factor=1 / 4, growth_interval=3, max_scale=math.inf
    )
