"""Which cached contexts will be continued soon, as far as earlier pauses tell.

Owns the contexts that ended requests have left, the pauses until they are continued, and the
estimate that follows from them. Does not own what is done about it (`admission.py`), nor what is
shown (`states.py`). Pure.

A session of an agent or a chat is continued by a request whose prompt extends an earlier prompt.
What came between, a tool that ran or a person who thought, is a pause that the engine sees without
being told. How an answer ended says which of the two to expect: models end tool calls with other
tokens than their last word. So pauses are learned by *kinds* of ends, which the caller gives.

Nothing that one tenant does decides what is expected of another, once that one is known: pauses are
learned for each tenant by itself, the tenant that has the most of what is remembered loses its
oldest, and a tenant whose contexts do not come back when they are expected is believed no longer.
"""

from __future__ import annotations

import statistics
import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from sgl_vllm.lru_per_tenant import LruPerTenant, get_or_make
from sgl_vllm.programs.pauses import MIN_OUTCOMES, Pauses
from sgl_vllm.protocol.hints import Hint
from sgl_vllm.radix.blocks import BlockTable
from sgl_vllm.radix.node import Namespace, Node
from sgl_vllm.radix.tokens import TOKEN_BYTES, Tokens

MAX_REMEMBERED = 512
"""At most this many contexts can be recognized when they are continued."""

MAX_KINDS = 256
"""Pauses are learned for at most this many kinds, those used last."""

MAX_TENANTS = 256
"""For at most this many tenants, those used last, it is known how often they are mistaken."""

TAIL_TOKENS = 32
"""A prompt is recognized by its length and this many tokens at its end."""

NEAR_TOKENS = 8
"""A prompt may differ this far before an answer: some templates open the reasoning there."""

MAX_DROPPED = 8
"""Limit on the ends of dropped answers that a conversation remembers."""

MAX_PAUSE_S = 3600.0
"""A context that has paused for longer no longer counts among those of `paused`."""

KEEP_ENDED_S = 600.0
"""For how long the end of a program is remembered."""

AGENT_PAUSE_S = 1.0
"""No person answers faster, so a machine does."""

_TAIL_BYTES = TAIL_TOKENS * TOKEN_BYTES

_NO_TOKEN = np.iinfo(np.int32).min
"""In a place that holds no remembered prompt."""


class Answer(NamedTuple):
    """The answer of a request: where it begins, and its first and last tokens."""

    begin: int = sys.maxsize
    first: Tokens = b""
    last: Hashable = None


class Origin(NamedTuple):
    """The request that left a context.

    Attributes:
        program: equal for the requests of one program.
        tool: what its answer calls, as far as that is known.
        is_continuation: whether it continued an earlier context itself.
        is_agent: whether the request is an agent's (`programs.py`).
        num_served: the tokens that were computed for it, and for those that it continues.
        dropped: last tokens of earlier answers that the next prompt left out.
    """

    request_id: str = ""
    program: Hashable = None
    tool: Hint = None
    is_continuation: bool = False
    is_agent: bool = False
    num_served: int = 0
    answer: Answer = Answer()
    dropped: frozenset[Hashable] = frozenset()

    def dropped_before(self, prompt: Tokens, num_cached: int) -> frozenset[Hashable]:
        """`dropped`, for a prompt that shares `num_cached` tokens with this request. Chat templates
        drop the reasoning of earlier turns, so the answer computed after it is not found either."""
        begin, first, last = self.answer
        if num_cached < begin - NEAR_TOKENS:  # it branches off before
            return frozenset()
        if prompt[begin * TOKEN_BYTES :].startswith(first):
            return self.dropped - {last}
        return frozenset([*self.dropped][: MAX_DROPPED - 1]) | {last}


NO_ORIGIN = Origin()


