"""The speed of 16-bit matrix products on this machine, and a recommendation: `python -m jamp.doctor`."""

import platform
import re
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["report"]
__dir__ = lambda: __all__

_DTYPES = ("float16", "bfloat16", "float32")
_PACKAGES = ("jamp-jax", "jax", "jaxlib", "optax", "flax", "equinox", "numpy")
_FASTER = 1.2  # times float32. Below that 16 bit is not worth using.
_FLOAT8_SINCE = 8.9  # the compute capability of the first NVIDIA GPUs with float8 products
_FLOAT8 = (
    "For jamp.Float8 on this GPU, compile with "
    'jax.jit(step, compiler_options={"xla_gpu_enable_triton_gemm": False}), or set '
    "XLA_FLAGS=--xla_gpu_enable_triton_gemm=false. Without it XLA tries many Triton kernels for each float8 product, "
    "and may compile for more than a minute. 16-bit products may take longer with it."
)

_ROW = lambda m: m.arange(1, 5, dtype="float32")
# Operations in JAX or in NumPy. Small integers are exact in the products of every device.
_EAGER: dict[str, Callable[[ModuleType], Any]] = {
    "sqrt": lambda m: m.sqrt(m.float32(512)),
    "ones + 1": lambda m: m.ones(4, "float32") + 1,
    "add": lambda m: m.add(_ROW(m), _ROW(m)),
    "subtract": lambda m: m.subtract(_ROW(m), m.float32(2)),
    "multiply": lambda m: m.multiply(_ROW(m), _ROW(m)),
    "divide": lambda m: m.divide(_ROW(m), m.float32(3)),
    "exp": lambda m: m.exp(_ROW(m)),
    "log": lambda m: m.log(_ROW(m)),
    "tanh": lambda m: m.tanh(_ROW(m)),
    "maximum": lambda m: m.maximum(_ROW(m), m.float32(2)),
    "where": lambda m: m.where(_ROW(m) > 2, _ROW(m), m.float32(0)),
    "sum": lambda m: m.sum(_ROW(m)),
    "cumsum": lambda m: m.cumsum(_ROW(m)),
    "matmul": lambda m: m.matmul(m.reshape(_ROW(m), (2, 2)), m.reshape(_ROW(m), (2, 2))),
    "astype": lambda m: _ROW(m).astype("float16").astype("float32"),
}
_WRONG = (
    "WRONG RESULTS on {device} outside jit: {names}. The first is {got}, and NumPy gives {expected}. "
    "jamp.debug.find_nonfinite and other tools that run operation by operation may blame the wrong line there. JAX "
    "0.11.0 and 0.11.1 have such a bug on some GPUs (github.com/jax-ml/jax/issues/40633). Use another version of JAX, "
    'or search on the CPU: jax.device_put(args, jax.devices("cpu")[0]).'
)


def report(seconds: float = 1.0) -> str:
    """Report versions, devices, which 16-bit dtypes are native, the speed of matrix products and a recommendation.

    It also compares a few operations outside `jit` with NumPy on each kind of local device, and says so if they differ.

    Args:
      seconds: The time to measure, in seconds, without compilation.

    Returns:
      A text of about fifteen lines.

    Examples:
      >>> import jamp.doctor
      >>> "bfloat16" in jamp.doctor.report(seconds=0.01)
      True
    """
    devices = jax.devices()
    native = {dtype: _is_native(dtype) for dtype in _DTYPES}
    speed = _speeds(seconds)
    rows = [
        f"  {dtype:8s}  {speed[dtype] / 1e12:8.3f} TFLOP/s  {speed[dtype] / speed['float32']:5.2f} x float32  "
        + ("native" if native[dtype] else "converted to float32 and back")
        for dtype in _DTYPES
    ]
    return "\n".join(
        [
            f"Python {platform.python_version()} on {platform.platform()}",
            ", ".join(f"{name} {version}" for name in _PACKAGES if (version := _version(name))),
            f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})",
            *_wrong_results(),
            *([_FLOAT8] if _has_float8(devices[0]) else []),
            "",
            f"Matrix products of {_size()} x {_size()}:",
            *rows,
            "",
            _recommend(native, speed),
        ]
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _wrong_results() -> list[str]:
    """A line for each kind of local device on which operations outside `jit` do not give NumPy's results."""
    lines = []
    for kind, device in {x.device_kind: x for x in jax.local_devices()}.items():
        with jax.default_device(device):
            results = {name: (np.asarray(fun(jnp)), np.asarray(fun(np))) for name, fun in _EAGER.items()}
        wrong = {name: x for name, x in results.items() if x[0].shape != x[1].shape or not np.allclose(*x, rtol=1e-3)}
        if wrong:
            got, expected = (x.tolist() for x in next(iter(wrong.values())))
            lines.append(_WRONG.format(device=kind, names=", ".join(wrong), got=got, expected=expected))
    return lines


def _has_float8(device: jax.Device) -> bool:
    """Whether a device is a GPU with float8 products. AMD's name their architecture, without a number."""
    capability = str(getattr(device, "compute_capability", ""))
    is_number = re.fullmatch(r"\d+\.\d+", capability) is not None
    return device.platform == "gpu" and is_number and float(capability) >= _FLOAT8_SINCE


def _size() -> int:
    return 1024 if jax.default_backend() == "cpu" else 4096


def _is_native(dtype: str) -> bool:
    """Whether the compiler leaves the operands of a product in their dtype."""
    if jax.default_backend() == "tpu":  # The compiled text does not show it. The matrix unit has no float16.
        return dtype != "float16"
    x = jax.ShapeDtypeStruct((_size(), _size()), dtype)
    text = jax.jit(jnp.matmul).lower(x, x).compile().as_text() or ""
    return re.search(r"= f32\[\S* convert\(", text) is None


def _speeds(seconds: float) -> dict[str, float]:
    """The highest FLOP/s of each dtype, measured in turn for the given time."""
    n = _size()
    product = jax.jit(jnp.matmul)
    operands = {dtype: jnp.full((n, n), 0.5, dtype) for dtype in _DTYPES}
    jax.block_until_ready([product(x, x) for x in operands.values()])  # compiled
    best, end = dict.fromkeys(_DTYPES, float("inf")), time.perf_counter() + seconds
    while True:
        for dtype, x in operands.items():
            start = time.perf_counter()
            jax.block_until_ready([product(x, x) for _ in range(4)])  # dispatched while the first one runs
            best[dtype] = min(best[dtype], (time.perf_counter() - start) / 4)
        if time.perf_counter() >= end:
            return {dtype: 2 * n**3 / took for dtype, took in best.items()}


def _recommend(native: Mapping[str, bool], speed: Mapping[str, float]) -> str:
    fast = [d for d in ("bfloat16", "float16") if native[d] and speed[d] >= _FASTER * speed["float32"]]
    if not fast:
        return (
            "Recommended: float32. 16 bit is not faster on this machine. It halves the memory of activations, and "
            "float16 gives the same numbers here as elsewhere, which is useful for tests."
        )
    if fast == ["float16"]:
        return "Recommended: float16. jamp.autocast(loss_fn, jnp.float16), and jamp.loss_scaled(tx) for its range."
    more = ", or float16 for its three more bits: jamp.autocast(loss_fn, jnp.float16), jamp.loss_scaled(tx)"
    return (
        "Recommended: bfloat16. jamp.autocast(loss_fn, jnp.bfloat16); it needs no loss scale"
        + (more if "float16" in fast else "")
        + "."
    )


if __name__ == "__main__":
    print(report())
