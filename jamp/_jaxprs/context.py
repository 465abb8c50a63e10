"""Where a jaxpr is: the constructs around it."""

import functools
import math
from typing import NamedTuple

from jamp._jaxprs import constructs, ir
from jamp._jaxprs.ir import JaxprEqn
from jamp._jaxprs.source import is_transposed, scope, scope_path, user_line


class Context(NamedTuple):
    """The constructs around a jaxpr, outermost first. Most of what a pass asks about a place follows from them.

    Equal bodies at different places have different contexts. A pass whose result depends on a part of the context gives
    that part to the cache, so that it rewrites a body once for all places where this part is equal.

    Attributes:
      around: The constructs.
      in_shard_map: Whether the function is called inside a shard_map, which is not in its jaxpr.
      in_backward_rule: Whether it is in the backward rule of a custom_vjp, around which no equation is transposed.
    """

    around: tuple[JaxprEqn, ...] = ()
    in_shard_map: bool = False
    in_backward_rule: bool = False

    def inside(self, eqn: JaxprEqn) -> "Context":
        """The context of the bodies of a construct here."""
        return self._replace(around=(*self.around, eqn))

    @property
    def shard_map(self) -> JaxprEqn | None:
        """The innermost shard_map in the jaxpr of the function."""
        return next((eqn for eqn in reversed(self.around) if ir.name(eqn) == "shard_map"), None)

    @property
    def in_loop(self) -> bool:
        """Whether a scan is around."""
        return any(ir.name(eqn) == "scan" for eqn in self.around)

    @property
    def is_manual(self) -> bool:
        """Whether a shard_map is around, in the jaxpr of the function or not."""
        return self.in_shard_map or self.shard_map is not None

    @property
    def times(self) -> int:
        """How often an equation here runs. The body of a while and each branch of a cond count once."""
        return math.prod(map(constructs.iterations, self.around))

    @property
    def is_backward(self) -> bool:
        """Whether it is part of a backward pass."""
        return self.in_backward_rule or any(map(is_transposed, self.around))

    @property
    def path(self) -> str:
        """The names in the name stacks, as rules match them: "/jvp/h_3/attn/"."""
        return functools.reduce(lambda path, eqn: scope_path(eqn, path), self.around, "")

    @property
    def scope(self) -> str:
        """The name scopes, as reports show them: "Net/h_3/attn"."""
        return functools.reduce(lambda path, eqn: scope(eqn, path), self.around, "")

    @property
    def line(self) -> str:
        """The user's line of the innermost construct that has one."""
        return next(filter(None, map(user_line, reversed(self.around))), "")
