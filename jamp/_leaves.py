"""Parts of a pytree: find and replace nodes, and take the gradients out.

A state that jamp looks for may be anywhere in a tree of the user's, also inside another one:

    {"opt": MultiStepsState(inner_opt_state=(LossScaledState(...), EmptyState()))}

`find_nodes` yields `((DictKey("opt"), GetAttrKey("inner_opt_state"), SequenceKey(0)), LossScaledState(...))`.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.tree_util import GetAttrKey, keystr

from jamp._cast import is_inexact
from jamp._jaxprs import build

# Flax's name for the collection of fp8 scales and histories. A step replaces their values by their "gradients". In
# Linen it is a key of a dict, and in NNX the type of a Variable, which `flax.nnx.bridge` makes by that name.
OVERWRITE_WITH_GRADIENT = "_overwrite_with_gradient"
_NO_DIGITS = str.maketrans("", "", "0123456789")

Node = tuple[tuple[Any, ...], Any]  # a path, and the node or leaf there
Condition = Callable[[Any], bool]  # of a node or leaf


def find_nodes(
    tree: Any, is_wanted: Condition, *, enters: Condition = lambda x: False, has_paths: bool = True
) -> Iterator[Node]:
    """Yield the path and the value of each wanted node or leaf, from the outside in.

    Args:
      tree: A pytree.
      is_wanted: A function of a node or leaf.
      enters: A function of a wanted node. If it returns True, the nodes inside are looked at too.
      has_paths: If False, all paths are empty, which halves the time.
    """

    def visit(start: tuple[Any, ...], tree: Any, *, is_entered: bool = False) -> Iterator[Node]:
        is_found = lambda x: is_wanted(x) and not (is_entered and x is tree)
        leaves = jax.tree.leaves_with_path if has_paths else _leaves_without_path
        for path, x in leaves(tree, is_leaf=is_found):
            if is_found(x):
                yield (*start, *path), x
                if enters(x):
                    yield from visit((*start, *path), x, is_entered=True)

    return visit((), tree)


def contains(tree: Any, is_wanted: Condition) -> bool:
    """Whether any node or leaf of a tree is wanted."""
    return any(True for _ in find_nodes(tree, is_wanted, has_paths=False))


def _leaves_without_path(tree: Any, is_leaf: Condition) -> list[Node]:
    return [((), x) for x in jax.tree.leaves(tree, is_leaf=is_leaf)]


def replace_leaves(tree: Any, leaves: Any) -> Any:
    """Return a tree of the same structure, with the leaves of another tree (such as a list) in order."""
    return jax.tree.unflatten(jax.tree.structure(tree), jax.tree.leaves(leaves))


def replace_node(tree: Any, node: Any, new: Any) -> Any:
    """Return the tree with `new` in place of one of its nodes."""
    return jax.tree.map(lambda x: new if x is node else x, tree, is_leaf=lambda x: x is node)


def is_numeric(x: Any) -> bool:
    """Whether a leaf is an array, the type of one, or a Python number."""
    return hasattr(x, "dtype") or isinstance(x, (bool, int, float, complex))


def is_overwritten(x: Any) -> bool:
    """Whether a node is an NNX Variable of Flax's fp8 collection."""
    kind: Any = type(x)
    return _is_kind_overwritten(kind)


@functools.lru_cache
def _is_kind_overwritten(kind: Any) -> bool:
    return any(cls.__name__ == OVERWRITE_WITH_GRADIENT for cls in kind.__mro__)


def is_gradient(path: tuple[Any, ...], x: Any, holder: Any = None) -> bool:
    """Whether a leaf is a gradient to unscale and check. Leaves of Flax's fp8 collection are not.

    `holder` is the NNX Variable that holds it, if any does.
    """
    if is_overwritten(x) or is_overwritten(holder):
        return False
    return is_inexact(x) and all(getattr(key, "key", None) != OVERWRITE_WITH_GRADIENT for key in path)


def leaves_and_gradients(tree: Any) -> list[tuple[tuple[Any, ...], Any, bool]]:
    """Return the path of each leaf, the leaf, and whether it is a gradient."""
    leaves = []
    for path, x in jax.tree.leaves_with_path(tree, is_leaf=is_overwritten):
        if is_overwritten(x):
            leaves += [((*path, *inside), y, False) for inside, y in jax.tree.leaves_with_path(x)]
        else:
            leaves.append((path, x, is_gradient(path, x)))
    return leaves


def split_gradients(tree: Any) -> tuple[list[Any], tuple[str, ...], Callable[[list[Any]], Any]]:
    """Take the gradients out of a tree.

    Returns:
      The gradients, a label for each (the last key of the path without its digits, so the same parameter of each layer
      has the same label), and a function that puts other leaves in their places.
    """
    flat = leaves_and_gradients(tree)
    chosen = [i for i, (_, _, is_chosen) in enumerate(flat) if is_chosen]

    def merge(gradients: list[Any]) -> Any:
        leaves = build.replaced([x for _, x, _ in flat], chosen, gradients)
        return jax.tree.unflatten(jax.tree.structure(tree), leaves)

    return [flat[i][1] for i in chosen], tuple(_label(flat[i][0]) for i in chosen), merge


def _label(path: tuple[Any, ...]) -> str:
    is_boxed = path[-1:] == (GetAttrKey("value"),)  # Flax's Variables and Partitioned have one field.
    return keystr(path[-2:-1] if is_boxed else path[-1:]).translate(_NO_DIGITS)
