"""What requests tell of the contexts that they continue, and that they leave in the cache.

Owns which requests leave a context, under which kinds of ends its pause is learned, and passing on
both. Does not own the estimate (`continuations.py`), nor what a hint says (`protocol/hints.py`).
"""

from __future__ import annotations

import time
from collections.abc import Hashable
from typing import TYPE_CHECKING

from vllm.v1.request import RequestStatus

from sgl_vllm.protocol.hints import NO_HINTS, Hints
from sgl_vllm.radix.continuations import Continuations
from sgl_vllm.radix.request_record import RequestRecord
from sgl_vllm.radix.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from sgl_vllm.radix.pool import RadixBlockPool


class Contexts:
    """The contexts of one cache.

    Args:
        pool: the blocks, and the tree over them. An error in a call below switches its tree off.
        continuations: learns which contexts will be continued; None if nothing asks for that.
    """

    def __init__(self, pool: RadixBlockPool, continuations: Continuations | None) -> None:
        self._pool = pool
        self._continuations = continuations

    def clear(self) -> None:
        """Forget all contexts and pauses. The cache must be empty."""
        if self._continuations is not None:
            self._continuations.clear()

    def arrived(self, request: Request, hints: Hints) -> None:
        """`request` has arrived with these hints. It may continue a context."""
        if self._continuations is not None or hints is not NO_HINTS:
            self._pool.guarded(self._arrived, request, hints)

    def _arrived(self, request: Request, hints: Hints) -> None:
        record = self._pool.records.of(request)
        if record is not None:
            record.hints = hints
            if self._continuations is not None:
                self._continuations.arrived(record.namespace, record.tokens, time.monotonic())

    def left(self, request: Request, record: RequestRecord) -> None:
        """What `request` has computed is in the tree. If it got its whole answer, this is a
        context."""
        if self._continuations is None and record.hints is NO_HINTS:
            return
        leaf, tree = record.own or record.found.node, self._pool.tree
        if leaf is None or leaf.parent is None or tree is None or not request.is_finished():
            return
        if record.hints.ends:
            tree.record_end(leaf, record.hints.ends)
        elif self._continuations is not None and request.status != RequestStatus.FINISHED_ABORTED:
            self._continuations.ended(
                record.namespace,
                record.tokens[: TOKEN_BYTES * request.num_prompt_tokens],
                leaf,
                _kinds_of_end(request, record),
                time.monotonic(),
                record.hints.next_in_s,
            )

    def num_expected_blocks(self) -> int:
        """Evictable blocks of contexts that will be continued soon."""
        return self._pool.guarded(self._num_expected_blocks) or 0

    def _num_expected_blocks(self) -> int:
        tree = self._pool.tree
        if self._continuations is None or tree is None:
            return 0
        return self._continuations.num_expected_blocks(tree.blocks, time.monotonic())


def _kinds_of_end(request: Request, record: RequestRecord) -> list[Hashable]:
    """What the pause after an answer is learned under. An answer that calls a tool ends with other
    tokens than one to a person."""
    if record.hints.next_tool is not None:
        return [("tool", record.hints.next_tool)]
    last = request.output_token_ids[-2:]
    return [tuple(last), ("last", *last[-1:])]
