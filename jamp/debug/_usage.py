"""Checks of how the functions of `jamp.debug` are called. Each error shows the line to write."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import jax

from jamp._arguments import is_array, not_a_function

P = ParamSpec("P")
R = TypeVar("R")


def called_as(call: str, *, functions: int = 0, trees: int = 0) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Check the arguments of a function: their number, and that the first ones are functions, or trees of arrays.

    Args:
      call: The call that an error shows.
      functions: How many of the first arguments must be functions.
      trees: How many of the first arguments must be pytrees, and no functions.
    """

    def checked(fun: Callable[P, R]) -> Callable[P, R]:
        signature, name = inspect.signature(fun), f"jamp.debug.{fun.__name__}"

        @functools.wraps(fun)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                given = signature.bind(*args, **kwargs).arguments
            except TypeError as error:
                raise TypeError(f"{name} {_reason(str(error))}. Write {call}.") from None
            names = list(signature.parameters)
            for parameter in names[:functions]:
                if got := not_a_function(given[parameter]):
                    raise TypeError(f"{name} takes a function as {parameter!r}, got {got}. Write {call}.")
            for parameter in names[:trees]:
                if callable(x := given[parameter]) and not any(map(is_array, jax.tree.leaves(x))):
                    raise TypeError(f"{name} takes a pytree of arrays as {parameter!r}, got a function. Write {call}.")
            return fun(*args, **kwargs)

        return wrapper

    return checked


def _reason(text: str) -> str:
    """What is wrong with a call, from the message of `inspect.Signature.bind`."""
    return "got too many arguments" if text.startswith("too many") else f"is {text}" if "missing" in text else text


@contextlib.contextmanager
def naming_states(call: str, args: tuple[Any, ...]) -> Iterator[None]:
    """If the body fails and the first argument is the state of an optimizer, raise an error that says so."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        if args and is_state(args[0]):
            got = f"the state of an optimizer ({type(args[0]).__name__})"
            raise TypeError(f"The function failed ({error}), and its first argument is {got}. Write {call}.") from error
        raise


def is_state(x: Any) -> bool:
    """Whether a value is the state of an optimizer from jamp or Optax, or a tuple of such states."""
    if not isinstance(x, tuple) or not x:
        return False
    if type(x) is tuple:
        return all(map(_is_part_of_state, x))
    return _is_part_of_state(x)


def _is_part_of_state(x: Any) -> bool:
    package = type(x).__module__.partition(".")[0]
    return is_state(x) if type(x) is tuple else isinstance(x, tuple) and package in ("jamp", "optax")


def check_concrete(caller: str, leaves: Sequence[Any]) -> None:
    """Raise if a function that runs others on real values is called inside a transformation."""
    if any(isinstance(x, jax.core.Tracer) for x in leaves):
        raise TypeError(
            f"jamp.debug.{caller} runs the function on real values, got traced ones. Call it outside jit, grad, vmap "
            f"and scan: {caller}(jax.grad(fun))(...)."
        )
