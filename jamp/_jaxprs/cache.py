"""A cache of results that are found once for a jaxpr."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from jamp._jaxprs.ir import ClosedJaxpr

T = TypeVar("T")


class Cache(Generic[T]):
    """Results by jaxpr, constants, and all else that they depend on.

    A key holds ids: to compare two jaxprs equation by equation takes as long as to rewrite one. So the jaxpr is kept
    with its result, and no other one gets its ids. Two calls of one jaxpr may have other constants.
    """

    def __init__(self) -> None:
        self._found: dict[Any, tuple[ClosedJaxpr, T]] = {}

    def __call__(self, closed: ClosedJaxpr, others: Any, make: Callable[[], T]) -> T:
        """Return the result for a jaxpr and the hashable `others`. If it is not there, `make` it."""
        key = id(closed.jaxpr), *map(id, closed.consts), others
        if key not in self._found:
            self._found[key] = closed, make()
        return self._found[key][1]
