"""Policy and get_policy: casting by layer, in the grammar of jmp."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp

F16, BF16, F32, F64 = (jnp.dtype(d) for d in (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64))


def test_get_policy_reads_names_and_the_short_forms_of_jmp():
    expected = {
        "params=float32,compute=float16,output=float32": (F32, F16, F32),
        "p=f32,c=bf16,o=f32": (F32, BF16, F32),
        "c=f16": (F32, F16, F16),
        "p=f16": (F16, F16, F16),
        "p=f16,c=bf16": (F16, BF16, BF16),
        "o=full": (F32, F32, F32),
        "params = float32, compute = half": (F32, F16, F16),
        "half": (F16, F16, F16),
        "bfloat16": (BF16, BF16, BF16),
        "f64": (F64, F64, F64),
        "full": (F32, F32, F32),
    }
    for name, dtypes in expected.items():
        with warnings.catch_warnings(action="ignore"):  # One 16-bit dtype for everything: test_misuse.py.
            policy = jamp.get_policy(name)
        assert (policy.param_dtype, policy.compute_dtype, policy.output_dtype) == dtypes, name
        assert jamp.get_policy(str(policy)) == policy


def test_what_is_not_a_floating_dtype_or_not_a_key_is_an_error_that_names_it():
    for name, wrong in [("params=float33", "float33"), ("int32", "int32"), ("", ""), ("p=", "")]:
        with pytest.raises(ValueError, match=f"'{wrong}' is not a floating dtype"):
            jamp.get_policy(name)
    with pytest.raises(ValueError, match="The key 'weights' in 'weights=f32' is unknown"):
        jamp.get_policy("weights=f32")
    with pytest.raises(ValueError, match="The key 'compute' in 'c=f16,compute=f32' is repeated"):
        jamp.get_policy("c=f16,compute=f32")
    with pytest.raises(
        ValueError, match=r"output_dtype must be floating, such as jnp\.float16, got output_dtype='int32'"
    ):
        jamp.Policy(jnp.float32, jnp.float16, jnp.int32)


def test_a_policy_casts_floating_arrays_and_leaves_the_rest_and_is_static_in_jit():
    policy = jamp.Policy(jnp.float32, jnp.float16, jnp.bfloat16)
    others = {"i": jnp.int32(3), "c": jnp.complex64(1), "k": jax.random.key(0), "s": "name", "none": None}
    tree = {"w": jnp.ones(2), "n": np.ones(2, np.float64)} | others
    for cast, dtype in [(policy.cast_to_param, F32), (policy.cast_to_compute, F16), (policy.cast_to_output, BF16)]:
        out = cast(tree)
        assert out["w"].dtype == out["n"].dtype == dtype
        assert all(out[name] is others[name] for name in others)
    step = jax.jit(lambda policy, x: policy.cast_to_compute(x), static_argnums=0)
    assert step(policy, jnp.ones(2)).dtype == F16
