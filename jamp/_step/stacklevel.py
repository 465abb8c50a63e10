"""Where a warning points."""

import sys
import traceback

_LIBRARIES = "jamp", "jax", "optax", "flax", "equinox"


def users_stacklevel() -> int:
    """The stacklevel at which a warning of the calling function points at a line of the user."""
    frames = traceback.walk_stack(sys._getframe(1))
    modules = [frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in frames]
    return next((i for i, name in enumerate(modules, start=1) if name not in _LIBRARIES), 2)
