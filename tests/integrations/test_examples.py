"""examples/: each does what its docstring says. The slow tests run them as a newcomer does, in their own processes."""

import ast
import functools
import importlib
import os
import random
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import orbax.checkpoint as ocp
import pytest
from processes import environment
from trees import bits

ROOT = Path(__file__).resolve().parents[2]
RUNS = ["float32", "float16, unscaled", "float16 with jamp"]


def table(output):
    """That of digits.py: accuracy (%), loss, zero gradients by quarter (%), skipped steps, exponent of the scale."""
    numbers = lambda line: map(float, re.findall(r"[\d.]+(?:e[-+]\d+)?", line.replace("2**", "")))
    [lines] = re.findall("".join(rf"^{name} (.*)\n" for name in RUNS), output, re.MULTILINE)
    return [(accuracy, loss, zeros, skips, scale) for accuracy, loss, *zeros, skips, scale in map(numbers, lines)]


def begin(name, *args, flags="", **smaller):
    """A process that runs an example, without a warning, compiled as XLA does by itself if it computes for long.

    Its constants may be made smaller.
    """
    program = [f"examples/{name}"]
    if smaller:
        program = f"import runpy; main = runpy.run_path('examples/{name}')['main']; "
        program = ["-c", f"{program}main.__globals__.update({smaller}); main()"]
    command = [sys.executable, "-W", "error", *program, *map(str, args)]
    # Gloo prints from threads of its own, in pieces. Buffered, the example's lines come out whole.
    variables = environment(PYTHONUNBUFFERED="", MPLBACKEND="Agg") | {"XLA_FLAGS": flags}
    options = {"cwd": ROOT, "env": variables, "text": True}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def finish(name, *args, **options):
    """What an example prints, and its progress bars."""
    with begin(name, *args, **options) as process:
        output, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    return output, errors


def finish_quickly(name, *args):
    """`finish`, compiled as the tests are: most of such a short run is compilation."""
    return finish(name, *args, flags=os.environ["XLA_FLAGS"])


@pytest.fixture
def run(monkeypatch, capsys):
    """`finish` for an example in this process, made small."""

    def run(name, *args, **smaller):
        example = runpy.run_path(str(ROOT / "examples" / name))  # which becomes argv[0]
        changed = {attribute: functools.partial(example[attribute], **change) for attribute, change in smaller.items()}
        example["main"].__globals__.update(changed)
        monkeypatch.setattr(sys, "argv", [name, *map(str, args)])
        example["main"]()
        return capsys.readouterr()

    return run


def test_every_option_of_an_example_is_explained_and_out_is_a_folder():
    for path in (ROOT / "examples").glob("*.py"):
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        named = {ast.unparse(call.func): call for call in calls}
        assert {k.arg for k in named["argparse.ArgumentParser"].keywords} == {"description"}, path.name
        for call in calls:
            if ast.unparse(call.func) == "parser.add_argument":
                options = {k.arg: ast.unparse(k.value) for k in call.keywords}
                assert "help" in options, path.name
                if ast.literal_eval(call.args[0]) == "--out":
                    assert (options["type"], options["default"]) == ("Path", "Path('out')"), path.name
                    assert "the folder for" in options["help"], path.name


def photo_table(output):
    """That of photo.py: PSNR (dB), loss, skipped steps, exponent of the scale."""
    names = ["float32", "float16 without loss scaling", "float16 with jamp"]
    rows = [re.search(rf"^{name} +(\S+) dB +(\S+) +(\S+) +2\*\*(\S+)$", output, re.MULTILINE) for name in names]
    return [tuple(map(float, row.groups())) for row in rows]


@pytest.mark.slow
def test_photo_shows_progress_and_makes_a_table_and_a_picture(run, tmp_path):
    args = "--steps", 10, "--stride", 16, "--out", tmp_path
    output, progress = run("photo.py", *args, init_params={"sizes": (64, 8, 3)})
    for quality, loss, skipped, _ in photo_table(output):
        assert (quality == pytest.approx(-10 * np.log10(loss), abs=0.02), 0 < loss < 0.2, skipped) == (True, True, 0)
    assert re.search(r"float16 with jamp: 100%.* 10/10 .*PSNR=\S+ dB, scale=2\*\*16]", progress)
    assert matplotlib.image.imread(tmp_path / "photo.png").shape[1::-1] == (1100, 540)


