"""The graph of a compiled program, as it is sent to a server: its steps, and what lies between.

A *step* is one generation. Its prompt extends that of an earlier step and its answer, or begins a
new context. Between the two, tools may run, and other steps' answers may be waited for. A run sends
the graph once, with its first request (`request_keys.GRAPH`), and each request names its step
(`request_keys.STEP`). Owns the form of both. Pure.

    [{}, {"after": 0, "tool": "search"}, {"after": 1}, {"after": 1}, {"after": 2, "waits_for": [3]}]
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property

MAX_STEPS = 128

MAX_GRAPH_CHARS = 16_384

MAX_TOOL_CHARS = 256

DIGEST_CHARS = 16


@dataclass(frozen=True, slots=True)
class StepName:
    """A step of a graph, which is named by its digest. Written as ``digest/index``."""

    digest: str
    index: int

    def __str__(self) -> str:
        return f"{self.digest}/{self.index}"


@dataclass(frozen=True, slots=True)
class Step:
    """One generation of a program.

    Attributes:
        after: the step whose prompt and answer its prompt extends; None for a new context.
        tool: the first that runs between that answer and this step.
        waits_for: other steps whose answers must be there.
    """

    after: int | None = None
    tool: str | None = None
    waits_for: tuple[int, ...] = ()

    @property
    def needs(self) -> tuple[int, ...]:
        """The steps that end before this one begins."""
        return self.waits_for if self.after is None else (self.after, *self.waits_for)


@dataclass(frozen=True)
class StepGraph:
    """The steps of a program. Invariant: a step needs earlier ones only."""

    steps: tuple[Step, ...]

    @cached_property
    def text(self) -> str:
        """As it is sent: a list of objects in JSON, from which what is not there is left out. In
        ASCII."""
        written = [
            {
                **({} if step.after is None else {"after": step.after}),
                **({} if step.tool is None else {"tool": step.tool}),
                **({"waits_for": step.waits_for} if step.waits_for else {}),
            }
            for step in self.steps
        ]
        return json.dumps(written, separators=(",", ":"))

    @cached_property
    def digest(self) -> str:
        return digest_of(self.text)

    @cached_property
    def _following(self) -> dict[int | None, list[int]]:
        """By step: those that continue it, in order. By None: those that begin a context."""
        following: dict[int | None, list[int]] = {}
        for index, step in enumerate(self.steps):
            following.setdefault(step.after, []).append(index)
        return following

    def next_tool(self, index: int) -> str | None:
        """What runs after the answer of a step, if no step goes on from there without a tool."""
        following = [self.steps[one] for one in self._following.get(index, ())]
        if any(step.tool is None and not step.waits_for for step in following):
            return None
        return next((step.tool for step in following if step.tool is not None), None)

    def fork_of(self, index: int) -> int | None:
        """The first of the steps that extend the same as step `index`; None if no other does."""
        siblings = self._following[self.steps[index].after]
        return siblings[0] if len(siblings) > 1 else None


def digest_of(text: str) -> str:
    """What a graph is named by: the beginning of the SHA-256 of its text, in hex. ValueError for a
    text that is not ASCII."""
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:DIGEST_CHARS]


def read_graph(text: str) -> StepGraph:
    """The graph of a text, such as `StepGraph.text`. ValueError if it is none."""
    if len(text) > MAX_GRAPH_CHARS:
        raise ValueError(f"a graph has at most {MAX_GRAPH_CHARS} characters")
    try:
        written = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError("a graph is a list of steps in JSON") from error
    if not isinstance(written, list) or not 0 < len(written) <= MAX_STEPS:
        raise ValueError(f"a graph is a list of 1 to {MAX_STEPS} steps")
    return StepGraph(tuple(_read_step(index, step) for index, step in enumerate(written)))


def _read_step(index: int, written: object) -> Step:
    if not isinstance(written, dict):
        raise ValueError(f"step {index} is not an object")
    after, tool = written.get("after"), written.get("tool")
    waits_for = written.get("waits_for", [])
    if not isinstance(waits_for, list) or len(waits_for) > MAX_STEPS:
        raise ValueError(f"waits_for of step {index} is not a list of steps")
    needed = waits_for if after is None else [after, *waits_for]
    if not all(type(step) is int and 0 <= step < index for step in needed):
        raise ValueError(f"step {index} does not only need earlier steps")
    if tool is not None and not (isinstance(tool, str) and _is_name(tool)):
        raise ValueError(f"tool of step {index} is not a name of at most {MAX_TOOL_CHARS} letters")
    return Step(after, tool, tuple(dict.fromkeys(waits_for)))


def _is_name(text: str) -> bool:
    """Half of a surrogate pair is none: no answer of the server could have it."""
    has_surrogates = any("\ud800" <= char <= "\udfff" for char in text)
    return len(text) <= MAX_TOOL_CHARS and not has_surrogates


def read_step_name(text: object) -> StepName | None:
    """The step that a request names; None if it is not written as ``digest/index``."""
    if not isinstance(text, str) or len(text) > DIGEST_CHARS + 1 + len(str(MAX_STEPS)):
        return None
    digest, _, index = text.partition("/")
    if len(digest) != DIGEST_CHARS or not (index.isascii() and index.isdecimal()):
        return None
    return StepName(digest, int(index))
