"""Policy and get_policy: casting by layer, in the grammar of jmp."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp

F16, BF16, F32, F64 = (jnp.dtype(d) for d in (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64))


@pytest.mark.parametrize(
    ("name", "params", "compute", "output"),
    [
        ("params=float32,compute=float16,output=float32", F32, F16, F32),
        ("p=f32,c=bf16,o=f32", F32, BF16, F32),
        ("c=f16", F32, F16, F16),
        ("p=f16", F16, F16, F16),
        ("p=f16,c=bf16", F16, BF16, BF16),
        ("o=full", F32, F32, F32),
        ("params = float32, compute = half", F32, F16, F16),
        ("half", F16, F16, F16),
        ("bfloat16", BF16, BF16, BF16),
        ("f64", F64, F64, F64),
        ("full", F32, F32, F32),
    ],
)
def test_get_policy_reads_names_and_the_short_forms_of_jmp(name, params, compute, output):
    policy = jamp.get_policy(name)
    assert (policy.param_dtype, policy.compute_dtype, policy.output_dtype) == (params, compute, output)
    assert jamp.get_policy(str(policy)) == policy


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("params=float33", "'float33' is not a floating dtype"),
        ("int32", "'int32' is not a floating dtype"),
        ("", "'' is not a floating dtype"),
        ("p=", "'' is not a floating dtype"),
        ("weights=f32", "The key 'weights' in 'weights=f32' is unknown"),
        ("c=f16,compute=f32", "The key 'compute' in 'c=f16,compute=f32' is repeated"),
    ],
)
def test_get_policy_says_what_it_does_not_know(name, message):
    with pytest.raises(ValueError, match=message):
        jamp.get_policy(name)


def test_a_policy_is_of_floating_dtypes():
    with pytest.raises(ValueError, match="output_dtype must be a floating dtype, got int32"):
        jamp.Policy(jnp.float32, jnp.float16, jnp.int32)


def test_a_policy_casts_floating_arrays_and_leaves_the_rest_as_it_is():
    policy = jamp.Policy(jnp.float32, jnp.float16, jnp.bfloat16)
    tree = {
        "w": jnp.ones(2),
        "n": np.ones(2, np.float64),
        "i": jnp.int32(3),
        "c": jnp.complex64(1),
        "k": jax.random.key(0),
        "s": "name",
        "none": None,
    }
    for cast, dtype in [(policy.cast_to_param, F32), (policy.cast_to_compute, F16), (policy.cast_to_output, BF16)]:
        out = cast(tree)
        assert out["w"].dtype == out["n"].dtype == dtype
        assert all(out[name] is tree[name] for name in ("i", "c", "k", "s", "none"))


def test_a_policy_is_hashable_and_works_in_jit():
    step = jax.jit(lambda policy, x: policy.cast_to_compute(x), static_argnums=0)
    assert step(jamp.get_policy("c=f16"), jnp.ones(2)).dtype == F16