@pytest.mark.slow
def test_photo_with_jamp_is_as_good_as_float32_and_without_it_is_far_worse(tmp_path):
    output, _ = finish("photo.py", "--steps", 30, "--out", tmp_path)
    (float32, *_), (unscaled, *_), (with_jamp, _, skipped, exponent) = photo_table(output)
    assert unscaled < float32 - 3
    assert (abs(with_jamp - float32) < 0.2, skipped, exponent) == (True, 0, 16)


@pytest.mark.slow
def test_digits_shows_progress_and_makes_a_table_and_a_picture(run, tmp_path):
    out = tmp_path / "new" / "folder"
    output, progress = run("digits.py", "--epochs", 4, "--steps", 5, "--out", out, init_params={"sizes": (64, 16, 10)})
    for name, (accuracy, loss, zeros, _, _) in zip(RUNS, table(output), strict=True):
        assert 0 < accuracy <= 100 > max(zeros) >= min(zeros) >= 0
        assert (0 < loss < 3, len(zeros)) == (True, 4)
        # The epochs, of which there are fewer than steps.
        assert re.search(rf"{name}: 100%.* 4/4 .*loss=\S+, scale=2\*\*\d+, skipped=0]", progress)
    assert matplotlib.image.imread(out / "digits.png").shape[:2] == (600, 800)


@pytest.mark.slow
def test_digits_with_jamp_is_as_good_as_float32_and_without_it_gradients_vanish(tmp_path):
    output, progress = finish("digits.py", "--out", tmp_path)
    assert progress.count(" 2000/2000 ") >= len(RUNS)
    accuracies, losses, zeros, skipped, exponents = zip(*table(output), strict=True)
    # "Without loss scaling most gradients vanish in the end, and the training loss stalls several times higher."
    assert zeros[1][0] < zeros[1][-1] > 60
    assert losses[1] > 3 * losses[0]
    # "The test accuracy hardly notices. With jamp nearly no gradient vanishes, and the training loss is float32's."
    assert abs(accuracies[1] - accuracies[0]) <= 1
    assert max(zeros[2]) < 2
    assert losses[2] < 1.5 * losses[0]
    assert abs(accuracies[2] - accuracies[0]) <= 0.5
    assert exponents[2] > 24  # The scale follows the shrinking gradients until they overflow.
    assert (skipped[:2], 1 <= skipped[2] <= 100) == ((0, 0), True)


@pytest.mark.slow
def test_train_compares_four_ways_in_a_table_and_a_picture(tmp_path):
    """`.ci/run` runs it as the README does. Here it takes 40 steps."""
    output, progress = finish("train.py", "--steps", 40, "--out", tmp_path)
    ways = "float32", "bfloat16", "float16", "bfloat16, 8-bit Adam"
    row = r"^{} +(\S+) +(\S+) ms +(\S+) MB +(\S+) MB$"
    rows = [re.search(row.format(way), output, re.MULTILINE).groups() for way in ways]
    losses, _, temporary, states = zip(*(map(float, row) for row in rows), strict=True)
    assert losses == pytest.approx([losses[0]] * 4, rel=0.02)
    assert max(losses) < 3.5  # nats per byte; 5.5 of 256 bytes that are equally likely
    assert max(temporary[1:]) < 0.8 * temporary[0]
    assert states[:3] == (states[0],) * 3
    assert states[3] < 0.6 * states[0]
    for way in ways:
        assert f"{way}: 100%" in progress
    assert matplotlib.image.imread(tmp_path / "train.png").shape[1::-1] == (800, 600)


@pytest.mark.slow
def test_linen_transformer_shows_progress_and_makes_a_picture_and_scalars(run, tmp_path, capsys):
    args = "--steps", 2, "--out", tmp_path, "--logdir", tmp_path / "logs"
    output, progress = run("linen_transformer.py", *args, Transformer={"layers": 1, "width": 16})
    assert re.search(r"100%.* 2/2 .*loss=\d\.\d\d bits, scale=2\*\*16, skipped=0]", progress)
    assert re.match(r"2 steps, 0 skipped: \d\.\d\d bits per byte.", output)
    assert matplotlib.image.imread(tmp_path / "linen_transformer.png").shape[:2] == (600, 800)
    (events,) = (tmp_path / "logs").iterdir()
    for name in (b"loss", b"loss_scale", b"overflow_steps", b"success_rate"):
        assert events.read_bytes().count(b"\x0a" + bytes([len(name)]) + name + b"\x15") == 2  # a float by this name
    with pytest.raises(SystemExit, match="2"):  # which would mix two runs
        run("linen_transformer.py", *args, Transformer={"layers": 1, "width": 16})
    assert "go on with --resume" in capsys.readouterr().err