@dataclass(slots=True, eq=False)
class Context:
    """What a request has left in the tree.

    Invariant: `leaf.context` is this context, unless `leaf` is None.

    Attributes:
        leaf: the node that holds its end. If that is evicted, the node before it; None if it is
            shared, if nothing is left, or if a later request ended there too.
        own_start: the tokens from here on are in no other context.
        kinds: what its pause is learned under.
        ended_s: when the request ended.
        expected_until_s: until then it will likely be continued soon.
        is_trusted: it was expected when the request ended.
        origin: the request that left it.
    """

    leaf: Node | None
    own_start: int
    kinds: Sequence[Hashable]
    ended_s: float
    expected_until_s: float
    is_trusted: bool = False
    origin: Origin = NO_ORIGIN

    def move_to(self, leaf: Node) -> None:
        """`leaf` holds its end, or what is left of it."""
        if leaf.context is not None:
            leaf.context.leaf = None
        self.leaf = leaf
        leaf.context = self

    def is_agents(self, continued_s: float | None) -> bool:
        """Whether an agent continues it at this time, or if it is never continued, left it."""
        origin = self.origin
        is_quick = continued_s is not None and continued_s - self.ended_s < AGENT_PAUSE_S
        return is_quick or origin.is_agent or origin.tool is not None

    def num_own_blocks(self, block_size: int) -> int:
        """Blocks of the tree that hold this context and no other; 0 if it is gone."""
        if self.leaf is None:
            return 0
        return max(0, -(-self.leaf.end // block_size) - self.own_start // block_size)


class _PromptEnd(NamedTuple):
    """What a prompt is recognized by."""

    tenant: Namespace
    length: int
    tail: Tokens


class _Kind(NamedTuple):
    """What pauses are learned under."""

    tenant: Namespace
    kind: Hashable


@dataclass(slots=True, eq=False)
class _Tenant:
    """How well a tenant's contexts do what is expected of them.

    Attributes:
        pauses: of all its contexts.
        agent_pauses: of those of agents.
        num_owed: contexts that were expected and not continued, less those that were continued.
    """

    pauses: Pauses = field(default_factory=Pauses)
    agent_pauses: Pauses = field(default_factory=Pauses)
    num_owed: int = 0

    @property
    def is_believed(self) -> bool:
        """Whether a context of its can be expected. Each of `MIN_OUTCOMES` mistakes must be made up
        for, and a tenant of which more were continued may have more open at a time."""
        return self.num_owed < MIN_OUTCOMES + self.pauses.num_continued


class _PromptIndex:
    """Prompts by what begins with them. All are compared at once, so each has a place in arrays.

    Args:
        max_prompts: at a time.
    """

    def __init__(self, max_prompts: int) -> None:
        self._prompts: list[_PromptEnd | None] = [None] * max_prompts
        self._last_places = np.zeros(max_prompts, np.intp)  # of a prompt's tokens
        self._last_tokens = np.full(max_prompts, _NO_TOKEN, np.int32)
        self._free_places = list(range(max_prompts))
        self._place_of: dict[_PromptEnd, int] = {}

    def __iter__(self) -> Iterator[_PromptEnd]:
        return iter(self._place_of)

    def add(self, prompt: _PromptEnd) -> None:
        place = self._place_of[prompt] = self._free_places.pop()
        self._prompts[place] = prompt
        self._last_places[place] = prompt.length - 1
        self._last_tokens[place] = int.from_bytes(
            prompt.tail[-TOKEN_BYTES:], sys.byteorder, signed=True
        )

    def remove(self, prompt: _PromptEnd) -> None:
        place = self._place_of.pop(prompt)
        self._free_places.append(place)
        self._prompts[place] = None
        self._last_tokens[place] = _NO_TOKEN

    def longest_before(self, tenant: Namespace, prompt: Tokens) -> _PromptEnd | None:
        """The longest of a tenant's prompts that `prompt` continues. About 5 us."""
        tokens = np.frombuffer(prompt, np.int32)
        # Of prompts that are longer, the last token of this one is compared.
        is_alike = tokens.take(self._last_places, mode="clip") == self._last_tokens
        found: _PromptEnd | None = None
        for place in is_alike.nonzero()[0].tolist():
            known = self._prompts[place]
            assert known is not None
            if known.length < len(tokens) and (found is None or found.length < known.length):
                end = known.length * TOKEN_BYTES
                if known == (tenant, known.length, prompt[end - _TAIL_BYTES : end]):
                    found = known
        return found


class Continuations:
    """The contexts that ended requests have left, and which of them are expected back.

    Times are seconds on one monotonic clock. Memory is bounded by the constants above, to a
    megabyte at most. Nothing is expected until `MIN_OUTCOMES` contexts were continued or forgotten.

    Attributes:
        horizon_s: "soon" is within this many seconds; with 0 nothing is.
    """

    def __init__(self, horizon_s: float = 0.0) -> None:
        self.horizon_s = horizon_s
        self.clear()

    def clear(self) -> None:
        self._paused: LruPerTenant[_PromptEnd, Context] = LruPerTenant(MAX_REMEMBERED)
        self._prompts = _PromptIndex(MAX_REMEMBERED + 1)  # of those in `_paused`
        self._pauses_of: LruPerTenant[_Kind, Pauses] = LruPerTenant(MAX_KINDS)
        self._tenants: OrderedDict[Namespace, _Tenant] = OrderedDict()  # the one used last is last
        self._all_pauses = Pauses()
        self._expected: dict[Context, None] = {}  # and those whose time is over, until looked at
        self._ended: OrderedDict[Hashable, float] = OrderedDict()  # programs, the first end first

    def ended(
        self,
        tenant: Namespace,
        prompt: Tokens,
        leaf: Node,
        kinds: Sequence[Hashable],
        now_s: float,
        promised_s: float | None = None,
        origin: Origin = NO_ORIGIN,
    ) -> None:
        """A request has ended, and its context is in the tree down to `leaf`. O(nodes above it).

        Args:
            tenant: the namespace of the tree.
            kinds: of its end, the most specific first. The first of which `MIN_OUTCOMES` are known
                counts, and without one all ends of the tenant together, or of all tenants.
            promised_s: the client expects to continue it after so many seconds. It counts only
                until the outcomes of a kind are known, and twice as long, but at most `horizon_s`.
        """
        length = len(prompt) // TOKEN_BYTES
        if length < TAIL_TOKENS:
            return
        whole = self._tenant(tenant)
        expected_for_s = 0.0
        if self.horizon_s and whole.is_believed:
            expected_for_s = self._expected_for_s(whole, tenant, kinds, promised_s)
        until_s = now_s + expected_for_s
        context = Context(None, _own_start(leaf), kinds, now_s, until_s, origin=origin)
        context.move_to(leaf)
        if until_s > now_s:
            context.is_trusted = True
            whole.num_owed += 1
            self._expect(context)
        key = _PromptEnd(tenant, length, prompt[-_TAIL_BYTES:])
        replaced = self._paused.get(key)
        if replaced is None:
            self._prompts.add(key)
        elif replaced.is_trusted:  # it can no longer be recognized, so nothing is expected of it
            self._expected.pop(replaced, None)
            whole.num_owed = max(0, whole.num_owed - 1)
        if (forgotten := self._paused.put(key, context)) is not None:
            self._resolve(*forgotten, None)

    def _expected_for_s(
        self, whole: _Tenant, tenant: Namespace, kinds: Sequence[Hashable], promised_s: float | None
    ) -> float:
        for kind in kinds:
            pauses = self._pauses_of.get(_Kind(tenant, kind))
            if pauses is not None and pauses.num_outcomes >= MIN_OUTCOMES:
                return pauses.expected_for_s(self.horizon_s)
        if promised_s is not None:
            return min(2 * promised_s, self.horizon_s)
        if whole.pauses.num_outcomes >= MIN_OUTCOMES:
            return whole.pauses.expected_for_s(self.horizon_s)
        return self._all_pauses.expected_for_s(self.horizon_s)

    def arrived(self, tenant: Namespace, prompt: Tokens, now_s: float) -> Context | None:
        """A request has arrived. If it continues a context, that is expected until it is admitted.

        Returns that context. Costs about 10 us, however many contexts are remembered.
        """
        found = self._prompts.longest_before(tenant, prompt)
        if found is None:
            return None
        context = self._paused.pop(found)
        self._resolve(found, context, now_s)
        if self.horizon_s:
            context.expected_until_s = now_s + self.horizon_s
            self._expect(context)
        return context

    # -- what programs are doing ------------------------------------------------------------------

    def program_ended(self, program: Hashable, now_s: float) -> None:
        """No later prompt extends one of this program's prompts. Other prompts of it may be
        continued all the same."""
        self._ended.pop(program, None)
        self._ended[program] = now_s
        if len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)

    def agent_pause_s(self, share: float) -> float:
        """This share of agents' pauses was no longer (`Pauses.quantile_s`): the median over the
        tenants of which enough are known; 0 if there is none. O(tenants): 5 us each."""
        quantiles = [one.agent_pauses.quantile_s(share) for one in self._tenants.values()]
        return statistics.median([one for one in quantiles if one] or [0.0])

    def called_tool(self, is_of: Callable[[str], bool], tool: Hint) -> None:
        """The answer of requests whose id fulfills `is_of` calls `tool`. O(contexts)."""
        for _, context in self._paused.items():
            if context.origin.tool is None and is_of(context.origin.request_id):
                context.origin = context.origin._replace(tool=tool)

    def paused(self, now_s: float) -> Iterator[tuple[Namespace, Context]]:
        """The contexts that have not been continued, in the cache or not, and their namespaces."""
        for key, context in self._paused.items():
            if now_s - context.ended_s <= MAX_PAUSE_S:
                yield key.tenant, context

    def ended_programs(self, now_s: float) -> Iterator[Hashable]:
        """The programs of which a prompt has ended in the last `KEEP_ENDED_S`."""
        return (one for one, ended_s in self._ended.items() if now_s - ended_s <= KEEP_ENDED_S)

    # -- what is expected -------------------------------------------------------------------------

    def num_expected_blocks(self, blocks: BlockTable, now_s: float) -> int:
        """Unlocked blocks of the contexts that will be continued soon. O(expected contexts)."""
        for context in [one for one in self._expected if one.expected_until_s <= now_s]:
            del self._expected[context]
        return sum(
            one.num_own_blocks(blocks.block_size)
            for one in self._expected
            if one.leaf is not None and blocks.is_evictable(one.leaf)
        )

    def _expect(self, context: Context) -> None:
        self._expected[context] = None
        if len(self._expected) > MAX_REMEMBERED:
            del self._expected[next(iter(self._expected))]

    def _resolve(self, key: _PromptEnd, context: Context, continued_s: float | None) -> None:
        """Learn what became of a context that is no longer in `_paused`: when it was continued, or
        that it was not in time."""
        self._prompts.remove(key)
        pause_s = None if continued_s is None else continued_s - context.ended_s
        self._all_pauses.add(pause_s)
        whole = self._tenant(key.tenant)
        whole.pauses.add(pause_s)
        if context.is_agents(continued_s):
            whole.agent_pauses.add(pause_s)
        if pause_s is not None and context.is_trusted:  # this one, and a mistake
            whole.num_owed = max(0, whole.num_owed - 2)
        for one in context.kinds:
            kind = _Kind(key.tenant, one)
            pauses = self._pauses_of.get(kind) or Pauses()
            pauses.add(pause_s)
            self._pauses_of.put(kind, pauses)

    def _tenant(self, tenant: Namespace) -> _Tenant:
        return get_or_make(self._tenants, tenant, _Tenant, MAX_TENANTS)


def _own_start(leaf: Node) -> int:
    """From which token on a context is shared with no other: where the tree last branches."""
    node = leaf
    while node.parent is not None and node.parent.parent is not None:
        if len(node.parent.children) > 1:
            break
        node = node.parent
    return node.start
