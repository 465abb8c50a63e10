"""Where an equation of a jaxpr comes from: the line of source and the name scope."""

import functools
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jamp._jaxprs.ir import JaxprEqn


def user_line(eqn: JaxprEqn) -> str | None:
    """The innermost line of an equation's traceback that is not in an installed package or in jamp.

    If it calls a package that is not JAX, the innermost line there follows:
    "model.py:12 (dense) > flax/linen/linear.py:287". If all lines are in packages, the innermost line of another
    package takes the place of the user's: "levanter/models/llama.py:200 > haliax/scan.py:419". A line of a
    notebook has the number of its cell: "In[3]:2 (loss)".
    """
    inside, package = "", ""
    outer = ""
    for frame in _frames(eqn):
        file = _file(frame.file_name)
        name = frame.function_name.rpartition(".")[2]
        if file.package is None and not (frame.file_name == "<string>" and name in _GENERATED):
            return f"{_shown(frame.file_name)}:{frame.line_num} ({name})" + (f" > {inside}" if inside else "")
        if file.package and not inside:
            inside, package = f"{file.name}:{frame.line_num}", file.package
        elif file.package and not outer and file.package != package:
            outer = f"{file.name}:{frame.line_num}"
    return " > ".join(filter(None, [outer, inside])) or None


def users_stacklevel() -> int:
    """The stacklevel at which a warning of the calling function points at a line of the user."""
    frames = traceback.walk_stack(sys._getframe(1))
    packages = [_file(frame.f_code.co_filename).package for frame, _ in frames]
    own = [i for i, package in enumerate(packages, start=1) if package is None]
    return next(iter(own or [i for i, package in enumerate(packages, start=1) if package]), 2)


class _File(NamedTuple):
    """A source file. `package` is None for the user's code, and "" for code that is never shown, such as JAX's."""

    name: str
    package: str | None


@functools.cache
def _file(file_name: str) -> _File:
    if file_name.startswith("<") and not file_name.startswith(_TYPED):
        return _File(file_name, "")
    root = _PACKAGES.match(file_name)
    if file_name.startswith((_JAX, _JAMP)) or (root is None and file_name.startswith(_STANDARD_LIBRARY)):
        return _File(file_name, "")
    if root is None:
        return _File(Path(file_name).name, None)
    path = Path(file_name[root.end() :])
    return _File(path.as_posix(), path.parts[0])