@pytest.mark.slow
def test_linen_transformer_killed_and_resumed_ends_with_the_bits_of_one_undisturbed(tmp_path):
    def last_checkpoint(name):  # the train state, and the history
        with ocp.CheckpointManager(tmp_path / name / "checkpoints") as manager:
            args = ocp.args.Composite(state=ocp.args.StandardRestore(), about=ocp.args.JsonRestore())
            restored = manager.restore(manager.latest_step(), args=args)
        return bits(restored.state), restored.about["history"]

    start, delay = ("linen_transformer.py", "--steps", 130, "--out"), random.SystemRandom().uniform(0, 1.5)
    with begin(*start, tmp_path / "killed", BATCH=8) as child:
        while not (tmp_path / "killed" / "checkpoints" / "50").exists():
            assert child.poll() is None, child.communicate()[1]
            time.sleep(0.05)
        time.sleep(delay)
        child.kill()
        child.communicate()
    assert child.returncode == -signal.SIGKILL, f"{delay=}"
    finish(*start, tmp_path / "killed", "--resume", BATCH=8)
    finish(*start, tmp_path / "undisturbed", BATCH=8)
    undisturbed = last_checkpoint("undisturbed")
    assert last_checkpoint("killed") == undisturbed, f"{delay=}"
    losses, scales, _ = np.transpose(undisturbed[1])
    assert np.log(256) < losses[0] < 1.5 * np.log(256)
    assert (len(losses), losses[-20:].mean() < 3) == (130, True)
    assert scales[[0, 40, 80]].tolist() == [2.0**16, 2.0**17, 2.0**18]  # a growth every 40 steps


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "processes", "steps"), [(8, 1, 70), (4, 2, 30)])
def test_fsdp_transformer_learns_and_prints_speed_loss_scale_and_agreement(devices, processes, steps):
    run = finish_quickly if steps < 70 else finish  # Two processes compile the same program.
    output, _ = run("fsdp_transformer.py", "--steps", steps, "--devices", devices, "--processes", processes)
    said = rf"{devices} devices in {processes} processes, [\d,]+ tokens per second\n"
    said += r"loss ([\d.]+) -> ([\d.]+), loss scale 2\*\*(\d+)\n"
    found = re.search(said + rf"{devices} devices agreed on all {steps} steps: (\d+) were skipped", output)
    first, last, exponent, skipped = map(float, found.groups())
    assert last < 0.6 * first
    if steps == 70:
        assert (0 < skipped < 10, 16 < exponent < 24) == (True, True)
    else:  # a growth every 5 steps, and no overflow yet
        assert (skipped, exponent) == (0, 22)


@pytest.mark.slow
def test_from_pytorch_learns_the_digits(run):
    output, progress = run("from_pytorch.py", "--epochs", 2)
    (_, _, first), (_, _, last) = re.findall(r"^ +(\d) +(\S+) +(\S+)%$", output, re.MULTILINE)
    assert 60 < float(first) < float(last) > 85
    assert "\n56 steps applied, 0 skipped" in output
    assert re.search(r"100%.* 2/2 .*correct=\S+%, loss=\S+, scale=2\*\*16]", progress)


@pytest.mark.slow
def test_a_frameworks_example_trains_with_a_progress_bar_and_says_how_it_went():
    for name, steps, said in (
        (
            "nnx_resnet.py",
            12,
            r"1 of 12 steps skipped; BatchNorm's statistics are finite\.\nLoss [\d.]+; [\d.]+% of the",
        ),
        ("equinox_mlp.py", 3, r"training loss  skipped\nfloat32 .* 0\nautocast +[\d.]+% +\S+ +\d"),
    ):
        output, progress = finish_quickly(name, "--steps", steps)
        assert re.search(said, output), output
        assert re.search(r"100%.*loss=\S+, scale=2\*\*\d+, skipped=\d+]", progress)


