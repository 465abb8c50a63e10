"""What `rounding_report` finds: in public models with random weights, and in the sampler and trainer of REINFORCE.

    pip install 'transformers<4.50'
    python -m benchmarks.digits --json docs/benchmarks/digits.json      ten minutes on two cores

1. Models of Hugging Face's Flax classes, small, in bfloat16: the errors, the first row, the rules that bring the error
   of the gradients to a quarter, and the error with them.
2. The mismatch of the log-probabilities of sampler and trainer, and what is left of it if the roundings of one line are
   left out in both.
3. What a report costs: 24 layers, unrolled.
"""

import functools
import importlib
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import jamp
import jamp.debug
from benchmarks.record import Rows, parser, record, show, write
from jamp.debug._errors import Errors
from jamp.debug._program import OFF, ON

KEY = jax.random.key(1)
Case = tuple[Callable[..., Array], tuple[Any, ...]]


def cross_entropy(logits: Array, labels: Array) -> Array:
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1))


def clip(hf: Any) -> Case:
    text = hf.CLIPTextConfig(
        hidden_size=64, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4, vocab_size=500,
        max_position_embeddings=16, eos_token_id=499,
    )  # fmt: skip
    image = hf.CLIPVisionConfig(
        hidden_size=64, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4, image_size=32, patch_size=8
    )
    config = hf.CLIPConfig.from_text_vision_configs(text, image, projection_dim=64)
    model = hf.FlaxCLIPModel(config, seed=0, input_shape=((1, 16), (1, 32, 32, 3)))
    words, images = jax.random.randint(KEY, (16, 16), 0, 499), jax.random.normal(KEY, (16, 3, 32, 32))

    def loss(params: Any, words: Array, images: Array) -> Array:
        logits = model(words, images, params=params).logits_per_image
        return (cross_entropy(logits, jnp.arange(16)) + cross_entropy(logits.T, jnp.arange(16))) / 2

    return loss, (dict(model.params) | {"logit_scale": jnp.log(100.0)}, words, images)  # the trained one


def gpt2(hf: Any) -> Case:
    config = hf.GPT2Config(n_layer=6, n_embd=128, n_head=4, vocab_size=512, n_positions=128)
    model = hf.FlaxGPT2LMHeadModel(config, seed=0, input_shape=(1, 64))
    tokens = jax.random.randint(KEY, (4, 64), 0, 512)
    loss = lambda params, x: cross_entropy(model(x, params=params, train=False).logits[:, :-1], x[:, 1:])
    return loss, (model.params, tokens)


def llama(hf: Any) -> Case:
    config = hf.LlamaConfig(
        vocab_size=500, hidden_size=64, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        max_position_embeddings=512,
    )  # fmt: skip
    model = hf.FlaxLlamaForCausalLM(config, seed=0, input_shape=(1, 16))
    tokens = jax.random.randint(KEY, (2, 256), 0, 499)
    return lambda params, x: cross_entropy(model(x, params=params).logits[:, :-1], x[:, 1:]), (model.params, tokens)


def vit(hf: Any) -> Case:
    config = hf.ViTConfig(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=256, image_size=32, patch_size=8,
        num_labels=10,
    )  # fmt: skip
    model = hf.FlaxViTForImageClassification(config, seed=0, input_shape=(1, 32, 32, 3))
    images = jax.random.normal(KEY, (8, 3, 32, 32))
    loss = lambda params, x, labels: cross_entropy(model(x, params=params).logits, labels)
    return loss, (model.params, images, jnp.arange(8))


def wav2vec2(hf: Any, ctc: Callable[..., Array]) -> Case:
    config = hf.Wav2Vec2Config(
        vocab_size=32, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        conv_dim=(32, 32, 32), conv_stride=(5, 2, 2), conv_kernel=(10, 3, 3), num_feat_extract_layers=3,
        num_codevectors_per_group=32, codevector_dim=32, proj_codevector_dim=32, do_stable_layer_norm=True,
        feat_extract_norm="layer", num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, hidden_dropout=0,
        attention_dropout=0, feat_proj_dropout=0, layerdrop=0,
    )  # fmt: skip
    model = hf.FlaxWav2Vec2ForCTC(config, seed=0, input_shape=(1, 1024))
    sound, labels = jax.random.normal(KEY, (2, 2048)), jnp.tile(jnp.arange(1, 11)[None], (2, 1))

    def loss(params: Any, sound: Array, labels: Array) -> Array:
        logits = model(sound, params=params).logits
        return jnp.mean(ctc(logits, jnp.zeros(logits.shape[:2]), labels, jnp.zeros(labels.shape)))

    return loss, (model.params, sound, labels)


