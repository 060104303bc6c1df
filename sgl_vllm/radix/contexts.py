"""What requests tell of the contexts that they continue, and that they leave in the cache.

A request ahead of time (`Hints.is_ahead`) is none of its program's steps: it neither continues a
context nor leaves one.

Owns which requests leave a context, which program they belong to and how much of it remains, under
which kinds of ends its pause is learned, and passing these on. Does not own the estimates
(`continuations.py`, `step_graphs.py`), nor the states of programs (`programs.py`), nor what a hint
says (`protocol/hints.py`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar  # Any: arguments that pass through

from vllm.v1.request import RequestStatus

from sgl_vllm.degrade import Guard
from sgl_vllm.protocol.cache_namespace import CacheNamespace
from sgl_vllm.protocol.hints import MAX_HINT_LENGTH, NO_HINTS, Hint, Hints
from sgl_vllm.protocol.request_ids import is_of_client
from sgl_vllm.radix.continuations import Continuations, Origin
from sgl_vllm.radix.node import Namespace, Node
from sgl_vllm.radix.programs import (
    ProgramGauges,
    ProgramsSnapshot,
    count_programs,
    longest_in_tool_s,
    most_frequent_tools,
    state_of,
)
from sgl_vllm.radix.request_record import RequestRecord
from sgl_vllm.radix.snapshot import ContextSnapshot
from sgl_vllm.radix.step_graphs import StepGraphs
from sgl_vllm.radix.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from sgl_vllm.radix.pool import RadixBlockPool

logger = logging.getLogger("vllm.sgl_vllm.radix")

Result = TypeVar("Result")


class Standing(NamedTuple):
    """Where a request stands in its program.

    Attributes:
        num_remaining: how many tokens the program is expected to have left to compute. If its graph
            does not tell, as many as were computed for its context so far: the longer it has run,
            the longer it is likely to go on.
        fork: equal for the branches of one fork, as far as the graph tells of them.
    """

    num_remaining: int = 0
    fork: Hashable = None


UNKNOWN = Standing()


class Contexts:
    """The contexts of one cache.

    Args:
        pool: the blocks, and the tree over them. While that is off, no contexts are known.
        continuations: remembers the contexts, and learns which will be continued. None if nothing
            says which requests arrive.
    """

    def __init__(self, pool: RadixBlockPool, continuations: Continuations | None) -> None:
        self._pool = pool
        self._continuations = continuations
        self._graphs = StepGraphs()
        self._guard = Guard(
            "the record of programs", "the request counts as one without hints", logger
        )

    def clear(self) -> None:
        """Forget all contexts, pauses and graphs. The cache must be empty."""
        self._graphs = StepGraphs()
        if self._continuations is not None:
            self._continuations.clear()

    def arrived(self, request: Request, hints: Hints) -> Standing:
        """`request` has arrived with these hints. It may continue a context."""
        if self._continuations is None and hints is NO_HINTS:
            return UNKNOWN
        return self._guarded(self._arrived, request, hints) or UNKNOWN

    def _arrived(self, request: Request, hints: Hints) -> Standing:
        record = self._pool.records.of(request)
        if record is None or record.namespace is None:
            return UNKNOWN
        record.hints = hints
        if hints.is_ahead:
            return UNKNOWN
        record.step = self._graphs.step_of(record.namespace, hints)
        if self._continuations is not None:
            now_s = time.monotonic()
            context = self._continuations.arrived(record.namespace, record.tokens, now_s)
            if context is not None:
                record.is_continuation, record.num_served = True, context.origin.num_served
        step = record.step
        if step is None:
            return Standing(record.num_served)
        fork, remaining = None, step.remaining_tokens
        if step.fork is not None and hints.program is not None:
            fork = hints.program, step.graph, step.fork
        return Standing(record.num_served if remaining is None else remaining, fork)

    def left(self, request: Request, record: RequestRecord) -> None:
        """What `request` has computed is in the tree. If it got its whole answer, this is a
        context."""
        if record.hints.is_ahead or (self._continuations is None and record.hints is NO_HINTS):
            return
        self._guarded(self._left, request, record)

    def _left(self, request: Request, record: RequestRecord) -> None:
        has_answer = request.is_finished() and request.num_output_tokens > 0
        if record.step is not None and has_answer:
            record.step.ended(record.num_computed)
        leaf, tree = record.leaf, self._pool.tree
        if leaf is None or leaf.parent is None or tree is None or not request.is_finished():
            return
        if record.hints.ends:
            tree.record_end(leaf, record.hints.ends)
            if self._continuations is not None:
                self._continuations.program_ended(_program_of(record), time.monotonic())
        elif self._continuations is not None and request.status != RequestStatus.FINISHED_ABORTED:
            self._continuations.ended(
                record.namespace,
                record.tokens[: TOKEN_BYTES * request.num_prompt_tokens],
                leaf,
                _kinds_of_end(request, record),
                time.monotonic(),
                record.hints.next_in_s,
                Origin(
                    request.request_id,
                    _program_of(record),
                    _next_tool(record),
                    record.is_continuation,
                    record.num_served + record.num_computed,
                ),
            )

    def called_tool(self, request_id: str, tool: str) -> None:
        """The answer to the requests that their client knows by this id calls `tool`. Without
        effect if it has been continued already, or is forgotten."""
        if self._continuations is not None:
            self._guarded(
                self._continuations.called_tool,
                lambda name: is_of_client(name, request_id),
                tool[:MAX_HINT_LENGTH],
            )

    def programs(self) -> ProgramGauges | None:
        """How many programs are in each state; None if that is not known. O(requests and contexts):
        0.4 ms for 1,000 requests and all that is remembered."""
        if self._continuations is None:
            return None
        return self._guarded(self._programs, self._continuations, time.monotonic())

    def _programs(self, continuations: Continuations, now_s: float) -> ProgramGauges:
        return count_programs(
            map(_program_of, self._pool.records.all()),
            (context for _, context in continuations.paused(now_s)),
            continuations.ended_programs(now_s),
        )

    def snapshot(
        self, *, shows_tools: bool
    ) -> tuple[ProgramsSnapshot | None, dict[Node, ContextSnapshot]]:
        """The programs of all tenants, and by node the contexts that end there and have not been
        continued. Nothing if that is not known. O(requests and contexts).

        Args:
            shows_tools: with the names of tools, of tenants without a `cache_salt`.
        """
        programs = self.programs()
        if self._continuations is None or programs is None:
            return None, {}
        now_s = time.monotonic()
        paused = list(self._continuations.paused(now_s))
        named = {one for namespace, one in paused if shows_tools and not is_salted(namespace)}
        contexts = {
            one.leaf: ContextSnapshot(
                state_of(one).value,
                round(now_s - one.ended_s, 3),
                str(one.origin.tool) if one in named and one.origin.tool is not None else None,
            )
            for _, one in paused
            if one.leaf is not None
        }
        longest_s = longest_in_tool_s((one for _, one in paused), now_s)
        tools = most_frequent_tools(named, now_s)
        return ProgramsSnapshot(programs, longest_s, tools), contexts

    def num_expected_blocks(self) -> int:
        """Evictable blocks of contexts that will be continued soon."""
        return self._guarded(self._num_expected_blocks) or 0

    def _num_expected_blocks(self) -> int:
        tree = self._pool.tree
        if self._continuations is None or tree is None:
            return 0
        return self._continuations.num_expected_blocks(tree.blocks, time.monotonic())

    def _guarded(self, step: Callable[..., Result], *args: Any) -> Result | None:
        """The result of `step`; None if it fails, or while the tree is off."""
        return None if self._pool.tree is None else self._guard.run(step, *args)


def is_salted(namespace: Namespace) -> bool:
    """Whether a namespace is that of a tenant with a `cache_salt`."""
    return isinstance(namespace, CacheNamespace) and namespace.salt is not None


def _program_of(record: RequestRecord) -> Hashable:
    """Equal for requests of one program of one tenant. Without the hint a request has its own."""
    namespace = record.namespace
    if record.hints.program is None or namespace is None:
        return record.request.request_id
    return namespace.adapter, namespace.salt, record.hints.program


def _next_tool(record: RequestRecord) -> Hint:
    """What runs before the context is continued, as its client or its program's graph says."""
    if record.hints.next_tool is not None or record.step is None:
        return record.hints.next_tool
    return record.step.next_tool


def _kinds_of_end(request: Request, record: RequestRecord) -> list[Hashable]:
    """What the pause after an answer is learned under, the most specific first. An answer that
    calls a tool ends with other tokens than one to a person."""
    step = [("step", record.hints.step)] if record.step is not None else []
    tool = _next_tool(record)
    if tool is not None:
        return [*step, ("tool", tool)]
    last = request.output_token_ids[-2:]
    return [*step, tuple(last), ("last", *last[-1:])]
