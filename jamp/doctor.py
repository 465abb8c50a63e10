"""The speed of 16-bit matrix products on this machine, and a recommendation: `python -m jamp.doctor`."""

import platform
import re
import time
from collections.abc import Mapping
from importlib import metadata

import jax
import jax.numpy as jnp

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
    "and compiles for minutes. 16-bit products may take longer with it."
)


def report(seconds: float = 1.0) -> str:
    """Report versions, devices, which 16-bit dtypes are native, the speed of matrix products and a recommendation.

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
