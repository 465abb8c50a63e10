"""The page for those who come from MindSpore: its programs run, and both sides of each translation agree."""

import ast
import inspect
import re
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml
from steps import with_masters

import jamp

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "from-mindspore.md").read_text()
EXAMPLE = ROOT / "tests" / "requirements" / "002_adaptive_loss_scaling.py"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
PROGRAMS = [text for language, text in BLOCKS if language == "python"]
THEIRS = [text for text in PROGRAMS if re.search("^(import|from) mind", text, re.MULTILINE)]
OURS = [text for text in PROGRAMS if text not in THEIRS]
[DOCUMENT] = [text for language, text in BLOCKS if language == "yaml"]

WINDOWS = jamp.AdaptiveLossScale().window_list

pytestmark = pytest.mark.promotes("optax.adam, and optax.apply_updates to float16 parameters")


def run_program(text, variables):
    exec(compile(text.replace("np.arange(1025)", "np.arange(65)"), "from-mindspore.md", "exec"), variables)  # shorter
    return variables


@pytest.fixture(scope="module")
def after(tmp_path_factory):
    """The variables after each of jamp's programs on the page, which run one after the other."""
    assert (len(THEIRS), len(OURS), "".join(OURS).count("np.arange(1025)")) == (2, 4, 1)
    directory, variables = tmp_path_factory.mktemp("page"), {}
    (directory / "run_pangualpha.yaml").write_text(DOCUMENT)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        return [dict(run_program(text, variables)) for text in OURS]


def cell_arguments(program):
    """The arguments of the one AdaptiveLossScaleUpdateCell that a MindSpore program makes, as a mapping."""
    names = ["loss_scale_value", "scale_factor", "scale_window", "max_scale_window", "min_scale_window"]
    calls = [node for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Call)]
    [call] = [node for node in calls if ast.unparse(node.func).endswith("AdaptiveLossScaleUpdateCell")]
    given = dict(zip(names, call.args, strict=False)) | {word.arg: word.value for word in call.keywords}
    numbers = {name: eval(ast.unparse(node)) for name, node in given.items()}
    return {"type": "AdaptiveLossScaleUpdateCell"} | numbers


@pytest.mark.slow
def test_the_translations_agree_and_every_argument_in_the_table_exists(after):
    for theirs, ours, scale in zip(THEIRS, after, (2**12, 1), strict=False):
        translated = jamp.loss_scale_from_config(cell_arguments(theirs))
        assert translated == ours["manager"] == jamp.AdaptiveLossScale(scale, initial_window=20)
    described = jamp.AdaptiveLossScale(windows=(1, *WINDOWS), initial_window=20)
    assert described.window_list == (1, *WINDOWS)
    assert ", ".join(map(str, WINDOWS)) in " ".join(PAGE.split())
    names = {word.strip().rstrip("=") for word in re.search(r"`AdaptiveLossScale\((.*?)\)`", PAGE)[1].split(",")}
    assert names <= set(inspect.signature(jamp.AdaptiveLossScale).parameters)


def test_the_mindspore_program_takes_the_steps_of_momentum_and_grows_at_the_20th(after):
    names = "params", "opt_state", "train_network", "x", "labels"
    params, opt_state, train_network, *batch = (after[0][name] for name in names)
    # Every output is 16 against a label of 1, each weight serves 10 of the 100 outputs: a gradient of 3, times 0.1.
    assert float(after[0]["loss"]) == 225.0
    momentum, weight = 3.0, 0.7
    for step in range(2, 41):
        np.testing.assert_allclose(params["weight"], weight, rtol=1e-4)
        params, opt_state, _ = train_network(params, opt_state, *batch)
        momentum = 0.9 * momentum + 0.2 * (16 * weight - 1)
        weight -= 0.1 * momentum
        assert bool(jamp.get_grads_finite(opt_state))
        assert float(jamp.get_loss_scale(opt_state)) == 2.0**12 * 2 ** (step // 20)


def test_the_mindformers_program_trains_from_a_scale_of_1_and_resuming_keeps_it(after):
    losses, opt_state = after[1]["losses"], after[1]["opt_state"]
    assert (len(losses), losses[-1] < 0.01 * losses[0]) == (128, True)
    # 20, 20, 20, 30, 30 steps: 128 steps hold five growths.
    assert (float(jamp.get_loss_scale(opt_state)), int(opt_state.loss_scale_state.window_index)) == (2.0**5, 1)
    assert float(jamp.get_loss_scale(after[3]["opt_state"])) == 2.0**18
    tx, params, opt_state = (after[3][name] for name in ("tx", "params", "opt_state"))
    assert jax.tree.structure(opt_state) == jax.tree.structure(tx.init(params))


def test_the_yaml_block_is_taken_as_it_stands_and_clipping_sees_the_true_gradients(after):
    expected = jamp.AdaptiveLossScale(2**32, 2, min_window=20, max_window=1000, initial_window=20)
    document = yaml.safe_load(DOCUMENT)
    with pytest.warns(UserWarning, match="use_clip_grad"):
        assert after[2]["loss_scale"] == expected == jamp.loss_scale_from_config(document)
    assert runpy.run_path(EXAMPLE)["CONFIG"] == document
    assert float(jamp.get_loss_scale(after[2]["opt_state"])) == 2.0**32
    tx, params = after[2]["tx"], {"w": jnp.zeros(2)}
    grads = jamp.grad(lambda p: 30.0 * p["w"][0] + 40.0 * p["w"][1], tx.init(params))(params)
    updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    np.testing.assert_allclose(updates["w"], [-0.06, -0.08], rtol=1e-6)  # 0.1 of the gradient at norm 1, not at 2**32


@pytest.mark.filterwarnings("ignore:float16 parameters without a master copy")
@pytest.mark.slow
def test_full_16_bit_training_keeps_float32_in_the_optimizer_trains_and_recovers(after):
    page, runs = after[1], {}
    for wrap in (jamp.loss_scaled, with_masters):
        for start in (2.0**12, 2.0**40):  # 2^40 is far too high
            tx = wrap(optax.adam(1e-2), jamp.AdaptiveLossScale(start))
            train_network, losses = page["make_train_network"](page["loss_fn"], tx), []
            params = jamp.cast_floating(page["initial"], jnp.float16)
            opt_state = tx.init(params)
            for _ in range(128):
                params, opt_state, loss = train_network(params, opt_state, page["input_ids"])
                losses.append(loss)
            runs[wrap.__name__, start] = params, opt_state, losses
        stats = jamp.get_stats(opt_state)
        assert 5 < int(stats.overflow_steps) < 40
        scale = 2.0 ** (40 + int(stats.increases) - int(stats.overflow_steps))
        assert float(jamp.get_loss_scale(opt_state)) == scale
    for (name, _), (params, opt_state, losses) in runs.items():
        assert {x.dtype.name for x in jax.tree.leaves(params)} == {"float16"}
        inner = [x for x in jax.tree.leaves(opt_state.inner_state) if jnp.issubdtype(x.dtype, jnp.floating)]
        # Adam's two moments of two parameters, and the masters
        assert [x.dtype.name for x in inner] == ["float32"] * (6 if name == "with_masters" else 4)
        assert losses[-1] < 0.01 * losses[0]
