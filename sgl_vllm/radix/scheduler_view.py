"""What the cache asks of the scheduler above it, as a protocol given at construction.

Owns the questions. Does not own the answers, which the scheduler's assembly gives. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from sgl_vllm.radix.node import Node


class SchedulerView(Protocol):
    """The scheduler, as the cache sees it."""

    def first_scored_token(self, request: Request) -> int | None:
        """The first prompt token whose score `request` asks for; None if it asks for none.

        A hit must end before the token that precedes it, whose forward pass gives the score.
        """

    def num_shared_with_siblings(self, request: Request) -> Sequence[int]:
        """Lengths, in tokens, of the prefixes that waiting `request` shares with other waiting
        requests: with some of those that share more than a few tokens with it."""

    def wanted_nodes(self) -> Collection[Node]:
        """The nodes that waiting requests match, to be evicted last. Asked once per eviction; equal
        answers within one step must be the same object."""


class NoScheduler:
    """A scheduler without scored requests and without a known queue."""

    def first_scored_token(self, request: Request) -> int | None:
        return None

    def num_shared_with_siblings(self, request: Request) -> Sequence[int]:
        return ()

    def wanted_nodes(self) -> Collection[Node]:
        return ()
