"""What programs are doing, against a list of everything that happened."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_vllm.programs.continuations import (
    KEEP_ENDED_S,
    MAX_PAUSE_S,
    MAX_REMEMBERED,
    Continuations,
    Origin,
)
from sgl_vllm.programs.states import (
    MAX_TOOLS,
    ProgramGauges,
    count_programs,
    programs_json,
)
from sgl_vllm.radix.tokens import Tokens, pack
from sgl_vllm.radix.tree import RadixTree

SIZE = 4
STATES = ("running", "in_tool", "waiting_for_person", "unknown", "ended")
PROGRAMS = {0: "alone 0", 1: "alone 1", 2: "p", 3: "p", 4: "q", 5: "q"}
"""By session: two are conversations of their own, and two programs have two branches each."""


@dataclass
class Session:
    """A branch of a program, by its own account."""

    program: str
    num_tokens: int = 40
    request_id: str | None = None  # while it runs
    asked_again: bool = False  # by the request that runs, or ran last
    paused_since: float | None = None
    paused_id: str = ""
    tool: str | None = None


@dataclass
class History:
    """The same events for the code under test, and for a naive account of them."""

    now_s: float = 0.0
    num_requests: int = 0
    num_blocks: int = 0
    tree: RadixTree = field(default_factory=lambda: RadixTree(SIZE))
    continuations: Continuations = field(default_factory=lambda: Continuations())
    sessions: list[Session] = field(
        default_factory=lambda: [Session(program) for program in PROGRAMS.values()]
    )
    ends: list[tuple[str, float]] = field(default_factory=list)

    def prompt(self, number: int) -> Tokens:
        tokens = [1, 2, 3, 4, *(1000 * (number + 1) + i for i in range(4, 1000))]
        return pack(tokens[: self.sessions[number].num_tokens])

    def ask(self, number: int) -> None:
        session = self.sessions[number]
        if session.request_id is not None:
            return
        self.num_requests += 1
        session.request_id = f"chatcmpl-{self.num_requests}-0123abcd"
        session.num_tokens = min(session.num_tokens + SIZE, 900)
        session.asked_again = session.paused_since is not None
        session.paused_since = None
        found = self.continuations.arrived("", self.prompt(number), self.now_s)
        assert (found is not None) == session.asked_again

    def answer(self, number: int, outcome: str) -> None:
        session = self.sessions[number]
        if session.request_id is None:
            return
        request_id, session.request_id = session.request_id, None
        if outcome == "aborted":
            return
        if outcome == "ends":
            self.ends.append((session.program, self.now_s))
            self.continuations.program_ended(session.program, self.now_s)
            return
        session.paused_since, session.paused_id = self.now_s, request_id
        session.tool = "bash" if outcome == "tool" else None
        prompt = self.prompt(number)
        blocks = list(range(self.num_blocks, self.num_blocks + session.num_tokens // SIZE))
        self.num_blocks += len(blocks)
        inserted = self.tree.insert("", prompt, blocks)
        self.tree.unlock(blocks)
        leaf = inserted.own_leaf or self.tree.match_prefix("", prompt).node
        assert leaf is not None
        origin = Origin(request_id, session.program, session.tool, session.asked_again)
        self.continuations.ended("", prompt, leaf, [], self.now_s, None, origin)

    def told(self, number: int, tool: str) -> None:
        session = self.sessions[number]
        if session.paused_since is not None and session.tool is None:
            session.tool = tool
        self.continuations.called_tool(lambda name: name == session.paused_id, tool)

    def expected(self) -> dict[str, int]:
        counts = dict.fromkeys(STATES, 0)
        for program in set(PROGRAMS.values()):
            of_program = [one for one in self.sessions if one.program == program]
            since = [(one, one.paused_since) for one in of_program if one.paused_since is not None]
            paused = [one for one, begin in since if self.now_s - begin <= MAX_PAUSE_S]
            if any(one.request_id is not None for one in of_program):
                counts["running"] += 1
            elif any(one.tool is not None for one in paused):
                counts["in_tool"] += 1
            elif any(one.asked_again for one in paused):
                counts["waiting_for_person"] += 1
            elif paused:
                counts["unknown"] += 1
            elif any(p == program and self.now_s - at <= KEEP_ENDED_S for p, at in self.ends):
                counts["ended"] += 1
        return counts

    def check(self) -> None:
        paused = [one for _, one in self.continuations.paused(self.now_s)]
        running = [one.program for one in self.sessions if one.request_id is not None]
        ended = self.continuations.ended_programs(self.now_s)
        assert asdict(count_programs(running, paused, ended)) == self.expected()
        waiting = [
            (one.tool, one.paused_since)
            for one in self.sessions
            if one.tool is not None
            and one.paused_since is not None
            and self.now_s - one.paused_since <= MAX_PAUSE_S
        ]
        longest_s = max((self.now_s - since for _, since in waiting), default=None)
        shown = programs_json(ProgramGauges(), paused, paused, self.now_s)
        assert shown["longest_in_tool_s"] == longest_s
        tools = {one["name"]: one["num_contexts"] for one in shown["tools"]}
        assert tools == Counter(tool for tool, _ in waiting)


NUMBERS = st.sampled_from(list(PROGRAMS))
EVENTS = st.one_of(
    st.tuples(st.just("ask"), NUMBERS),
    st.tuples(st.just("ask"), NUMBERS),
    st.tuples(
        st.just("answer"), NUMBERS, st.sampled_from(["text", "tool", "text", "ends", "aborted"])
    ),
    st.tuples(st.just("answer"), NUMBERS, st.just("text")),
    st.tuples(st.just("told"), NUMBERS, st.sampled_from(["read", "write"])),
    st.tuples(st.just("wait"), st.sampled_from([1.0, 400.0, 2000.0])),
    st.tuples(st.just("evict"), st.integers(1, 20)),
)


@settings(deadline=None)
@given(st.lists(EVENTS, max_size=60))
def test_every_program_is_in_the_state_that_its_requests_say(events: list[tuple]) -> None:
    history = History()
    for what, *arguments in events:
        if what == "wait":
            history.now_s += arguments[0]
        elif what == "evict":
            history.tree.evict(arguments[0])
        else:
            getattr(history, what)(*arguments)
        history.check()


def test_no_more_programs_are_remembered_than_the_limits_say() -> None:
    history = History()
    prompts = [pack([number, *range(42), number]) for number in range(MAX_REMEMBERED + 100)]
    for number, prompt in enumerate(prompts):
        history.tree.insert("", prompt, list(range(11 * number, 11 * (number + 1))))
        leaf = history.tree.match_prefix("", prompt).node
        assert leaf is not None
        origin = Origin(str(number), number, f"tool {number % 30}")
        history.continuations.ended("", prompt, leaf, [], float(number), None, origin)
        history.continuations.program_ended(-number - 1, float(number))
    now_s = float(len(prompts))
    paused = [one for _, one in history.continuations.paused(now_s)]
    counts = count_programs([], paused, history.continuations.ended_programs(now_s))
    assert counts.in_tool == MAX_REMEMBERED
    assert 0 < counts.ended <= MAX_REMEMBERED
    assert len(programs_json(counts, paused, paused, now_s)["tools"]) == MAX_TOOLS
    last = [*range(len(prompts) - MAX_REMEMBERED, len(prompts))]
    assert [one.origin.program for one in paused] == last
    # All of these, and only these, are recognized when they go on.
    for number, prompt in enumerate(prompts):
        found = history.continuations.arrived("", prompt + pack([7]), now_s)
        assert (found is not None) == (number in last)


def test_the_oldest_and_most_frequent_tools_are_named() -> None:
    history = History()
    for number, (tool, at_s) in enumerate([("a", 5.0), ("b", 1.0), ("b", 4.0)]):
        history.now_s = at_s
        history.ask(number)
        history.answer(number, "text")
        history.told(number, tool)
    paused = [one for _, one in history.continuations.paused(6.0)]
    assert programs_json(ProgramGauges(), paused, paused, 6.0)["tools"] == [
        {"name": "b", "num_contexts": 2, "longest_s": 5.0},
        {"name": "a", "num_contexts": 1, "longest_s": 1.0},
    ]
