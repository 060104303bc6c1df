"""What a run computes of the values that a traced program has stand-ins for."""

from __future__ import annotations

from collections.abc import Callable

from sgl_vllm.lang.ir import Value
from sgl_vllm.lang.tracing.standin import Leaf, StandIn


class Environment:
    """The values of one run, each computed at most once. `leaf` gives the value of a leaf."""

    def __init__(self, leaf: Callable[[Leaf], Value]) -> None:
        self._leaf = leaf
        self._values: dict[int, tuple[StandIn, Value]] = {}
        """By `id`, since a stand-in cannot be compared. Keeping it keeps its `id` from another."""

    def value(self, wanted: Value) -> Value:
        """Compute `wanted`; a constant is its own value. Raises what the operation raises."""
        if not isinstance(wanted, StandIn):
            return wanted
        if wanted._leaf is not None:
            return self._leaf(wanted._leaf)
        if id(wanted) not in self._values:
            args = [self.value(arg) for arg in wanted._args]
            kwargs = {key: self.value(arg) for key, arg in wanted._kwargs.items()}
            self._values[id(wanted)] = wanted, wanted._function(*args, **kwargs)
        return self._values[id(wanted)][1]
