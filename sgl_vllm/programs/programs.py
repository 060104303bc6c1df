"""The programs that use an engine: what each request continues, and what it leaves in the cache.

Owns which program a request belongs to, how much was computed for it so far, which requests leave a
context, and under which kinds of ends its pause is learned. Does not own the estimates
(`continuations.py`), the states of programs (`states.py`), nor what a hint says
(`protocol/hints.py`).

The queue tells of arrivals, and asks. What ended requests have left is read from the cache before
anything else is done here. A request ahead of time (`Hints.is_ahead`) is none of its program's
steps: it neither continues a context nor leaves one.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar  # Any: JSON, and what passes through

from sgl_vllm.degrade import Guard
from sgl_vllm.lru_per_tenant import LruPerTenant
from sgl_vllm.programs.continuations import NEAR_TOKENS, Answer, Context, Continuations, Origin
from sgl_vllm.programs.states import ProgramGauges, count_programs, programs_json, state_of
from sgl_vllm.protocol.hints import MAX_HINT_LENGTH, NO_HINTS, Hints
from sgl_vllm.protocol.request_ids import is_of_client
from sgl_vllm.radix.keys import is_salted
from sgl_vllm.radix.node import Namespace, Node
from sgl_vllm.radix.tokens import TOKEN_BYTES, Tokens
from sgl_vllm.step_hooks import StepHooks

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from sgl_vllm.radix.manager import RadixKVCacheManager
    from sgl_vllm.radix.retention import Left
    from sgl_vllm.radix.tree import RadixTree

logger = logging.getLogger("vllm.sgl_vllm.radix")

OPENING_TOKENS = 128
"""The first request of a conversation counts as an agent's if it starts with this many tokens of
agents' prompts, because agents share a system prompt and tools. Chat templates start all prompts
with fewer tokens."""

MIN_AGENT_STEPS = 4
"""Once so many requests that begin with the same tokens were agents' and none since was a person's,
these tokens are an agent's opening."""

MAX_OPENINGS = 64
"""At most this many openings are remembered."""

_OPENING_BYTES = OPENING_TOKENS * TOKEN_BYTES

Json = dict[str, Any]
Result = TypeVar("Result")


class Standing(NamedTuple):
    """Where a request stands in its program.

    Attributes:
        num_served: how many tokens were computed for its context so far: the longer it has run, the
            longer it is likely to go on.
        is_agent: whether it continues an agent's conversation, which called a tool or was continued
            within a second, or is a first request with an agent's opening.
    """

    num_served: int = 0
    is_agent: bool = False


UNKNOWN = Standing()


class _Opening(NamedTuple):
    tenant: Namespace
    tokens: Tokens


@dataclass(slots=True)
class _Member:
    """What is known of a live request.

    Attributes:
        program: equal for requests of one program of one tenant. Without a hint a request has its
            own.
        hints: what its client says of what follows.
        is_continuation: whether it continues the context of an earlier request.
        standing: where it stands in its program.
        dropped: last tokens of its conversation's answers that the next prompt leaves out.
    """

    program: Hashable
    hints: Hints = NO_HINTS
    is_continuation: bool = False
    standing: Standing = UNKNOWN
    dropped: frozenset[Hashable] = frozenset()

    def kinds_of_end(self, last: tuple[int, ...]) -> list[Hashable]:
        """What the pause after its answer is learned under, the most specific first. An answer that
        calls a tool ends with other tokens than one to a person."""
        if self.hints.next_tool is not None:
            return [("tool", self.hints.next_tool)]
        return [last, ("last", *last[-1:])]


