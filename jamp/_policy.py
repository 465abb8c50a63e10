"""Cast by layer: which dtype the parameters, the computation and the output of a function have."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jamp._tree import cast_floating

_SHORT = {"f16": "float16", "bf16": "bfloat16", "f32": "float32", "full": "float32", "f64": "float64"}
_KEYS = {
    "p": "param_dtype", "params": "param_dtype",
    "c": "compute_dtype", "compute": "compute_dtype",
    "o": "output_dtype", "output": "output_dtype",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Policy:
    """The dtypes in which a layer keeps its parameters, computes, and gives back its output.

    For people who cast by layer; `autocast` needs no policy. The methods cast the floating arrays of a tree; integers,
    bools, complex numbers, PRNG keys and leaves that are no arrays are left as they are.

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
            dtype = jnp.dtype(getattr(self, field.name))
            if not jnp.issubdtype(dtype, jnp.floating):
                raise ValueError(f"{field.name} must be a floating dtype, got {dtype}.")
            object.__setattr__(self, field.name, dtype)

    def cast_to_param(self, tree: Any) -> Any:
        """The tree with its floating leaves in the parameter dtype."""
        return cast_floating(tree, self.param_dtype)

    def cast_to_compute(self, tree: Any) -> Any:
        """The tree with its floating leaves in the compute dtype."""
        return cast_floating(tree, self.compute_dtype)

    def cast_to_output(self, tree: Any) -> Any:
        """The tree with its floating leaves in the output dtype."""
        return cast_floating(tree, self.output_dtype)

    def __str__(self) -> str:
        return f"params={self.param_dtype},compute={self.compute_dtype},output={self.output_dtype}"


def get_policy(name: str) -> Policy:
    """The policy that a string names, in the grammar of jmp.

    Args:
      name: Either one dtype for everything, or a list such as "params=float32,compute=float16,output=float32" or
        "p=f32,c=f16". Params default to float32, compute to params, output to compute. A dtype is a name such as
        "bfloat16", a short form ("f16", "bf16", "f32", "f64", "full") or "half": bfloat16 on TPU, float16 elsewhere.

    Returns:
      The policy. `get_policy(str(policy))` gives it back.

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


def _parse_dtype(name: str) -> Any:
    name = name.strip()
    if name == "half":
        return jnp.dtype(jnp.bfloat16 if jax.default_backend() == "tpu" else jnp.float16)
    try:
        dtype = jnp.dtype(_SHORT.get(name, name))
    except TypeError:
        dtype = jnp.dtype(bool)
    if not name or not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"{name!r} is not a floating dtype. Give a name such as 'float32', one of {', '.join(_SHORT)}, or 'half'."
        )
    return dtype
