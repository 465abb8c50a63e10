"""The line of source that an equation of a jaxpr comes from."""

import sysconfig
from pathlib import Path

from jamp._jaxpr import JaxprEqn


def user_line(eqn: JaxprEqn) -> str | None:
    """The innermost line of an equation's traceback that is not in an installed package or in jamp."""
    for frame in getattr(eqn.source_info.traceback, "frames", ()):
        if not frame.file_name.startswith(_LIBRARIES):
            return f"{Path(frame.file_name).name}:{frame.line_num} ({frame.function_name.rpartition('.')[2]})"
    return None


def made_by_jamp(eqn: JaxprEqn) -> bool:
    """Whether jamp inserted an equation, such as a cast of autocast, and not the user."""
    frames = getattr(eqn.source_info.traceback, "frames", ())
    return next((f.file_name.startswith(_JAMP) for f in frames if not _is_others(f.file_name)), False)


def _is_others(file_name: str) -> bool:
    return file_name.startswith(_LIBRARIES) and not file_name.startswith(_JAMP)


_JAMP = str(Path(__file__).parent)
_LIBRARIES = (*(sysconfig.get_path(kind) for kind in ("purelib", "platlib", "stdlib")), _JAMP, "<")