class Programs(StepHooks):
    """The programs of one engine. While the tree is off, nothing is known of them."""

    def __init__(self, radix: RadixKVCacheManager) -> None:
        self._radix = radix
        self._continuations = Continuations()
        self._agent_openings: LruPerTenant[_Opening, int] = LruPerTenant(MAX_OPENINGS)
        self._guard = Guard(
            "the record of programs", "the request counts as one without hints", logger
        )

    def arrived(self, request: Request, hints: Hints) -> Standing:
        """`request` has arrived with these hints. It may continue a context."""
        return self._guarded(self._arrived, request, hints) or UNKNOWN

    def _arrived(self, tree: RadixTree, request: Request, hints: Hints) -> Standing:
        record = self._radix.pool.records.of(request)
        if record is None:
            return UNKNOWN
        member = record.member = _Member(request.request_id, hints)
        if hints.program is not None:
            member.program = record.namespace.adapter, record.namespace.salt, hints.program
        if hints.is_ahead:
            return UNKNOWN
        num_cached, node = tree.match_prefix(record.namespace, record.tokens)
        if node is not None and isinstance(node.context, Context):
            member.dropped = node.context.origin.dropped_before(record.tokens, num_cached)
        now_s = time.monotonic()
        context = self._continuations.arrived(record.namespace, record.tokens, now_s)
        opening = _Opening(record.namespace, record.tokens[:_OPENING_BYTES])
        num_steps = self._agent_openings.get(opening) or 0
        if context is None:
            member.standing = Standing(is_agent=num_steps >= MIN_AGENT_STEPS)
        else:
            member.is_continuation = True
            member.standing = Standing(context.origin.num_served, context.is_agents(now_s))
            is_agent = member.standing.is_agent
            self._agent_openings.put(opening, num_steps + 1 if is_agent else 0)
        return member.standing

    def step_starts(self) -> None:
        """A step begins, which may evict what ended requests have left."""
        if self._radix.retention.left:
            self._read_left()

    def _left(self, tree: RadixTree, left: Left) -> None:
        """What an ended request has computed is in the tree. If it got its whole answer, this is a
        context."""
        member, leaf, num_prompt = left.member, left.leaf, left.num_prompt_tokens
        if not isinstance(member, _Member) or member.hints.is_ahead:
            return
        hints = member.hints
        for keep_s, share in hints.kept:
            kept = left.tokens[: TOKEN_BYTES * math.ceil(share * num_prompt)]
            self._radix.pool.guarded(tree.keep, left.namespace, kept, keep_s)
        if leaf is None or leaf.parent is None:
            return
        if hints.ends:
            self._radix.pool.guarded(tree.record_end, leaf, hints.ends)
            self._continuations.program_ended(member.program, left.ended_s)
        elif not left.is_aborted:
            if left.last in member.dropped:
                self._radix.pool.guarded(tree.record_drop, leaf, num_prompt)
            begin = TOKEN_BYTES * num_prompt
            first = left.tokens[begin : begin + TOKEN_BYTES * NEAR_TOKENS]
            self._continuations.ended(
                left.namespace,
                left.tokens[:begin],
                leaf,
                member.kinds_of_end(left.last),
                left.ended_s,
                hints.next_in_s,
                Origin(
                    left.request_id,
                    member.program,
                    hints.next_tool,
                    member.is_continuation,
                    member.standing.is_agent,
                    member.standing.num_served + left.num_computed,
                    Answer(num_prompt, first, left.last),
                    member.dropped,
                ),
            )

    def called_tool(self, request_id: str, tool: str) -> None:
        """The answer to the requests that their client knows by this id calls `tool`. Without
        effect if it has been continued already, or is forgotten."""
        self._guarded(
            lambda tree: self._continuations.called_tool(
                lambda name: is_of_client(name, request_id), tool[:MAX_HINT_LENGTH]
            )
        )

    def sections(self) -> Mapping[str, Any]:
        """How many programs are in each state, if that is known. O(requests and contexts): 0.4 ms
        for 1,000 requests and all that is remembered."""
        return {"programs": self._guarded(self._counts, time.monotonic())}

    def _counts(self, tree: RadixTree, now_s: float) -> ProgramGauges:
        return count_programs(
            self._running(),
            (context for _, context in self._continuations.paused(now_s)),
            self._continuations.ended_programs(now_s),
        )

    def _running(self) -> Iterator[Hashable]:
        """The program of each live request."""
        for one in self._radix.pool.records.all():
            member = one.member
            yield member.program if isinstance(member, _Member) else one.request.request_id

    def snapshot(self, *, shows_tools: bool) -> tuple[Json | None, dict[Node, Json]]:
        """The programs of all tenants as JSON, and by node the contexts that end there and have not
        been continued: the state of their program, for how long they have paused, and the tool that
        runs. Nothing if that is not known. O(requests and contexts).

        Args:
            shows_tools: with the names of tools, of tenants without a `cache_salt`.
        """
        return self._guarded(self._snapshot, time.monotonic(), shows_tools) or (None, {})

    def _snapshot(
        self, tree: RadixTree, now_s: float, shows_tools: bool
    ) -> tuple[Json, dict[Node, Json]]:
        paused = list(self._continuations.paused(now_s))
        named = {one for namespace, one in paused if shows_tools and not is_salted(namespace)}
        contexts = {
            one.leaf: {
                "state": state_of(one).value,
                "paused_s": round(now_s - one.ended_s, 3),
                "tool": str(one.origin.tool)
                if one in named and one.origin.tool is not None
                else None,
            }
            for _, one in paused
            if one.leaf is not None
        }
        counts = self._counts(tree, now_s)
        return programs_json(counts, [one for _, one in paused], named, now_s), contexts

    def expect_within(self, horizon_s: float) -> None:
        """From now on, contexts that will be continued within this many seconds are expected; with
        0 none is."""
        self._continuations.horizon_s = horizon_s

    def agent_pause_s(self, share: float) -> float:
        """This share of the pauses until agents continued a context was no longer, in seconds."""
        return self._continuations.agent_pause_s(share)

    def num_expected_blocks(self) -> int:
        """Evictable blocks of contexts that will be continued soon."""
        return (
            self._guarded(
                lambda tree: self._continuations.num_expected_blocks(tree.blocks, time.monotonic())
            )
            or 0
        )

    def _guarded(self, step: Callable[..., Result], *args: Any) -> Result | None:
        """The result of `step`, called with the tree when all that was left is known; None if it
        fails, or while the tree is off."""
        tree = self._read_left()
        return None if tree is None else self._guard.run(step, tree, *args)

    def _read_left(self) -> RadixTree | None:
        """Note what ended requests have left. Returns the tree; None while it is off."""
        tree, retention = self._radix.tree, self._radix.retention
        if tree is not None:
            left, retention.left = retention.left, []
            for one in left:
                self._guard.run(self._left, tree, one)
        return tree