def models(quick: bool) -> Rows:
    hf, optax = map(importlib.import_module, ("transformers", "optax"))
    cases: dict[str, Callable[[], Case]] = {
        "CLIP": functools.partial(clip, hf),
        "GPT-2": functools.partial(gpt2, hf),
        "Llama": functools.partial(llama, hf),
        "ViT": functools.partial(vit, hf),
        "Wav2Vec2, CTC": functools.partial(wav2vec2, hf, optax.ctc_loss),
        "Wav2Vec2, CTC in full_precision": functools.partial(wav2vec2, hf, jamp.full_precision(optax.ctc_loss)),
    }
    rows = []
    for name, make in list(cases.items())[: 1 if quick else None]:
        loss, args = make()
        report = jamp.debug.rounding_report(loss, jnp.bfloat16)(*args)
        first = report.rows[0]
        row = {
            "kind": "model", "model": name, "value": report.value_error, "gradients": report.gradient_error,
            "first": f"{first.scope or first.source.rpartition('> ')[2]}{', backward' * first.backward}",
            "predicted": first.gradient_error, "measured": first.measured[1] if first.measured else None,
        }  # fmt: skip
        if "CTC" not in name:  # The first row of CTC has no name scope.
            rules = report.rules(error=report.gradient_error / 4)
            low, high = (
                jamp.autocast_report(loss, jnp.bfloat16, rules=more)(*args).share_16_bit for more in (rules, None)
            )
            again = jamp.debug.rounding_report(loss, jnp.bfloat16, rules=rules)(*args)
            row |= {"rules": rules, "float32": high - low, "with_rules": again.gradient_error}
        rows.append(row)
        show(row)
    return rows


