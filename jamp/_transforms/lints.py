"""The lints of a function under autocast, as texts with the rule that raises each."""

from collections.abc import Callable

import numpy as np

from jamp._autocast.lint import Lint, lints
from jamp._transforms.passes import Passes


def lints_of(traced_with: Callable[[dict[str, str]], Passes]) -> tuple[str, ...]:
    """Return what needs more digits than 16 bit, by what the code does: the line, and a rule with which it has them.

    Args:
      traced_with: Traces the function with some more rules.
    """
    texts: dict[str, None] = {}
    traced = traced_with({})
    has_rules = traced.target.wide == np.float32  # The rules of a compute dtype of float32 raise nothing from 16 bit.
    for x in _found(traced):
        tried = (dict(x.rules[:n]) for n in range(1, len(x.rules) + 1) if has_rules)
        rules = next((rules for rules in tried if x not in _found(traced_with(rules))), None)
        cure = f"rules={rules} raises it" if rules else "compute it in float32 in the code"
        texts[f"{x.source}: {x.what}; {cure}"] = None
    return tuple(texts)


def _found(traced: Passes) -> list[Lint]:
    return list(dict.fromkeys(lints(traced.decided, traced.decisions, traced.call.leaves)))
