"""The arguments and results of a transformed function: arrays to trace, and other leaves."""

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey, GetAttrKey, SequenceKey, keystr, tree_flatten_with_path

from jamp._cast import as_dtype, is_dtype, is_inexact
from jamp._jaxprs import build, interpret
from jamp._staging import is_trace_reused, traced_anew

if TYPE_CHECKING:
    from jamp._jaxprs.ir import ClosedJaxpr

P = ParamSpec("P")
R = TypeVar("R")

_CAPTURE = "In place of `sow`, return nnx.capture(model, nnx.Intermediate)(x)."


class Call:
    """One call of a function: flatten its arguments and rebuild its results.

    Arrays are traced. Python numbers, flags and all other leaves stay what they are, so that a function can branch on
    them. A *box* is a Flax NNX `Variable`, a mutable pytree of arrays. However often it is passed, the function sees
    one object, and `finish` writes its new value back.

    Attributes:
      leaves: The arrays.
      paths: The path of each of them, or of its box, in the arguments.
      holders: The box that holds each, or None.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self._tree: Any
        flat, self._tree = tree_flatten_with_path((args, kwargs), is_leaf=is_box)
        nodes = [x for _, x in flat]
        self._boxes = list({id(x): x for x in nodes if is_box(x)}.values())
        self._structures: list[Any] = [jax.tree.structure(box) for box in self._boxes]
        self._nodes = nodes
        self._arrays = [i for i, x in enumerate(nodes) if is_array(x)]
        self._in_boxes = [x for box in self._boxes for x in jax.tree.leaves(box)]
        self.leaves = [nodes[i] for i in self._arrays] + self._in_boxes
        paths = {id(x): path for path, x in reversed(flat)}
        in_boxes = [box for box in self._boxes for _ in jax.tree.leaves(box)]
        self.paths = [flat[i][0] for i in self._arrays] + [paths[id(box)] for box in in_boxes]
        self.holders = [None] * len(self._arrays) + in_boxes
        self._result: Any = None
        self._types: Sequence[Any] = []
        self._args = args, kwargs
        self._changed: list[int] = []
        self._paths: list[tuple[Any, ...]] = []

    def traceable(self, fun: Callable[..., Any]) -> Callable[..., list[Any]]:
        """`fun` as a function of `leaves` that returns a list of arrays, new values of boxes last."""
        is_once = not is_trace_reused()

        def traced(*leaves: Any) -> list[Any]:
            nodes = list(self._nodes)
            for i, x in zip(self._arrays, leaves, strict=False):
                nodes[i] = x
            boxes, rest = {}, list(leaves[len(self._arrays) :])
            for box, structure in zip(self._boxes, self._structures, strict=True):
                boxes[id(box)] = jax.tree.unflatten(structure, rest[: structure.num_leaves])
                rest = rest[structure.num_leaves :]
            nodes = [boxes.get(id(x), x) for x in nodes]
            args, kwargs = jax.tree.unflatten(self._tree, nodes)
            before = [_at((args, kwargs), path) for path in self.paths]
            with traced_anew(is_once):
                results, self._result = _flatten_result(fun, fun(*args, **kwargs))
            self._check_boxes(fun, (args, kwargs), boxes)
            arrays = self._replaced(before, (args, kwargs))
            held = [jax.tree.leaves(boxes[id(box)]) for box in self._boxes]
            given = leaves[len(self._arrays) :]
            after = [x for values in held for x in values]
            if len(after) != len(given):
                raise ValueError(f"{_name(fun)} changed the structure of a Variable. {_CAPTURE}")
            self._changed = [i for i, (x, y) in enumerate(zip(given, after, strict=True)) if x is not y]
            return [*results, *(after[i] for i in self._changed), *arrays]

        return traced

    def trace(self, fun: Callable[..., Any], caller: str, types: Sequence[Any] | None = None) -> "ClosedJaxpr":
        """The jaxpr of `fun` over `leaves`, or over arrays of these types. Errors name the transformation `caller`."""
        if _inside_haiku():
            raise TypeError(
                f"Inside hk.transform, Haiku's parameters cannot leave the trace of {caller}. Wrap the transformed "
                f"function: jamp.{caller}(hk.transform(net).apply)."
            )
        before = self._stored(fun)
        try:
            closed: ClosedJaxpr = jax.make_jaxpr(self.traceable(fun))(*(types or self.leaves))
        except Exception as error:
            if type(error).__name__ != "TraceContextError":  # of Flax NNX
                raise
            raise TypeError(
                f"{getattr(fun, '__name__', type(fun).__name__)} changes an NNX module that is not its argument. Pass "
                f"the module: jamp.{caller}(lambda model, x: model(x), ...)(model, x)."
            ) from error
        if {id(x) for x in self._stored(fun)} - {id(x) for x in before}:
            raise TypeError(
                f"{_name(fun)} stores variables in a Linen module, which cannot leave the trace of {caller}. Transform "
                f"apply: jamp.{caller}(model.apply, ...)(variables, x)."
            )
        self._types = closed.out_avals
        return closed

    def _stored(self, fun: Any) -> list[Any]:
        """The arrays in the Linen modules that are arguments, or whose method `fun` is."""
        linen = sys.modules.get("flax.linen")
        if linen is None:
            return []
        modules = fun, getattr(fun, "__self__", None), *self._nodes
        bound = (x for x in modules if isinstance(x, linen.Module) and x.scope is not None)
        return [x for module in bound for x in jax.tree.leaves(module.variables)]

    @property
    def result_structure(self) -> Any:
        """The structure of the function's result, once it was traced."""
        return self._result

    def _check_boxes(self, fun: Callable[..., Any], after: Any, boxes: dict[int, Any]) -> None:
        """Raise if the function added, replaced or removed a box, or changed static parts of an object with boxes."""
        nodes, tree = jax.tree.flatten(after, is_leaf=is_box)
        are_same = {id(x) for x in nodes if is_box(x)} == {id(x) for x in boxes.values()}
        if self._boxes and not (are_same and tree == self._tree):
            raise ValueError(
                f"{_name(fun)} added, replaced or removed a Variable or an attribute of a module, which would be lost. "
                f"Assign to an existing Variable: variable[...] = x. {_CAPTURE}"
            )

    def _replaced(self, before: Sequence[Any], after: Any) -> list[Any]:
        """The arrays that the function put in place of others, such as attributes of a module. Keep their paths."""
        if jax.tree.structure(after, is_leaf=is_box) != self._tree:
            return []
        places = list(zip(self.paths, before, strict=True))[: len(self._arrays)]
        new = [(path, x) for path, old in places if (x := _at(after, path)) is not old and is_array(x)]
        self._paths = [path for path, _ in new]
        return [x for _, x in new]

    def finish(self, values: Sequence[Any]) -> Any:
        """Write changed parts back into the arguments, and return the function's result. Call `trace` first."""
        values = [_as_result(x, aval) for x, aval in zip(values, self._types, strict=True)]
        n = self._result.num_leaves
        changed, end = set(self._changed), n + len(self._changed)
        for path, x in zip(self._paths, values[end:], strict=True):
            _replace(self._args, path, x)
        in_boxes, start = build.replaced(self._in_boxes, self._changed, values[n:end]), 0
        for box, structure in zip(self._boxes, self._structures, strict=True):
            mine = range(start, start + structure.num_leaves)
            start = mine.stop
            if not changed.isdisjoint(mine):
                box.set_value(jax.tree.unflatten(structure, in_boxes[mine.start : mine.stop]).get_value())
        return jax.tree.unflatten(self._result, values[:n])


