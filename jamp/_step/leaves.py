"""Parts of a pytree: find and replace nodes, and take the gradients out.

A state that jamp looks for may be anywhere in a tree of the user's, also inside another one:

    {"opt": MultiStepsState(inner_opt_state=(LossScaledState(...), EmptyState()))}

`find_nodes` yields `((DictKey("opt"), GetAttrKey("inner_opt_state"), SequenceKey(0)), LossScaledState(...))`.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.tree_util import keystr

from jamp._cast import is_inexact
from jamp._jaxprs import build

# Flax's name for the collection of fp8 scales and histories. A step replaces their values by their "gradients".
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


def is_gradient(path: tuple[Any, ...], x: Any) -> bool:
    """Whether a leaf is a gradient to unscale and check. Leaves of Flax's fp8 collection are not."""
    return is_inexact(x) and all(getattr(key, "key", None) != OVERWRITE_WITH_GRADIENT for key in path)


def split_gradients(tree: Any) -> tuple[list[Any], tuple[str, ...], Callable[[list[Any]], Any]]:
    """Take the gradients out of a tree.

    Returns:
      The gradients, a label for each (the last key of the path without its digits, so the same parameter of each layer
      has the same label), and a function that puts other leaves in their places.
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(tree)
    chosen = [i for i, (path, x) in enumerate(flat) if is_gradient(path, x)]

    def merge(gradients: list[Any]) -> Any:
        return jax.tree.unflatten(treedef, build.replaced([x for _, x in flat], chosen, gradients))

    labels = tuple(keystr(flat[i][0][-1:]).translate(_NO_DIGITS) for i in chosen)
    return [flat[i][1] for i in chosen], labels, merge
