"""What the cache keeps of each live request.

Owns a request's tokens as the tree compares them, and where the request stands in the tree. Does
not own which of these tokens are computed (`retention.py`), nor the request's blocks (`pool.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sgl_vllm.degrade import Guard
from sgl_vllm.protocol.cache_namespace import SHARED, CacheNamespace
from sgl_vllm.protocol.quoting import quoted
from sgl_vllm.radix.keys import TokenKeys, namespace_of
from sgl_vllm.radix.node import NO_MATCH, Match, Node
from sgl_vllm.radix.tokens import TOKEN_BYTES, Tokens

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.sgl_vllm.radix")


@dataclass(slots=True)
class RequestRecord:
    """Where a live request stands in the tree.

    Attributes:
        tokens: its tokens as the tree compares them; may lag behind the request.
        stays_out: of the tree. It has no tokens here then, and its namespace means nothing.
        own: the leaf that its inserts made.
        used: the cached tokens that its last lookup counts as used: the hit, and the rest of the
            match if nothing but the request itself keeps it from being read.
        num_found: how many cached tokens that lookup gave it.
        num_indexed: how many of its tokens have entered the tree with its last insert.
        num_hashed: up to which of its tokens whole blocks in the tree have got vLLM's hashes.
        num_with_states: up to which of its tokens its states have entered the tree.
        stops: the lengths of its prompt after which it leaves checkpoints (`checkpoints.py`),
            in ascending order.
        num_waits_for_room: in how many steps it has waited for room for its hit (`lookup.py`).
        num_shared: lengths of the prefixes that it shares with some of the other waiting requests,
            as the queue said before its last lookup.
        num_reused: how many tokens it had not to compute when it was admitted first; None until it
            has left the tree once.
        num_loaded: its cached tokens plus those that a KV connector loads for it; 0 without a load.
        member: what is known above of the request, since it has arrived.
    """

    request: Request
    namespace: CacheNamespace
    tokens: Tokens
    stays_out: bool = False
    own: Node | None = None
    used: Match = NO_MATCH
    num_found: int = 0
    num_indexed: int = 0
    num_hashed: int = 0
    num_with_states: int = 0
    stops: tuple[int, ...] = ()
    num_loaded: int = 0
    num_waits_for_room: int = 0
    num_shared: Sequence[int] = ()
    num_reused: int | None = None
    member: object = None

    @property
    def num_computed(self) -> int:
        """How many of its tokens were computed so far, those computed again after a preemption not
        counted."""
        num_tokens = min(self.request.num_computed_tokens, self.request.num_tokens)
        return max(0, num_tokens - self._num_reused_first)

    @property
    def _num_reused_first(self) -> int:
        return max(self.num_found, self.num_loaded) if self.num_reused is None else self.num_reused

    @property
    def leaf(self) -> Node | None:
        """The node that ends with its last token in the tree; None if there is none, or if another
        request's tokens follow in the same node."""
        if self.own is not None:
            return self.own
        num_tokens, node = self.used
        return node if node is not None and node.end == num_tokens else None

    def end_of_hit(self, num_tokens: int) -> Node | None:
        """The node of the tree that ends with `used`, if that is no more than `num_tokens`; None if
        it has left the tree, or another request's tokens follow in it."""
        num_used, node = self.used
        is_there = node is not None and node.parent is not None and node.end == num_used
        return node if is_there and num_used <= num_tokens else None


class RequestRecords:
    """The records of all live requests, each made when it is first asked for."""

    def __init__(self) -> None:
        self._keys = TokenKeys()
        self._records: dict[str, RequestRecord] = {}
        self._guard = Guard(
            "reading a prompt", "the request is served without the prefix cache", logger
        )

    def of(self, request: Request) -> RequestRecord | None:
        """The record of `request`, with all its tokens; None if it stays out of the tree."""
        record = self.lagging(request)
        if record is not None and len(record.tokens) < TOKEN_BYTES * request.num_tokens:
            record.tokens += self._keys.pack(request, len(record.tokens) // TOKEN_BYTES)
        return record

    def lagging(self, request: Request) -> RequestRecord | None:
        """As `of`, but the record's tokens may lag behind the request. Cheap while a long request
        decodes: `of` copies all its tokens for every new one."""
        record = self._records.get(request.request_id)
        if record is None or record.request is not request:
            record = self._records[request.request_id] = self._new(request)
        return None if record.stays_out else record

    def _new(self, request: Request) -> RequestRecord:
        try:
            namespace = namespace_of(request)
            if namespace is not None:
                return RequestRecord(request, namespace, self._keys.pack(request))
        except Exception:
            self._guard.record(f"request {quoted(request.request_id)}")
        return RequestRecord(request, SHARED, b"", stays_out=True)

    def all(self) -> Iterable[RequestRecord]:
        """The records of live requests, those that stay out of the tree included."""
        return self._records.values()

    def exclude(self, request: Request) -> None:
        """Keep a live request out of the tree from now on."""
        old = self._records.get(request.request_id)
        new = self._records[request.request_id] = RequestRecord(request, SHARED, b"", True)
        if old is not None and old.request is request:
            new.member = old.member

    def leave_tree(self, request: Request) -> None:
        """A live request releases its blocks, and may get others later."""
        old = self._records.get(request.request_id)
        if old is not None and old.request is request:
            new = self._records[request.request_id] = self._new(request)
            new.num_reused, new.member = old._num_reused_first, old.member

    def discard(self, request: Request) -> None:
        """Forget a request, whether it is known or not."""
        self._records.pop(request.request_id, None)

    def clear(self) -> None:
        self._records.clear()


def is_first_admission(request: Request) -> bool:
    """Whether a waiting request has not run yet: vLLM takes the statistics of its prefill with the
    first token that it samples. False on a vLLM before 0.31, which has no such statistics."""
    return getattr(request, "prefill_stats", None) is not None and not request.num_preemptions
