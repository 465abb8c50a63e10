"""JAX's strict and unusual configurations."""

import contextlib

import jax


@contextlib.contextmanager
def strict():
    """No rank promotion and no NaN. Dtype promotion is strict in every test."""
    with jax.numpy_rank_promotion("raise"), jax.debug_nans(True):
        yield


CONFIGURATIONS = {
    "strict": strict,
    "checking_leaks": jax.checking_leaks,
    "disable_jit": jax.disable_jit,
    "x64": lambda: jax.enable_x64(True),
}


@contextlib.contextmanager
def next_checkpoint(flag):
    """JAX's next `checkpoint`, if there is one."""
    if not hasattr(jax.config, "jax_remat3"):
        assert not flag
        yield
        return
    before = jax.config.jax_remat3
    jax.config.update("jax_remat3", flag)
    try:
        yield
    finally:
        jax.config.update("jax_remat3", before)
