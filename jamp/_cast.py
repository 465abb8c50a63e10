"""Casts of arrays and pytrees between floating dtypes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr
from jax.typing import DTypeLike

_SHORT = {
    "f16": "float16", "fp16": "float16", "bf16": "bfloat16", "f32": "float32", "fp32": "float32", "full": "float32",
    "f64": "float64", "fp64": "float64",
}  # fmt: skip


def is_float32(x: Any) -> bool:
    """Whether an array, or its type, is float32."""
    return bool(getattr(x, "dtype", None) == np.float32)


def is_inexact(x: Any) -> bool:
    """Whether a leaf is a floating or complex array or Python number."""
    if isinstance(x, (float, complex)):
        return True
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)


def is_floating(x: Any) -> bool:
    """Whether a leaf is a floating array. PRNG keys, float0 and complex arrays are not."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


def is_complex(x: Any) -> bool:
    """Whether an array, or its type, is complex."""
    return getattr(x, "dtype", None) in (np.complex64, np.complex128)


def cast_leaf(x: Any, dtype: DTypeLike) -> Any:
    """Cast a floating array of at most 32 bits to `dtype`. Any other leaf is returned unchanged."""
    return jnp.asarray(x, dtype) if is_floating(x) and jnp.finfo(x.dtype).bits <= 32 else x


def to_float32(tree: Any) -> Any:
    """Cast the floating arrays of fewer than 32 bits to float32. Other leaves are returned unchanged."""
    return jax.tree.map(lambda x: cast_leaf(x, jnp.float32), tree)


def cast_floating(tree: Any, dtype: DTypeLike) -> Any:
    """Cast the floating arrays of a tree.

    Args:
      tree: A pytree. Integers, bools, complex numbers, PRNG keys and leaves that are not arrays are left unchanged.
      dtype: The floating dtype to cast to, or a name: "float16", "fp16", "half".

    Returns:
      The tree with its floating arrays in `dtype`.

    Raises:
      ValueError: If `dtype` is not floating.
      TypeError: If `tree` is a dtype.

    Examples:
      >>> import jax.numpy as jnp, jamp
      >>> jamp.cast_floating({"w": jnp.ones(2), "step": jnp.int32(3)}, jnp.float16)["w"].dtype
      dtype('float16')
    """
    _check_order("cast_floating", tree)
    target = check_floating("dtype", dtype)
    return jax.tree.map(lambda x: jnp.asarray(x, target) if is_floating(x) else x, tree)


def check_castable(params: Any, dtype: DTypeLike) -> list[str]:
    """List the parameters that do not fit into a floating dtype. An empty list means that all are compatible.

    Call it on the host, before training. It waits for the device.

    Args:
      params: A pytree. Leaves that are not floating arrays are ignored, because `cast_floating` leaves them unchanged.
      dtype: The floating dtype that `cast_floating` will cast to.

    Returns:
      The paths of the leaves that hold a finite number which becomes inf (NaN in a float8 dtype without inf). A number
      that is rounded, even to 0, fits.

    Raises:
      ValueError: If `dtype` is not floating.
      TypeError: If `params` is a dtype.

    Examples:
      >>> import jax.numpy as jnp, jamp
      >>> params = {"w": jnp.array([1.0, 1e5]), "b": jnp.zeros(2), "step": jnp.int32(3)}
      >>> jamp.check_castable(params, jnp.float16), jamp.check_castable(params, jnp.bfloat16)
      (["['w']"], [])
    """
    _check_order("check_castable", params)
    target = check_floating("dtype", dtype)

    def overflows(x: Any) -> bool:
        # Of NumPy's float64 before JAX rounds it to float32.
        is_finite = jnp.isfinite(x) if isinstance(x, jax.Array) else np.isfinite(x)
        with np.errstate(over="ignore"):  # the overflow that is looked for
            return bool(jnp.any(is_finite & ~jnp.isfinite(jnp.asarray(x, target))))

    return [keystr(path) for path, x in jax.tree.leaves_with_path(params) if is_floating(x) and overflows(x)]


def _check_order(caller: str, tree: Any) -> None:
    if is_dtype(tree):
        raise TypeError(f"{caller} takes arrays first, got {tree!r}. Write jamp.{caller}(params, jnp.float16).")


def as_dtype(dtype: DTypeLike | None) -> np.dtype[Any] | None:
    """The NumPy dtype of a dtype or its name; None if there is none.

    Besides NumPy's names there are short ones ("fp16", "bf16", "f32") and "half": bfloat16 on TPU, float16 elsewhere.
    """
    if isinstance(dtype, str):
        dtype = ("bfloat16" if jax.default_backend() == "tpu" else "float16") if dtype == "half" else dtype
        dtype = _SHORT.get(dtype, dtype)
    try:
        return None if dtype is None else jnp.dtype(dtype)  # np.dtype(None) is float64
    except (TypeError, ValueError):  # a ValueError for a dictionary
        return None


def is_dtype(x: Any) -> bool:
    """Whether an argument can only be a dtype, or the name of one, and not a function or an array."""
    is_scalar_type = isinstance(x, type) and issubclass(x, (np.generic, bool, int, float, complex))
    return is_scalar_type or isinstance(x, (str, np.dtype, type(jnp.float16)))


def check_floating(name: str, dtype: DTypeLike | None) -> np.dtype[Any]:
    """The NumPy dtype of a floating dtype or its name. Otherwise raise a ValueError about argument `name`."""
    checked = as_dtype(dtype)
    if checked is None or not _is_float(checked):
        is_named = dtype is None or isinstance(dtype, (str, int, float))
        got = repr(checked.name) if checked is not None else repr(dtype) if is_named else f"a {type(dtype).__name__}"
        names = f" Short names: {', '.join(_SHORT)}, half." if checked is None else ""
        raise ValueError(f"{name} must be floating, such as jnp.float16, got {name}={got}.{names}")
    return checked


def _is_float(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype is floating. For JAX 0.10.0, floats of 6 bits are not below `jnp.floating`."""
    try:
        return bool(jnp.finfo(dtype).bits) and dtype.kind != "c"
    except ValueError:
        return False