def _at(tree: Any, path: tuple[Any, ...]) -> Any:
    """The node at a path, or None in a class that does not name its parts."""
    for key in path:
        if isinstance(key, GetAttrKey):
            tree = getattr(tree, key.name, None)
        elif isinstance(key, DictKey | SequenceKey):
            tree = tree[key.key if isinstance(key, DictKey) else key.idx]
        else:
            return None
    return tree


def _replace(tree: Any, path: tuple[Any, ...], x: Any) -> None:
    """Put another leaf into a tree of mutable objects, in place."""
    parent, last = _at(tree, path[:-1]), path[-1]
    if isinstance(last, GetAttrKey):
        setattr(parent, last.name, x)
    else:
        parent[last.key if isinstance(last, DictKey) else last.idx] = x


def is_array(x: Any) -> bool:
    """Whether a leaf is traced. NumPy's integer and bool scalars (an axis, a flag) are not, like Python's.

    Nor are arrays of strings and objects, which JAX cannot trace.
    """
    if isinstance(x, np.ndarray) and not (x.dtype.kind in "biufc" or jnp.issubdtype(x.dtype, jnp.number)):
        return False
    return isinstance(x, (jax.Array, np.ndarray, np.inexact))


def arrays_and_types(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """The leaves that are arrays or stand for some, and a function that puts others in their places."""
    leaves, treedef = jax.tree.flatten((args, kwargs))
    places = [i for i, x in enumerate(leaves) if is_array(x) or _is_type(x)]

    def rebuild(values: Sequence[Any]) -> Any:
        return jax.tree.unflatten(treedef, build.replaced(leaves, places, values))

    return [leaves[i] for i in places], rebuild


def of_types(report: Callable[P, R]) -> Callable[P, R]:
    """A report, which traces and computes nothing, for arguments that may be types of arrays too."""

    def with_types(*args: P.args, **kwargs: P.kwargs) -> R:
        values, rebuild = arrays_and_types(args, kwargs)
        if not any(map(_is_type, values)):
            return report(*args, **kwargs)
        reports: list[R] = []

        def traced(values: list[Any]) -> None:
            args, kwargs = rebuild(values)
            reports.append(report(*args, **kwargs))

        jax.eval_shape(traced, values)
        return reports[0]

    return with_types


def _is_type(x: Any) -> bool:
    return isinstance(x, (jax.ShapeDtypeStruct, jax.core.ShapedArray))


def differentiable(args: tuple[Any, ...], kwargs: dict[str, Any], leaves: Sequence[Any]) -> list[int]:
    """Which leaves of a call are floating or complex arrays of the first argument that holds any."""
    for argument in (*args, *kwargs.values()):
        own = {id(x) for x in Call((argument,), {}).leaves}
        if places := [i for i, x in enumerate(leaves) if id(x) in own and is_inexact(x)]:
            return places
    return []


def with_numbers_as_arrays(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, in which Python numbers that `jax.grad` would differentiate are arrays.

    They are in the first argument that holds floats, if it holds nothing else. Beside flags, functions or integers, as
    in an Equinox model, Python numbers are options.
    """
    values = [*args, *kwargs.values()]
    for i, x in enumerate(values):
        leaves = jax.tree.leaves(x, is_leaf=is_box)
        if leaves and all(map(is_inexact, leaves)):
            if any(map(_is_number, leaves)):
                values[i] = jax.tree.map(lambda y: jnp.asarray(y) if _is_number(y) else y, x, is_leaf=is_box)
            break
        if any(is_inexact(y) for y in Call((x,), {}).leaves):
            break
    return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))


def _is_number(x: Any) -> bool:
    """Whether a leaf is a Python float or complex number. NumPy's float64 is a subclass."""
    return isinstance(x, (float, complex)) and not is_array(x)


def arguments_by_name(fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by the names of the parameters, or "args[0]" where they have none."""
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):  # a builtin has no signature
        parameters = []
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return {names[i] if i < len(names) else f"args[{i}]": x for i, x in enumerate(args)} | dict(sorted(kwargs.items()))


def leaf_names(fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, str]]:
    """For each of the `leaves` of a call of `fun`, the name of its argument and its path there: ("params", "['w']")."""
    names = list(arguments_by_name(fun, args, kwargs))
    name = lambda key: str(key.key) if isinstance(key, DictKey) else names[key.idx]
    return [(name(path[1]), keystr(path[2:])) for path in Call(args, kwargs).paths]


def parameter_paths(fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """The path of each of the `leaves` of a call of `fun`, such as "params['w']", or "" for a whole argument."""
    return [name + path if path else "" for name, path in leaf_names(fun, args, kwargs)]


def is_box(x: Any) -> bool:
    """Whether a leaf is a Flax NNX `Variable`. Other classes may have its methods, so only its type tells."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(x, nnx.Variable)


def nnx_state(x: Any) -> str:
    """The names of the kinds of Flax NNX's Variables in a tree that change without a gradient, such as `RngKey`."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return ""
    kinds = nnx.BatchStat, nnx.RngState, nnx.Cache, nnx.Intermediate
    found = (type(y).__name__ for y in jax.tree.leaves(x, is_leaf=is_box) if isinstance(y, kinds))
    return ", ".join(dict.fromkeys(found))


def _flatten_result(fun: Callable[..., Any], result: Any) -> tuple[list[Any], Any]:
    flat, tree = tree_flatten_with_path(result)
    for path, x in flat:
        if not isinstance(x, (jax.Array, np.ndarray, np.generic, bool, int, float, complex)):
            got = f"{type(x).__name__} {x!r} at result{keystr(path)}"
            raise TypeError(f"{_name(fun)} must return a pytree of arrays and numbers, got {got}.")
    return [x for _, x in flat], tree


def _as_result(x: Any, aval: Any) -> Any:
    """A result as a `jax.Array` of its traced type. Outside `jit`, a constant of a jaxpr may not be a `jax.Array`."""
    x = x if isinstance(x, jax.Array) or aval.dtype == jax.dtypes.float0 else jnp.asarray(x)
    return interpret.weaken(x) if aval.weak_type and not jax.typeof(x).weak_type else x


def _inside_haiku() -> bool:
    haiku = sys.modules.get("haiku")
    try:
        return haiku is not None and haiku.running_init() in (True, False)
    except ValueError:  # Haiku's answer outside of hk.transform
        return False


def _name(fun: Callable[..., Any]) -> str:
    return str(getattr(fun, "__name__", fun))


def check_function(fun: Any, call: str, hint: str = "") -> None:
    """Raise TypeError unless `fun` is a function to transform.

    The error shows the right `call`, such as "jamp.recompute({}, 0.5)", and the `hint`.
    """
    if got := not_a_function(fun):
        name = call.partition("(")[0].removeprefix("jamp.")
        given, of = ("model.apply", "(variables, x)") if _is_unbound_linen(fun) else ("loss_fn", "(params, batch)")
        raise TypeError(f"{name} takes a function, got {got}.{hint} Write {call.format(given)}{of}.")


def not_a_function(x: Any) -> str:
    """What `x` is, in a few words, if it cannot be transformed as a function; else an empty text."""
    if isinstance(x, str):
        return f"a str, {x!r}"
    if is_dtype(x):
        return f"the dtype {as_dtype(x) or getattr(x, '__name__', x)}"
    if _is_unbound_linen(x):
        return f"the Linen module {type(x).__name__}, whose function is model.apply"
    if isinstance(x, type):
        return f"the class {x.__name__}: decorate its method"
    if callable(x):
        return ""
    return repr(x) if x is None or isinstance(x, (int, float)) else describe(x)


def describe(x: Any) -> str:
    """A value in a few words: "an array float32[2, 3]", "a dict"."""
    if is_array(x):
        return f"an array {x.dtype}{list(x.shape)}"
    name = type(x).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def _is_unbound_linen(x: Any) -> bool:
    linen = sys.modules.get("flax.linen")
    return linen is not None and isinstance(x, linen.Module) and x.scope is None and x.parent is None
