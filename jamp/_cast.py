"""Casts of arrays and pytrees between floating dtypes, and `Policy`, the dtypes of a layer."""

import dataclasses
import warnings
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
_KEYS = {
    "p": "param_dtype", "params": "param_dtype",
    "c": "compute_dtype", "compute": "compute_dtype",
    "o": "output_dtype", "output": "output_dtype",
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

    Examples:
      >>> import jax.numpy as jnp, jamp
      >>> jamp.cast_floating({"w": jnp.ones(2), "step": jnp.int32(3)}, jnp.float16)["w"].dtype
      dtype('float16')
    """
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

    Examples:
      >>> import jax.numpy as jnp, jamp
      >>> params = {"w": jnp.array([1.0, 1e5]), "b": jnp.zeros(2), "step": jnp.int32(3)}
      >>> jamp.check_castable(params, jnp.float16), jamp.check_castable(params, jnp.bfloat16)
      (["['w']"], [])
    """
    target = check_floating("dtype", dtype)

    def overflows(x: Any) -> bool:
        x = jnp.asarray(x)
        return bool(jnp.any(jnp.isfinite(x) & ~jnp.isfinite(x.astype(target))))

    return [keystr(path) for path, x in jax.tree.leaves_with_path(params) if is_floating(x) and overflows(x)]


def as_dtype(dtype: DTypeLike | None) -> np.dtype[Any] | None:
    """The NumPy dtype of a dtype or its name; None if there is none.

    Besides NumPy's names there are short ones ("fp16", "bf16", "f32") and "half": bfloat16 on TPU, float16 elsewhere.
    """
    if isinstance(dtype, str):
        dtype = ("bfloat16" if jax.default_backend() == "tpu" else "float16") if dtype == "half" else dtype
        dtype = _SHORT.get(dtype, dtype)
    try:
        return None if dtype is None else jnp.dtype(dtype)  # np.dtype(None) is float64
    except TypeError:
        return None


def check_floating(name: str, dtype: DTypeLike | None) -> np.dtype[Any]:
    """The NumPy dtype of a floating dtype or its name. Otherwise raise a ValueError about argument `name`."""
    checked = as_dtype(dtype)
    if checked is None or not jnp.issubdtype(checked, jnp.floating):
        got = dtype if checked is None else checked.name
        names = f" Short names: {', '.join(_SHORT)}, half." if checked is None else ""
        raise ValueError(f"{name} must be floating, such as jnp.float16, got {name}={got!r}.{names}")
    return checked


@dataclasses.dataclass(frozen=True)
class Policy:
    """The dtypes in which a layer keeps its parameters, computes and returns its output.

    A policy is for code that casts layer by layer. `autocast` does not need one. The methods cast the floating arrays
    of a tree. Integers, bools, complex numbers, PRNG keys and leaves that are not arrays are left unchanged.

    Args:
      param_dtype: The floating dtype of parameters.
      compute_dtype: The floating dtype of computations.
      output_dtype: The floating dtype of outputs.

    Raises:
      ValueError: If a dtype is not floating.

    Examples:
      >>> import jax.numpy as jnp, jamp
      >>> policy = jamp.Policy(jnp.float32, jnp.float16, jnp.float32)
      >>> policy.cast_to_compute({"w": jnp.ones(2), "step": jnp.int32(3)})["w"].dtype
      dtype('float16')
    """

    param_dtype: DTypeLike
    compute_dtype: DTypeLike
    output_dtype: DTypeLike

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, check_floating(field.name, getattr(self, field.name)))

    def cast_to_param(self, tree: Any) -> Any:
        """Cast the floating arrays of a tree to the parameter dtype."""
        return cast_floating(tree, self.param_dtype)

    def cast_to_compute(self, tree: Any) -> Any:
        """Cast the floating arrays of a tree to the compute dtype."""
        return cast_floating(tree, self.compute_dtype)

    def cast_to_output(self, tree: Any) -> Any:
        """Cast the floating arrays of a tree to the output dtype."""
        return cast_floating(tree, self.output_dtype)

    def __str__(self) -> str:
        return f"params={self.param_dtype},compute={self.compute_dtype},output={self.output_dtype}"


def get_policy(name: str) -> Policy:
    """Parse a policy from a string, in the syntax of jmp.

    Args:
      name: One dtype for everything, or a list such as "params=float32,compute=float16,output=float32" or
        "p=f32,c=f16". Params default to float32, compute to params, output to compute. A dtype is a name such as
        "bfloat16", a short form ("f16", "fp16", "bf16", "f32", "full") or "half", which is bfloat16 on TPU and float16
        elsewhere. One 16-bit dtype for everything warns, because the parameters have it too.

    Returns:
      The policy. `get_policy(str(policy))` returns an equal one.

    Raises:
      ValueError: If the string has an unknown or repeated key, or an unknown dtype.

    Examples:
      >>> import jamp
      >>> print(jamp.get_policy("c=bf16,o=full"))
      params=float32,compute=bfloat16,output=float32

    References:
      jmp, https://github.com/google-deepmind/jmp
    """
    if "=" not in name:
        dtype = _parse_dtype(name)
        if dtype.itemsize < 4:
            warnings.warn(
                f"get_policy({name!r}) makes the parameters {dtype} too, and they lose small updates. To keep them in "
                f"float32: get_policy('params=float32,compute={dtype},output=float32'). For {dtype} parameters use "
                f"jamp.mixed_precision, and write 'params={dtype}'.",
                stacklevel=2,
            )
        return Policy(dtype, dtype, dtype)
    dtypes: dict[str, Any] = {}
    for part in name.split(","):
        key, _, value = (text.strip() for text in part.partition("="))
        field = _KEYS.get(key)
        if field is None or field in dtypes:
            problem = "unknown" if field is None else "repeated"
            raise ValueError(f"The key {key!r} in {name!r} is {problem}. Give params, compute and output once each.")
        dtypes[field] = _parse_dtype(value)
    params = dtypes.get("param_dtype", jnp.dtype(jnp.float32))
    compute = dtypes.get("compute_dtype", params)
    return Policy(params, compute, dtypes.get("output_dtype", compute))


def _parse_dtype(name: str) -> np.dtype[Any]:
    try:
        return check_floating("dtype", name.strip())
    except ValueError:
        hint = ""
        if name in ("mixed_float16", "mixed_bfloat16"):
            hint = f" Keras' policy of this name is 'params=float32,compute={name[6:]},output={name[6:]}'."
        short = ", ".join(_SHORT)
        raise ValueError(
            f"{name!r} is not a floating dtype.{hint} Give a name such as 'float32', one of {short}, or 'half'."
        ) from None
