"""Which recurrent state is evicted first: the one that is least likely to be used again.

Owns the queues of states that may be evicted, and what is learned of their use. Does not own the
states, nor which of them are locked (`states.py`). Pure: no vLLM, no torch.

Age alone says little. A conversation goes on from its last state and not from those before; or, if
its template drops a part of each answer, from the end of a prompt and never from that of an answer.
What many requests begin with is used again and again. So states are told apart by where they were
left (`Kind`) and by how often they were used. Of each such *class* it is counted how many states
were used once more, and how many were evicted before. That gives a chance, which is divided by the
time since the state was last in use. In chats, for example:

    class                   used once more   evicted   chance   longest out of use   chance / s
    branch, used twice                  77         0     0.99                 60 s       0.0165
    end of an answer                   268        58     0.82                 20 s       0.0410
    the same, used once                  0       267     0.00                  1 s       0.0015

How many tokens a state saves plays no part: benchmarks/results/studies.md has the experiment.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

MAX_OUTCOMES = 400
"""Beyond this, the counts of a class are halved, so that old outcomes are forgotten."""

MAX_USES = 2
"""States that were used more often are in the same class as those used so often."""

MIN_CHANCE = 0.1
"""A state is worth evicting others if it is used with this chance or more."""

TRY_EVERY = 16
"""Of this many states with a smaller chance, one counts as worth it nevertheless. Otherwise it
would never be noticed that states of its kind have come into use."""


class Kind(enum.Enum):
    """Where a request left a state."""

    BLOCK = "at the end of a block of tokens"
    PROMPT = "at the end of its prompt"
    END = "where it ended"
    BRANCH = "where another request is known, or expected, to go on from"


_CHANCE = 0.5
_CHANCES = {
    (Kind.BLOCK, 0): 0.1,
    (Kind.PROMPT, 0): 0.3,
    (Kind.PROMPT, 1): 0.2,
    (Kind.END, 1): 0.2,
}
"""Chances, by kind and number of uses, as long as no outcomes are known; `_CHANCE` for others."""

_NUM_ASSUMED = 2
"""The chances above count as much as this many outcomes."""

_LEAST_S = 1e-6


@dataclass(slots=True, eq=False)
class _Class:
    """States of one kind that were used equally often.

    Attributes:
        assumed: its chance as long as no outcomes are known.
        num_used, num_evicted: outcomes.
        queue: the states that may be evicted, the one that is longest out of use first.
    """

    assumed: float
    num_used: float = 0.0
    num_evicted: float = 0.0
    queue: OrderedDict[int, None] = field(default_factory=OrderedDict)

    @property
    def chance(self) -> float:
        """That a state is used once more before it is evicted."""
        num_used = self.num_used + _NUM_ASSUMED * self.assumed
        return num_used / (self.num_used + self.num_evicted + _NUM_ASSUMED)

    def count(self, was_used: bool) -> None:
        self.num_used += was_used
        self.num_evicted += not was_used
        if self.num_used + self.num_evicted > MAX_OUTCOMES:
            self.num_used /= 2
            self.num_evicted /= 2


@dataclass(slots=True)
class _State:
    """What is known of a state.

    Attributes:
        unused_since_s: on the tree's clock; minus infinity if it counts as never used.
    """

    kind: Kind
    num_uses: int = 0
    unused_since_s: float = 0.0


@dataclass(eq=False)
class StateOrder:
    """The states of one tree, each named by its first block.

    All costs are O(1); that of a choice grows with the number of classes, which is fixed.

    Args:
        clock: seconds, monotonic.

    Invariant: a state is in one queue or in none.
    """

    _clock: Callable[[], float]
    _states: dict[int, _State] = field(default_factory=dict)
    _num_tries: int = 0

    def __post_init__(self) -> None:
        self._classes = {
            (kind, num_uses): _Class(_CHANCES.get((kind, num_uses), _CHANCE))
            for kind in Kind
            for num_uses in range(MAX_USES + 1)
        }

    def __contains__(self, state: int) -> bool:
        return state in self._states

    def __len__(self) -> int:
        return len(self._states)

    def add(self, state: int) -> None:
        """A new state, at the end of a block as far as is known. It may not be evicted yet."""
        self._states[state] = _State(Kind.BLOCK)

    def mark(self, state: int, kind: Kind) -> None:
        """Where a state was left."""
        was_queued = self.may_be_evicted(state)
        self._class_of(state).queue.pop(state, None)
        self._states[state].kind = kind
        if was_queued:
            self.put(state)

    def used(self, state: int) -> None:
        """A request goes on from it. It may not be evicted until it is `put` again."""
        before = self._class_of(state)
        before.queue.pop(state, None)
        before.count(was_used=True)
        self._states[state].num_uses += 1

    def remove(self, state: int) -> None:
        """It has been evicted."""
        before = self._class_of(state)
        before.queue.pop(state, None)
        before.count(was_used=False)
        del self._states[state]

    def clear(self) -> None:
        """Forget all states, but not what was learned of their use."""
        for one in self._classes.values():
            one.queue.clear()
        self._states.clear()

    def put(self, state: int) -> None:
        """It is in use no longer, and may be evicted."""
        self._states[state].unused_since_s = self._clock()
        queue = self._class_of(state).queue
        queue[state] = None
        queue.move_to_end(state)

    def count_as_never_used(self, state: int) -> None:
        """If it may be evicted, it goes before all that count."""
        queue = self._class_of(state).queue
        if state in queue:
            self._states[state].unused_since_s = float("-inf")
            queue.move_to_end(state, last=False)

    def put_back(self, states: Iterable[int]) -> None:
        """Undo `take_first` of these, in the order in which they were taken. Those that are gone,
        or have been put since, are left as they are."""
        for state in reversed([*states]):
            if state in self._states:
                queue = self._class_of(state).queue
                if state not in queue:
                    queue[state] = None
                    queue.move_to_end(state, last=False)

    def take_first(self) -> int | None:
        """The state that is least likely to be used again, taken out of its queue; None if none may
        be evicted."""
        now = self._clock()
        first: tuple[float, int, OrderedDict[int, None]] | None = None
        for one in self._classes.values():
            if one.queue:
                state = next(iter(one.queue))
                unused_s = now - self._states[state].unused_since_s
                value = one.chance / max(unused_s, _LEAST_S)
                if first is None or value < first[0]:
                    first = value, state, one.queue
        if first is None:
            return None
        _, state, queue = first
        del queue[state]
        return state

    def is_worth_a_state(self, kind: Kind) -> bool:
        """Whether a new state of a kind is worth evicting others."""
        if self._classes[kind, 0].chance >= MIN_CHANCE:
            return True
        self._num_tries += 1
        return self._num_tries % TRY_EVERY == 0

    def may_be_evicted(self, state: int) -> bool:
        """Whether it is in a queue."""
        return state in self._class_of(state).queue

    def _class_of(self, state: int) -> _Class:
        known = self._states[state]
        return self._classes[known.kind, min(known.num_uses, MAX_USES)]