def sampler(example: Any, params: Any, tokens: Array, dtype: Any) -> Array:
    """The log-probabilities of answers, f32[batch, 8], as `example.sample` computes them: with a cache, in 16 bit."""
    params, n = jamp.cast_floating(params, dtype), example.DIGITS + 1
    layers, width, _ = params["blocks"]["q"].shape
    empty = jnp.zeros((layers, len(tokens), 2 * n - 1, example.HEADS, width // example.HEADS), dtype)
    first, caches = example.forward(params, tokens[:, :n], (empty, empty))

    def step(caches: Any, inputs: Any) -> Any:
        place, token = inputs
        following, caches = example.forward(params, token[:, None], caches, place)
        return caches, following[:, 0]

    _, rest = jax.lax.scan(step, caches, (n + jnp.arange(n - 2), tokens[:, n:-1].T))
    return chosen(jnp.concatenate([first[:, -1:], rest.swapaxes(0, 1)], 1), tokens[:, n:])


def chosen(log_probs: Array, tokens: Array) -> Array:
    return jnp.take_along_axis(log_probs, tokens[..., None], 2)[..., 0]


def mismatch(quick: bool) -> Rows:
    sys.path.append(str(Path(__file__).parents[1] / "examples"))
    example = importlib.import_module("reinforce")
    params = example.pretrain(*jax.random.split(jax.random.key(0)))
    prompts = jnp.repeat(example.solved(jax.random.key(5), example.PROMPTS), example.GROUP, 0)[:, : example.DIGITS + 1]
    tokens = jax.jit(example.sample)(params, prompts, jax.random.key(7))[0]
    n = example.DIGITS
    trainer = lambda params, tokens: chosen(example.forward(params, tokens[:, :-1])[0][:, n:], tokens[:, n + 1 :])
    rows = []
    for dtype in (jnp.bfloat16,) if quick else (jnp.bfloat16, jnp.float16):
        sampled = functools.partial(sampler, example, dtype=dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # The sampler is 16 bit already.
            sides = [Errors(fun, dtype, {}, (params, tokens), {}) for fun in (sampled, trainer)]
        for row in by_line(sides):
            rows.append({"kind": "mismatch", "dtype": jnp.dtype(dtype).name} | row)
            show(rows[-1])
    return rows


def by_line(sides: list[Errors]) -> Rows:
    """The errors of sampler and trainer if one line alone rounds, and their mismatch if all lines but this one do."""
    lines = dict.fromkeys(site.location.line for side in sides for site in side.program.sites)

    def values(kept: set[str]) -> list[Array]:
        on = lambda side: {i: ON if x.location.line in kept else OFF for i, x in enumerate(side.program.sites)}
        return [side.values(on(side))[0] for side in sides]

    mean = lambda x, y: float(jnp.mean(jnp.abs(x - y)))
    exact, everything = values(set()), values(set(lines))
    cases = {"all": (everything, everything)}
    cases |= {line: (values({line}), values(set(lines) - {line})) for line in lines}
    return [
        {"line": line, "sampler": mean(alone[0], exact[0]), "trainer": mean(alone[1], exact[1]), "left": mean(*without)}
        for line, (alone, without) in cases.items()
    ]


def deep(params: list[dict[str, Array]], x: Array) -> Array:
    """A transformer of unrolled layers."""
    for i, p in enumerate(params):
        with jax.named_scope(f"h_{i}"):
            h = jax.nn.standardize(x)
            q, k, v = (jnp.reshape(h @ p[name], (*x.shape[:2], 8, -1)) for name in "qkv")
            scores = jnp.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5
            x = x + jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v).reshape(x.shape) @ p["o"]
            x = x + jax.nn.gelu(jax.nn.standardize(x) @ p["up"]) @ p["down"]
    return jnp.mean(x**2)


def cost(quick: bool) -> Rows:
    """Seconds of a report in a new process, and of its parts once compiled, over a gradient of autocast."""
    rows = []
    for layers, width, batch, length in ((24, 128, 4, 64), (6, 512, 16, 128)):
        rows.append(cost_of(2 if quick else layers, width, batch, length, 1 if quick else 5))
        show(rows[-1])
    return rows


def cost_of(layers: int, width: int, batch: int, length: int, times: int) -> dict[str, Any]:
    keys = iter(jax.random.split(jax.random.key(0), 6 * layers + 1))
    shapes = dict.fromkeys("qkvo", (width, width)) | {"up": (width, 4 * width), "down": (4 * width, width)}
    normal = lambda shape: jax.random.normal(next(keys), shape) * shape[0] ** -0.5
    params = [{name: normal(shape) for name, shape in shapes.items()} for _ in range(layers)]
    x = jax.random.normal(next(keys), (batch, length, width))
    start = time.perf_counter()
    jamp.debug.rounding_report(deep, jnp.bfloat16)(params, x)
    seconds = time.perf_counter() - start
    gradient = jax.jit(jax.grad(jamp.autocast(deep, jnp.bfloat16)))
    errors = Errors(deep, jnp.bfloat16, {}, (params, x), {})
    parts = {
        "gradient": lambda: jax.block_until_ready(gradient(params, x)),
        "run": lambda: errors.of(dict.fromkeys(range(len(errors.program.sites)), ON)),
        "damages": errors.damages,
    }
    row = {name: median(part, times) for name, part in parts.items()}
    # A report is a run with all roundings, two checks, and the damages, which include a run without any.
    row["gradients"] = (3 * row["run"] + row["damages"]) / row["gradient"]
    return {"kind": "cost", "layers": layers, "width": width, "seconds": seconds} | row


def median(fun: Callable[[], Any], times: int) -> float:
    """Seconds, of some calls after the first one."""
    fun()
    found = []
    for _ in range(times):
        start = time.perf_counter()
        fun()
        found.append(time.perf_counter() - start)
    return float(np.median(found))


if __name__ == "__main__":
    options = parser("benchmarks.digits", __doc__).parse_args()
    found = [*cost(options.quick), *mismatch(options.quick), *models(options.quick)]
    packages = ("transformers",)
    write(options.json, record("benchmarks.digits", options.quick, jax.default_backend(), packages) | {"rows": found})