def _shown(file_name: str) -> str:
    """The name of a user's file, or the number of a cell in IPython or a notebook, such as "In[3]"."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    named = getattr(getattr(shell, "compile", None), "format_code_name", lambda name: None)(file_name)
    cell = re.search(r"\d+", named[1]) if named else re.search(r"(?<=<ipython-input-)\d+", file_name)
    if cell is not None:
        return f"In[{cell[0]}]"
    return file_name if file_name.startswith("<") else Path(file_name).name


def scope(eqn: JaxprEqn, caller: str = "") -> str:
    """Return the name scopes around an equation, such as Linen's modules: "Net/h_3/attn". `caller` is the call's scope.

    Transformations, jit and the scopes that JAX and jamp make are left out.
    """
    parts = [part for part in str(eqn.source_info.name_stack).split("/") if "jit(" not in part]
    own = [part for part in (_WRAPPED.sub(r"\1", part, 1) for part in parts) if not _NO_SCOPE.search(part)]
    # The backward pass of a checkpoint has the scopes of the checkpoint, or all scopes, twice.
    twice = next((n for n in range(len(own) // 2, 0, -1) if own[:n] == own[n : 2 * n]), 0)
    own = own[twice:] if twice == len(own) / 2 or is_transposed(eqn) else own
    # A call in the backward pass of a checkpoint has the scopes around it, too.
    outer = caller.split("/") if caller else []
    own = own if own[: len(outer)] == outer else outer + own
    return "/".join(own)


def scope_path(eqn: JaxprEqn, around: str) -> str:
    """The names in the name stack of an equation and of the constructs around it: "/jvp/h_3/attn/"."""
    return re.sub(r"[/()]+", "/", f"{around}/{eqn.source_info.name_stack}/")


def is_transposed(eqn: JaxprEqn) -> bool:
    """Whether an equation was made by transposing a function, so that it is part of a backward pass.

    A scope of the user may have any name, such as "transpose(jvp)". So the class of the entry decides.
    """
    stack: Any = eqn.source_info.name_stack
    return any(part.name == "transpose" and type(part) is not _scope_class() for part in stack.stack)


@functools.cache
def _scope_class() -> type:
    """The class of what `jax.named_scope` adds to a name stack. A transformation adds an entry of another class."""
    stack: Any = jax.make_jaxpr(jax.named_scope("scope")(jax.lax.neg))(0.0).eqns[0].source_info.name_stack
    return type(stack.stack[-1])


def is_of_jax(jaxpr: Any) -> bool:
    """Whether a jaxpr is of a function that JAX itself defines, such as `jax.nn.relu`."""
    return str(jaxpr.debug_info.func_filename).startswith(_JAX)


def in_scope(eqn: JaxprEqn, name: str) -> bool:
    """Whether an equation was traced inside `jax.named_scope(name)`. No transformation may have this name."""
    stack: Any = eqn.source_info.name_stack
    return any(part.name == name for part in stack.stack)


def is_linear_algebra(eqn: JaxprEqn) -> bool:
    """Whether an equation is in JAX's linear algebra or its derivatives, and not in a function passed to it."""
    for frame in _frames(eqn):  # from the innermost
        if frame.file_name.startswith(_JAX):
            if _LINEAR_ALGEBRA.search(frame.file_name, len(_JAX)):
                return True
        elif _file(frame.file_name).package != "":
            return False
    return False


def pattern(names: Iterable[str]) -> str:
    """A short form of several scopes or paths: "h/*/{attn,mlp}". A * is for numbers, or for more than four names."""
    groups: dict[tuple[str, ...], list[list[str]]] = {}
    for name in dict.fromkeys(names):
        tokens = _SEPARATORS.split(name)
        groups.setdefault(tuple(tokens[1::2]), []).append(tokens[::2])
    return ", ".join(
        "".join(map(str.__add__, map(_one, zip(*group, strict=True)), (*separators, "")))
        for separators, group in groups.items()
    )


def _one(tokens: Iterable[str]) -> str:
    distinct = list(dict.fromkeys(tokens))
    if len(distinct) > 1:
        distinct = list(dict.fromkeys(re.sub(r"\d+", "*", token) for token in distinct))
    return distinct[0] if len(distinct) == 1 else "{" + ",".join(distinct) + "}" if len(distinct) <= 4 else "*"


def _frames(eqn: JaxprEqn) -> Iterable[Any]:
    frames: Iterable[Any] = getattr(eqn.source_info.traceback, "frames", ())
    return frames


_JAMP = str(Path(__file__).parent.parent) + os.sep
# Of this environment, of the user (`pip install --user`) and of the system, such as Debian's.
_PACKAGES = re.compile(r".*[/\\](?:site|dist)-packages[/\\]")
_STANDARD_LIBRARY = sysconfig.get_path("stdlib") + os.sep
# Code that a user types: in IPython, Python, `python -c` and doctests. Other names like this are generated code's.
_TYPED = ("<ipython-input", "<python-input", "<stdin>", "<string>", "<console>", "<doctest")
_GENERATED = ("__init__", "__new__", "__eq__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__", "__repr__")
_JAX = str(Path(jax.__file__).parent) + os.sep
_LINEAR_ALGEBRA = re.compile("linalg|solves")  # in the names of JAX's files
_WRAPPED = re.compile(r"^(?:\w+\()+(.*?)\)+$")  # jvp(Net), transpose(jvp(Net))
# An einsum is scoped by its subscripts, an Equinox layer by its class.
_NO_SCOPE = re.compile(r"^$|->|^eqx\.|^jamp\.|^rematted_computation$|^checkpoint$")
_SEPARATORS = re.compile(r"([/.'\"\[\]]+)")
