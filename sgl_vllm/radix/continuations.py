"""Which cached contexts will be continued soon, as far as earlier pauses tell.

Owns the contexts that ended requests have left, the pauses until they are continued, and the
estimate that follows from them. Does not own what is done about it (`scheduler/hold.py`). Pure.

A session of an agent or a chat is continued by a request whose prompt extends an earlier prompt.
What came between, a tool that ran or a person who thought, is a pause that the engine sees without
being told. How an answer ended says which of the two to expect: models end tool calls with other
tokens than their last word. So pauses are learned by *kinds* of ends, which the caller gives.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sgl_vllm.radix.blocks import BlockTable
from sgl_vllm.radix.node import Namespace, Node
from sgl_vllm.radix.tokens import TOKEN_BYTES, Tokens

MAX_REMEMBERED = 512
"""At most this many contexts can be recognized when they are continued."""

MAX_KINDS = 256
"""Pauses are learned for at most this many kinds, those used last."""

MIN_OUTCOMES = 16
"""With fewer outcomes than this nothing is expected, and a kind counts as any other."""

MAX_OUTCOMES = 1000
"""Beyond this, all counts are halved, so that old pauses are forgotten."""

TAIL_TOKENS = 32
"""A prompt is recognized by its length and this many tokens at its end."""

_TAIL_BYTES = TAIL_TOKENS * TOKEN_BYTES

_BEGINS_S = [0.0, *(1e-3 * 2 ** (i / 2) for i in range(54))]
"""Where the buckets of pauses begin: two per octave, from a millisecond to a day."""


class Pauses:
    """How long contexts paused until they were continued: counts by bucket, which decay."""

    def __init__(self) -> None:
        self._counts = [0.0] * len(_BEGINS_S)
        self.num_outcomes = 0.0

    def add(self, pause_s: float | None) -> None:
        """A context was continued after this pause; None if it was not."""
        if pause_s is not None:
            self._counts[bisect_right(_BEGINS_S, max(pause_s, 0.0)) - 1] += 1
        self.num_outcomes += 1
        if self.num_outcomes > MAX_OUTCOMES:
            self._counts = [count / 2 for count in self._counts]
            self.num_outcomes /= 2

    def expected_for_s(self, horizon_s: float) -> float:
        """For how long after its end a context will more likely than not be continued within the
        next `horizon_s`. Cost: a few microseconds."""
        if self.num_outcomes < MIN_OUTCOMES:
            return 0.0
        num_before = list(itertools.accumulate(self._counts, initial=0.0))
        for bucket, elapsed_s in enumerate(_BEGINS_S):
            num_left = self.num_outcomes - num_before[bucket]
            end = bisect_left(_BEGINS_S, elapsed_s + horizon_s)
            if 2 * (num_before[end] - num_before[bucket]) <= num_left:
                return elapsed_s
        return _BEGINS_S[-1]


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
    """

    leaf: Node | None
    own_start: int
    kinds: Sequence[Hashable]
    ended_s: float
    expected_until_s: float

    def move_to(self, leaf: Node) -> None:
        """`leaf` holds its end, or what is left of it."""
        if leaf.context is not None:
            leaf.context.leaf = None
        self.leaf = leaf
        leaf.context = self

    def num_own_blocks(self, block_size: int) -> int:
        """Blocks of the tree that hold this context and no other; 0 if it is gone."""
        if self.leaf is None:
            return 0
        return max(0, -(-self.leaf.end // block_size) - self.own_start // block_size)


class _PromptEnd(NamedTuple):
    """What a prompt is recognized by."""

    namespace: Namespace
    length: int
    tail: Tokens


class Continuations:
    """The contexts that ended requests have left, and which of them are expected back.

    Times are seconds on one monotonic clock. Memory is bounded by the constants above. Nothing is
    expected until `MIN_OUTCOMES` contexts were continued or forgotten.

    Args:
        horizon_s: "soon" is within this many seconds.
    """

    def __init__(self, horizon_s: float) -> None:
        self._horizon_s = horizon_s
        self.clear()

    def clear(self) -> None:
        self._paused: OrderedDict[_PromptEnd, Context] = OrderedDict()  # the oldest first
        self._lengths: Counter[int] = Counter()  # of the prompts in `_paused`
        self._pauses_of: OrderedDict[Hashable, Pauses] = OrderedDict()
        self._all_pauses = Pauses()
        self._expected: dict[Context, None] = {}  # and those whose time is over, until looked at

    def ended(
        self,
        namespace: Namespace,
        prompt: Tokens,
        leaf: Node,
        kinds: Sequence[Hashable],
        now_s: float,
        promised_s: float | None = None,
    ) -> None:
        """A request has ended, and its context is in the tree down to `leaf`. O(nodes above it).

        Args:
            kinds: of its end, the most specific first. The first of which `MIN_OUTCOMES` are known
                counts, and without one all ends together.
            promised_s: the client expects to continue it after so many seconds. It counts only
                until the outcomes of a kind are known, and twice as long, but at most `horizon_s`.
        """
        length = len(prompt) // TOKEN_BYTES
        if length < TAIL_TOKENS:
            return
        known = (self._pauses_of[kind] for kind in kinds if kind in self._pauses_of)
        pauses = next((one for one in known if one.num_outcomes >= MIN_OUTCOMES), None)
        if pauses is not None:
            expected_for_s = pauses.expected_for_s(self._horizon_s)
        elif promised_s is not None:
            expected_for_s = min(2 * promised_s, self._horizon_s)
        else:
            expected_for_s = self._all_pauses.expected_for_s(self._horizon_s)
        until_s = now_s + expected_for_s
        context = Context(None, _own_start(leaf), kinds, now_s, until_s)
        context.move_to(leaf)
        if until_s > now_s:
            self._expect(context)
        key = _PromptEnd(namespace, length, prompt[-_TAIL_BYTES:])
        if key in self._paused:  # the same prompt again
            self._paused.move_to_end(key)
        else:
            self._lengths[length] += 1
        self._paused[key] = context
        if len(self._paused) > MAX_REMEMBERED:
            self._resolve(next(iter(self._paused)), None)

    def arrived(self, namespace: Namespace, prompt: Tokens, now_s: float) -> None:
        """A request has arrived. If it continues a context, that is expected until it is admitted.

        Costs a dictionary lookup for each length of a remembered prompt: 0.1 ms at most.
        """
        num_tokens = len(prompt) // TOKEN_BYTES
        found = None
        for length in self._lengths:
            if length < num_tokens and (found is None or found.length < length):
                end = length * TOKEN_BYTES
                key = _PromptEnd(namespace, length, prompt[end - _TAIL_BYTES : end])
                if key in self._paused:
                    found = key
        if found is not None:
            context = self._resolve(found, now_s)
            context.expected_until_s = now_s + self._horizon_s
            self._expect(context)

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

    def _resolve(self, key: _PromptEnd, continued_s: float | None) -> Context:
        """Learn what became of a context: when it was continued, or that it was not in time."""
        context = self._paused.pop(key)
        self._lengths[key.length] -= 1
        if not self._lengths[key.length]:
            del self._lengths[key.length]
        pause_s = None if continued_s is None else continued_s - context.ended_s
        self._all_pauses.add(pause_s)
        for kind in context.kinds:
            self._pauses_of.setdefault(kind, Pauses()).add(pause_s)
            self._pauses_of.move_to_end(kind)
        while len(self._pauses_of) > MAX_KINDS:
            self._pauses_of.popitem(last=False)
        return context


def _own_start(leaf: Node) -> int:
    """From which token on a context is shared with no other: where the tree last branches."""
    node = leaf
    while node.parent is not None and node.parent.parent is not None:
        if len(node.parent.children) > 1:
            break
        node = node.parent
    return node.start
