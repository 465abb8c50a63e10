"""`Pytree`, a base class of immutable pytrees whose attributes are children or static."""

import inspect
import itertools
from typing import Any, ClassVar, Self

import jax
from jax.tree_util import GetAttrKey


class Pytree:
    """Base class of a frozen dataclass with two class variables: the names of `_children` and of `_static` attributes.

    A subclass without fields of its own is also a pytree. One with fields must be registered by its author.
    """

    _children: ClassVar[tuple[str, ...]]
    _static: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls) -> None:
        own = itertools.takewhile(lambda base: "_children" not in vars(base), cls.__mro__)
        if not any(map(inspect.get_annotations, own)):
            jax.tree_util.register_pytree_with_keys(cls, _flatten, cls._unflatten)

    def _with(self, **fields: Any) -> Self:
        """Return a copy with other attributes. JAX may unflatten a pytree with any leaves, so they are not checked."""
        return type(self)._of(vars(self) | fields)

    @classmethod
    def _of(cls, fields: dict[str, Any]) -> Self:
        new = object.__new__(cls)
        vars(new).update(fields)
        return new

    @classmethod
    def _unflatten(cls, static: Any, children: Any) -> Self:
        return cls._of(dict(zip(cls._static + cls._children, (*static, *children), strict=True)))


def _flatten(x: Pytree) -> tuple[list[tuple[GetAttrKey, Any]], tuple[Any, ...]]:
    return [(GetAttrKey(name), getattr(x, name)) for name in x._children], tuple(getattr(x, name) for name in x._static)
