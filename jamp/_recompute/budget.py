"""A memory budget: a share of the bytes that are kept without one, or a number of bytes."""

import re
from typing import TypeAlias

from jax.sharding import AxisType

from jamp._jaxprs import walk
from jamp._jaxprs.ir import ClosedJaxpr
from jamp._jaxprs.source import is_transposed
from jamp._numbers import as_number

MemoryBudget: TypeAlias = float | str

_UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def check_budget(budget: MemoryBudget) -> None:
    """Raise if a budget is neither a share nor a number of bytes."""
    budget = as_number(budget)
    if isinstance(budget, str):
        in_bytes(budget)
    elif isinstance(budget, bool) or not isinstance(budget, (int, float)):
        raise TypeError(f'memory_budget must be a number from 0 to 1, or bytes such as "12GiB", got {budget!r}.')
    elif not 0 <= budget <= 1:
        hint = f' For bytes, write "{budget:g}GiB" or "{budget:g}MB".' if budget > 1 else ""
        raise ValueError(f"memory_budget must be a share from 0 to 1, got {budget}.{hint}")


def in_bytes(budget: str) -> float:
    """The bytes that a text such as "12GiB" says."""
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(\w+)\s*", budget)
    if not match or match[2] not in _UNITS:
        raise ValueError(
            f'memory_budget must be a number from 0 to 1, or bytes such as "12GiB", got {budget!r}. Units: '
            f"{', '.join(_UNITS)}."
        )
    return float(match[1]) * _UNITS[match[2]]


def bytes_of(budget: MemoryBudget, total: float) -> float:
    """The bytes of a budget, of which a share is of the `total`."""
    return in_bytes(budget) if isinstance(budget, str) else float(budget) * total


def megabytes(size: float) -> str:
    """A number of bytes in MB, as a text."""
    return f"{size / 1e6:,.1f}" if size >= 1e5 else f"{size / 1e6:.2g}"


def warnings_of_budget(closed: ClosedJaxpr, budget: MemoryBudget, way: str) -> list[str]:
    """Warnings that a budget does not bound what a function keeps, `way` being how to give one to a loss."""
    messages = []
    if any(map(is_transposed, walk.all_equations(closed.jaxpr))):
        messages.append(
            "This function takes a gradient itself, and the budget is not for what that keeps. In a train step, "
            f"transform the loss inside: jax.grad(jamp.{way}). If the gradient is part of a loss, such as a force, the "
            "budget is for the gradient of that loss."
        )
    meshes = [aval.sharding.mesh for aval in closed.in_avals if hasattr(aval, "sharding")]
    is_auto = any(
        kind is AxisType.Auto and size > 1
        for mesh in meshes
        for kind, size in zip(mesh.axis_types, mesh.axis_sizes, strict=True)
    )
    if isinstance(budget, str) and is_auto:
        messages.append(
            f"memory_budget={budget!r} counts the bytes of all devices, because mesh axes of the arguments are Auto. "
            "Give a share from 0 to 1, and find it with jamp.debug.memory_curve."
        )
    return messages
