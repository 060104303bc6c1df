"""What the programs that use an engine are doing: counts by state, at the moment of asking.

Owns the states, and how the requests and contexts of a program become one of them. Does not own
which contexts are remembered (`continuations.py`). Pure.

A program is the requests that name the same `sgl_program`. Without that hint it is a conversation:
requests of which each extends the prompt of the one before.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Hashable, Iterable
from dataclasses import asdict, dataclass
from typing import Any  # Any: JSON

from sgl_vllm.counters import gauge
from sgl_vllm.programs.continuations import Context

MAX_TOOLS = 10
"""Tools that are listed, those that most contexts wait for."""


class State(enum.StrEnum):
    """What a program is doing. Of several that hold for its requests and contexts, the first."""

    RUNNING = "running"
    IN_TOOL = "in_tool"
    WAITING_FOR_PERSON = "waiting_for_person"
    UNKNOWN = "unknown"
    ENDED = "ended"


_ORDER = {state: number for number, state in enumerate(State)}


def _state(help: str, state: State) -> int:
    return gauge(help, unit="programs", metric="programs", labels={"state": state.value})


@dataclass(frozen=True, slots=True)
class ProgramGauges:
    """How many programs are in each state. The fields are the values of `State`."""

    running: int = _state(
        "Programs by what they are doing: a request of theirs runs or waits for its admission.",
        State.RUNNING,
    )
    in_tool: int = _state(
        "The answer to the last request of one of their contexts calls a tool.", State.IN_TOOL
    )
    waiting_for_person: int = _state(
        "The last answer calls no tool, and its request continued an earlier one.",
        State.WAITING_FOR_PERSON,
    )
    unknown: int = _state(
        "The last answer calls no tool, and it is the first one: whether the client will go on "
        "cannot be told.",
        State.UNKNOWN,
    )
    ended: int = _state(
        "Ended by `sgl_ends`, in the last ten minutes.",
        State.ENDED,
    )


def state_of(context: Context) -> State:
    """What the program of a context that has not been continued is doing, as far as this context
    tells."""
    if context.origin.tool is not None:
        return State.IN_TOOL
    return State.WAITING_FOR_PERSON if context.origin.is_continuation else State.UNKNOWN


def count_programs(
    running: Iterable[Hashable], paused: Iterable[Context], ended: Iterable[Hashable]
) -> ProgramGauges:
    """How many programs are in each state. O(requests and contexts).

    Args:
        running: the program of each request that the engine has.
        paused: contexts that have not been continued.
        ended: programs of which a prompt has ended. They may have others.
    """
    states: dict[Hashable, State] = dict.fromkeys(ended, State.ENDED)
    for context in paused:
        program, state = context.origin.program, state_of(context)
        if _ORDER[state] < _ORDER[states.get(program, State.ENDED)]:
            states[program] = state
    states.update(dict.fromkeys(running, State.RUNNING))
    return ProgramGauges(**{state.value: num for state, num in Counter(states.values()).items()})


def programs_json(
    counts: ProgramGauges, paused: Iterable[Context], named: Collection[Context], now_s: float
) -> dict[str, Any]:
    """The programs of one engine at one moment, as JSON: the counts; `longest_in_tool_s`, for how
    long the first of the `paused` contexts has waited for its tool, None if none does; and `tools`,
    those that most of the contexts in `named` wait for, at most `MAX_TOOLS`."""
    began_s = min((one.ended_s for one in paused if one.origin.tool is not None), default=None)
    waits: dict[str, list[float]] = {}
    for context in named:
        if context.origin.tool is not None:
            waits.setdefault(str(context.origin.tool), []).append(now_s - context.ended_s)
    tools = sorted(waits.items(), key=lambda one: (-len(one[1]), one[0]))[:MAX_TOOLS]
    return {
        **asdict(counts),
        "longest_in_tool_s": None if began_s is None else round(now_s - began_s, 3),
        "tools": [
            {"name": name, "num_contexts": len(waited_s), "longest_s": round(max(waited_s), 3)}
            for name, waited_s in tools
        ],
    }
