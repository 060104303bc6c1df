"""What is known to follow a generation at the moment when its request is sent.

Owns reading that off the queued operations, and which ended prompts later runs have extended all
the same. Does not own the queues (`stream.py`) nor the hints' form (`protocol/hints.py`). Never
waits: what is not known yet is not said.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any  # Any: results of operations, of several types

from sgl_vllm.lang.ir import (
    AnyOrder,
    Gen,
    Picture,
    RoleBegin,
    RoleEnd,
    Select,
    Show,
    Speech,
    SpokenGen,
    Text,
    Tool,
    Var,
    VarScopeBegin,
    VarScopeEnd,
)
from sgl_vllm.lang.operations import AppendTexts, Await, Fork, Gather, Operation, Read
from sgl_vllm.protocol.hints import NO_HINTS, Hints
from sgl_vllm.protocol.step_graph import StepGraph, StepName

_QUIET = (
    *(Text, Show, RoleBegin, RoleEnd, VarScopeBegin, VarScopeEnd, Read, Gather),
    *(Speech, Picture, Await),
)
"""Operations that append nothing but constants, and send no request with the prompt."""

_SENDS_NOTHING = (*_QUIET, AnyOrder, Var, AppendTexts)
"""Operations that append values as well, but send no request with the prompt. All others do, or may
lead to one."""

_COPIES_NOTHING = (*_QUIET, Gen, SpokenGen, Select, Fork)
"""Operations that append constants, or what is generated here. All others append a value. It may be
an answer of another branch, and what has been written there before may be this prompt. Then this
prompt becomes that branch's context."""

_MAX_PROMPTS = 32
"""At most this many ended prompts are remembered."""

_KEPT_FOR = 32
"""When that many are, one in so many replaces the oldest: each is remembered for a thousand."""

_MIN_CHARS = 64
"""Shorter prompts are not remembered."""

_MAX_PROGRAMS = 512


class Lookahead:
    """What is known of one run's future.

    That a prompt ends is known only if all that the run will still write is in its queues, and none
    of it is copied from an answer: while the program's function runs, it may append to any prompt,
    even to a branch that was joined, and may continue one prompt with the answer of another.

    `submitted` and `function_returned` may be called from any thread.
    """

    def __init__(self, program: str, ended: EndedPrompts) -> None:
        """`program` names the function. `ended` is shared by the runs of the process."""
        self._program = program
        self._ended = ended
        self._has_returned = False
        self._may_write = True  # more than is queued
        self._copies: set[Future[Any]] = set()  # queued operations that copy
        self._num_blocks = 0  # running ones, which may write more than is queued
        self._is_first = True
        self._graphs: dict[str, StepGraph] = {}  # of its compiled programs, by digest
        self._sent: set[str] = set()  # digests of the graphs that the server was told

    def runs(self, graph: StepGraph) -> None:
        """The run is, or has inside, one of this compiled program."""
        self._graphs[graph.digest] = graph

    def function_returned(self) -> None:
        """The program's function will submit nothing more. Only the first call counts."""
        if not self._has_returned:
            self._has_returned, self._may_write = True, False

    @contextmanager
    def running_block(self) -> Iterator[None]:
        """While a block runs, it may write more. What it writes is not `submitted`."""
        self._num_blocks += 1
        try:
            yield
        finally:
            self._num_blocks -= 1

    def submitted(self, operation: Operation, future: Future[Any]) -> None:
        """`operation` is going to be queued; `future` is done when it has run."""
        if not isinstance(operation, Read):
            self._may_write = True  # even after the function: its caller goes on, or a tool
        if not isinstance(operation, _COPIES_NOTHING):
            self._copies.add(future)
            future.add_done_callback(self._copies.discard)

    def hints(self, queued: Iterable[Operation], num_gens: int | None, prompt: str) -> Hints:
        """What follows a generation that is sent now. O(operations up to the next generation).

        Args:
            queued: the operations behind it.
            num_gens: the stream's generations since it last warmed its prompt for branches, this
                one included; None if the server may not have what they share.
            prompt: its text.
        """
        if self._is_first:
            self._is_first = False
            self._ended.look_for_extended(prompt)
        may_write = self._may_write or self._num_blocks > 0
        next_ones = (one for one in queued if not isinstance(one, _SENDS_NOTHING))
        following = next(next_ones, None)
        if isinstance(following, Tool):
            is_continued = may_write or next(next_ones, None) is not None
            return Hints(next_tool=following.called) if is_continued else NO_HINTS
        if following is not None or may_write or self._copies or num_gens is None:
            return NO_HINTS
        if not self._ended.add(prompt, self._program):
            return NO_HINTS
        # How many requests have used what ends: the `num_gens`, and the one that warmed it.
        return Hints(ends=num_gens + 1)

    def with_step(self, hints: Hints, step: StepName | None) -> Hints:
        """The hints of a generation, with its step if it has one. With the first of a graph goes
        the graph."""
        if step is None:
            return hints
        is_first = step.digest not in self._sent
        self._sent.add(step.digest)
        return replace(hints, step=step, graph=self._graphs[step.digest].text if is_first else None)


class EndedPrompts:
    """Prompts that runs have ended, and the programs of which a later run has extended one.

    A chat may run a program for each turn, with what was said so far as an argument. Then a run
    ends no prompt, but only the next run shows it. From there on the program ends no prompts.
    One such run is enough, so a sample of the prompts will do. Used on the background loop only.
    """

    def __init__(self) -> None:
        self._prompts: OrderedDict[str, str] = OrderedDict()  # to the program of each
        self._num_ended = 0
        self._extended: OrderedDict[str, None] = OrderedDict()  # programs

    def add(self, prompt: str, program: str) -> bool:
        """A run of `program` ends `prompt`. Returns False if such prompts have been extended."""
        if program in self._extended:
            return False
        self._num_ended += 1
        has_room = len(self._prompts) < _MAX_PROMPTS
        if len(prompt) >= _MIN_CHARS and (has_room or self._num_ended % _KEPT_FOR == 0):
            self._prompts[prompt] = program
            self._prompts.move_to_end(prompt)
            if len(self._prompts) > _MAX_PROMPTS:
                self._prompts.popitem(last=False)
        return True

    def look_for_extended(self, prompt: str) -> None:
        """A run begins with `prompt`."""
        for ended in [one for one in self._prompts if one != prompt and prompt.startswith(one)]:
            self._extended[self._prompts.pop(ended)] = None
            if len(self._extended) > _MAX_PROGRAMS:
                self._extended.popitem(last=False)


ended_prompts = EndedPrompts()
"""Those of this process."""
