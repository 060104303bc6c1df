"""Requests whose KV differs from what their own prompt would produce, and how much of it is exact.

Owns what the pool knows of such requests: where their exact KV ends, past which nothing of them is
indexed or hashed, and which blocks of others they still need. Does not own why their KV is inexact
(`approximate/`). Pure but for the blocks, which are vLLM's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


@dataclass(slots=True)
class _Inexact:
    num_exact: int
    held: list[Sequence[KVCacheBlock]] = field(default_factory=list)


@dataclass(eq=False)
class InexactRequests:
    """The live requests with inexact KV, by their ids; false if there are none.

    Args:
        touch, free: take and give back a reference to blocks.
    """

    _touch: Callable[[Sequence[KVCacheBlock]], None]
    _free: Callable[[Sequence[KVCacheBlock]], None]
    _requests: dict[str, _Inexact] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def begin(
        self, request_id: str, num_exact: int, needed: Sequence[Sequence[KVCacheBlock]]
    ) -> None:
        """From token `num_exact` on, a request's KV will be inexact. Until `release_first`
        gives them back, it holds the blocks `needed`."""
        self.end(request_id)
        for blocks in needed:
            self._touch(blocks)
        self._requests[request_id] = _Inexact(num_exact, [*needed])

    def release_first(self, request_id: str) -> None:
        """The first of the blocks that a request needed, and still held, are copied."""
        self._free(self._requests[request_id].held.pop(0))

    def num_exact(self, request_id: str, num_tokens: int) -> int:
        """How many of a request's first `num_tokens` have exact KV."""
        found = self._requests.get(request_id)
        return num_tokens if found is None else min(num_tokens, found.num_exact)

    def end(self, request_id: str) -> None:
        """A request, if it is known, has no KV any more."""
        found = self._requests.pop(request_id, None)
        if found is not None:
            for blocks in found.held:
                self._free(blocks)
