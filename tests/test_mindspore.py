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

pytestmark = pytest.mark.promotes("optax.adam, and optax.apply_updates to float16 parameters")


def run_program(text, variables):
    exec(compile(text.replace("np.arange(1025)", "np.arange(65)"), "from-mindspore.md", "exec"), variables)  # shorter
    return variables


@pytest.fixture(scope="module")
def after(tmp_path_factory):
    """The variables after each of jamp's programs on the page but the last, which run one after the other."""
    assert (len(THEIRS), len(OURS), "".join(OURS).count("np.arange(1025)")) == (2, 6, 1)
    directory, variables = tmp_path_factory.mktemp("page"), {}
    (directory / "run_pangualpha.yaml").write_text(DOCUMENT)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        return [dict(run_program(text, variables)) for text in OURS[:-1]]


def cell_arguments(program):
    """The arguments of the one AdaptiveLossScaleUpdateCell that a MindSpore program makes, as a mapping."""
    names = ["loss_scale_value", "scale_factor", "scale_window", "max_scale_window", "min_scale_window"]
    calls = [node for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Call)]
    [call] = [node for node in calls if ast.unparse(node.func).endswith("AdaptiveLossScaleUpdateCell")]
    given = dict(zip(names, call.args, strict=False)) | {word.arg: word.value for word in call.keywords}
    given = {name: eval(compile(ast.Expression(node), "", "eval")) for name, node in given.items()}
    return {"type": "AdaptiveLossScaleUpdateCell"} | given


def test_the_translations_of_the_programs_loss_scales_agree(after):
    for theirs, ours, scale in zip(THEIRS, after, (2**12, 1), strict=False):
        expected = jamp.AdaptiveLossScale(scale, initial_window=20)
        assert jamp.loss_scale_from_config(cell_arguments(theirs)) == ours["manager"] == expected


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
    losses, opt_state = after[1]["losses"], after[1]["opt_state"]
    assert len(losses) == 128
    assert losses[-1] < 0.01 * losses[0]
    # 20, 20, 20, 30, 30 steps: 128 steps hold five growths.
    assert (float(jamp.get_loss_scale(opt_state)), int(opt_state.loss_scale_state.window_index)) == (2.0**5, 1)


def test_the_yaml_block_is_taken_as_it_stands_and_clipping_sees_the_true_gradients(after):
    expected = jamp.AdaptiveLossScale(2**32, 2, min_window=20, max_window=1000, initial_window=20)
    assert after[2]["loss_scale"] == expected == jamp.loss_scale_from_config(yaml.safe_load(DOCUMENT))
    assert float(jamp.get_loss_scale(after[2]["opt_state"])) == 2.0**32
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


@pytest.mark.slow
def test_full_16_bit_training_keeps_float32_in_the_optimizer_trains_and_recovers(after):
    variables = run_program(OURS[-1], dict(after[-1]))
    runs = {"rounded": variables["rounded"], "with_masters": variables["with_masters"]}
    for wrap in (jamp.loss_scaled, jamp.mixed_precision):  # from a scale that is far too high
        tx = wrap(optax.adam(1e-2), jamp.AdaptiveLossScale(2.0**40))
        runs[wrap.__name__] = _, opt_state, _ = variables["train_in_half"](tx)
        stats = jamp.get_stats(opt_state)
        assert 5 < int(stats.overflow_steps) < 40
        scale = 2.0 ** (40 + int(stats.increases) - int(stats.overflow_steps))
        assert float(jamp.get_loss_scale(opt_state)) == scale
    for name, (params, opt_state, losses) in runs.items():
        assert {x.dtype.name for x in jax.tree.leaves(params)} == {"float16"}
        inner = [x for x in jax.tree.leaves(opt_state.inner_state) if jnp.issubdtype(x.dtype, jnp.floating)]
        # Adam's two moments of two parameters, and the masters
        assert [x.dtype.name for x in inner] == ["float32"] * (6 if name in ("with_masters", "mixed_precision") else 4)
        assert losses[-1] < 0.01 * losses[0]


def test_every_argument_in_the_table_of_the_page_exists():
    row = re.search(r"`AdaptiveLossScale\((.*?)\)`", PAGE)[1]
    names = {word.strip().rstrip("=") for word in row.split(",")}
    assert names <= set(inspect.signature(jamp.AdaptiveLossScale).parameters)
    mapped = {"type": "DynamicLossScaleUpdateCell", "loss_scale_value": 8, "scale_factor": 4, "scale_window": 3}
    assert jamp.loss_scale_from_config(mapped) == jamp.DynamicLossScale(
        init_scale=8, growth_factor=4, backoff_factor=1 / 4, growth_interval=3, max_scale=math.inf
    )