@pytest.mark.slow
def test_in_float32_the_sampler_and_the_trainer_of_reinforce_agree():
    example, key = runpy.run_path(str(ROOT / "examples" / "reinforce.py")), jax.random.key(0)
    params, prompts = example["init_params"](key), example["solved"](key, 4)[:, : example["DIGITS"] + 1]
    tokens, sampled = jax.jit(example["sample"])(params, prompts, key)
    _, trained = jax.jit(example["loss_fn"])(params, tokens, jnp.ones(1))
    assert sampled.std() > 0.1
    np.testing.assert_allclose(sampled, trained, atol=1e-4)


@pytest.mark.slow
def test_reinforce_in_float16_has_a_sixth_of_the_mismatch_of_bfloat16(tmp_path):
    output, progress = finish_quickly("reinforce.py", "--steps", 10, "--out", tmp_path)
    means = [float(re.search(rf"^{name} +(\S+) .* 0$", output, re.MULTILINE)[1]) for name in RUNS[::2]]
    bfloat16 = float(re.search(r"^bfloat16 +(\S+) .* 0$", output, re.MULTILINE)[1])
    assert (means[0] < 1e-5, 6 * means[1] < bfloat16) == (True, True)
    assert re.search(r"float16 with jamp: 100%.* 10/10 .*reward=\S+, skipped=0]", progress)
    assert matplotlib.image.imread(tmp_path / "reinforce.png").shape[:2] == (360, 800)


@pytest.mark.slow
def test_diagnose_finds_both_faults_and_writes_the_pictures(tmp_path):
    text, _ = finish_quickly("diagnose.py", "--steps", 60, "--out", tmp_path)
    source = (ROOT / "examples" / "diagnose.py").read_text().splitlines()
    line = next(i for i, x in enumerate(source, start=1) if "the planted fault" in x)
    said = f"diagnose.py:{line} (layer)", "overflow in float16: value would be", "scan, iteration 1 of 4"
    assert [x for x in (*said, "Found nothing") if x not in text] == []
    plain, default, recommended = map(float, re.search(r"In float16 (\S+)% .* 0, (\S+)% .*, (\S+)% at", text).groups())
    assert plain > 90 > 2 > default > recommended
    written = ["gradient_range.png", "history.csv", "layer_ranges.png", "loss_scale.png"]
    assert sorted(p.name for p in tmp_path.iterdir()) == written
    assert len((tmp_path / "history.csv").read_text().splitlines()) == 61


@pytest.mark.slow
def test_lost_digits_names_the_fault_and_mends_it(tmp_path):
    text, _ = finish_quickly("lost_digits.py", "--out", tmp_path)
    source = (ROOT / "examples" / "lost_digits.py").read_text().splitlines()
    line = lambda part: next(i for i, x in enumerate(source, start=1) if part in x)
    report, decoder, sound = (part.splitlines() for part in re.split("The decoder .*:\n", text))
    first = next(i for i, x in enumerate(report) if x.startswith("operation")) + 1
    assert report[first].endswith(f"lost_digits.py:{line('+ offset')}")
    before, after = (float(re.search(rf"gradients {x}(\d\.\de-\d\d)", text)[1]) for x in ("", "is "))
    assert (before > 0.1, after < 0.02) == (True, True)
    assert decoder[1].startswith("First: ")
    assert decoder[2].endswith(f"lost_digits.py:{line('+ mistake *')} (step)")
    assert sound[0].startswith("The functions agree")
    assert matplotlib.image.imread(tmp_path / "lost_digits.png").shape[:2] == (400, 800)


@pytest.mark.parametrize(("name", "extra"), [("linen", "flax"), ("nnx", "flax"), ("equinox", "equinox")])
def test_a_missing_package_is_an_error_that_names_the_extra(name, extra, monkeypatch):
    for module in {extra, *(module for module in sys.modules if module.startswith(f"{extra}."))}:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, f"jamp.{name}", raising=False)
    with pytest.raises(ImportError, match=rf"pip install 'jamp-jax\[{extra}\]'"):
        importlib.import_module(f"jamp.{name}")
