"""What a generation's request says of what follows it: a tool, or that its prompt ends."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sgl_vllm as sgl
from sgl_vllm.lang import run as runs
from sgl_vllm.lang.backends.requests import GenAnswer, GenRequest
from sgl_vllm.lang.lookahead import EndedPrompts
from sgl_vllm.lang.prompts import Prompt
from sgl_vllm.lang.settings import global_config
from sgl_vllm.protocol.hints import NO_HINTS, Hints
from tests.effort import examples
from tests.unit.lang.random_programs import program_of, sources
from tests.unit.lang.scripted import ScriptedBackend, text_of

pytestmark = pytest.mark.timeout(120)

LONG = "A beginning that is long enough to be worth a request of its own before a fork. "
UNSEEN_CHARS = 64
"""Fewer characters than this are not sent ahead of a fork."""


@dataclass
class Sent:
    """A request in the order of sending, or the call of a tool. `answer` joins the prompt."""

    kind: str
    text: str
    hints: Hints = NO_HINTS
    answer: str = ""

    @property
    def context(self) -> str:
        return self.text + self.answer


@dataclass
class Listener(ScriptedBackend):
    """Reads the hints as a backend does that sends them. No two answers are equal."""

    sent: list[Sent] = field(default_factory=list)
    answers: Iterator[str] = field(
        default_factory=lambda: (f"<answer {number}>" for number in itertools.count())
    )

    async def generate(self, request: GenRequest) -> GenAnswer:
        one = Sent("gen", text_of(request.prompt), request.hints())
        self.sent.append(one)
        text = next(self.answers)
        self.reply = lambda prompt: text
        answer = await super().generate(request)
        one.answer = answer.texts[0].text
        return answer

    async def score(self, prompt: Prompt, choices: tuple[str, ...], **options: Any) -> Any:
        self.sent.append(Sent("select", text_of(prompt)))
        return await super().score(prompt, choices, **options)

    async def warm(self, prompt: Prompt) -> Any:
        self.sent.append(Sent("warm", text_of(prompt)))
        return await super().warm(prompt)

    @property
    def hints(self) -> list[Hints]:
        return [one.hints for one in self.sent if one.kind == "gen"]

    @property
    def hints_of_what_follows(self) -> list[Hints]:
        """Without the steps of compiled programs."""
        return [replace(one, step=None, graph=None) for one in self.hints]


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener()
    before = global_config.default_backend
    global_config.default_backend = listener
    yield listener
    global_config.default_backend = before


def look() -> str:
    return "seen"


# -- one prompt -----------------------------------------------------------------------------------


def test_the_last_generation_of_a_prompt_ends_it(listener):
    @sgl.function
    async def program(s):
        s += "a" + sgl.gen("x") + "b" + sgl.gen("y") + "c"

    program.run()
    assert listener.hints == [NO_HINTS, Hints(ends=3)]


def test_a_tool_that_runs_next_is_named(listener):
    @sgl.function
    async def program(s):
        for _ in range(2):
            s += "a" + sgl.gen("x") + "\n" + sgl.tool("t", look)
        s += sgl.gen("y")

    program.run()
    assert listener.hints == [Hints(next_tool="look"), Hints(next_tool="look"), Hints(ends=4)]


def test_a_tool_after_which_nothing_is_generated_is_not_waited_for(listener):
    @sgl.function
    async def program(s):
        s += "a" + sgl.gen("x") + sgl.tool("t", look)

    program.run()
    assert listener.hints == [NO_HINTS]


def test_nothing_is_said_while_the_function_may_still_write(listener):
    @sgl.function
    def program(s):
        s += "a" + sgl.gen("x")
        return s["x"]

    program.run()
    assert listener.hints == [NO_HINTS]
    program.compile().run()  # which is known to write nothing more
    assert listener.hints == [NO_HINTS, Hints(ends=2)]


def test_only_the_last_attempt_ends_a_prompt(listener):
    listener.answers = iter(["one", "2"])

    @sgl.function
    async def program(s):
        s += "a" + sgl.gen("x", dtype=int, retries=1)

    program.run()
    assert listener.hints == [NO_HINTS, Hints(ends=2)]


def test_what_a_computed_value_writes_says_nothing(listener):
    @sgl.function
    def program(s):
        s += "a" + sgl.gen("x")
        s += sgl.gen("y", stop=s["x"]) + sgl.tool("t", look) + sgl.gen("z")

    program.compile().run()
    assert listener.hints_of_what_follows == [NO_HINTS, NO_HINTS, Hints(ends=4)]


def test_a_tool_that_waits_for_the_function_of_a_compiled_program_is_named(listener):
    @sgl.function
    def program(s):
        s += "a" + sgl.gen("x")
        s["first"] = s["x"][:1]
        s += sgl.tool("t", look) + sgl.gen("y")

    program.compile().run()
    assert listener.hints_of_what_follows == [Hints(next_tool="look"), Hints(ends=3)]


def test_a_prompt_that_a_caller_goes_on_with_ends_no_more(listener):
    @sgl.function
    async def program(s):
        s += "a" + sgl.gen("x")

    state = program.run()
    for _ in range(2):
        state += sgl.gen("y")
        state.sync()
    assert listener.hints == [Hints(ends=2), NO_HINTS, NO_HINTS]


def test_it_can_be_turned_off(listener, monkeypatch):
    @sgl.function
    async def program(s):
        s += "a" + sgl.gen("x") + sgl.tool("t", look) + sgl.gen("y")

    monkeypatch.setattr(global_config, "enable_hints_of_what_follows", False)
    program.run()
    assert listener.hints == [NO_HINTS, NO_HINTS]


# -- branches -------------------------------------------------------------------------------------


def test_branches_end_and_what_they_share_goes_on(listener):
    """Two requests use the shared prompt before the first branch ends: the hint of the fork, and
    the branch's own. So an end up to what two have used does not reach into it."""

    @sgl.function
    async def program(s):
        s += LONG
        forks = s.fork(2)
        forks += lambda i: f"{i}" + sgl.gen("x")
        forks += sgl.gen("y")
        forks.join()
        s += "All in all: " + sgl.gen("z")

    program.run()
    assert sorted(listener.hints, key=lambda one: one.ends) == [
        *[NO_HINTS] * 2,
        Hints(ends=2),
        *[Hints(ends=3)] * 2,
    ]


# -- runs that go on where others ended -----------------------------------------------------------


def test_a_program_that_goes_on_where_it_ended_ends_nothing_more(listener):
    @sgl.function
    async def turn(s, history, message):
        s += history + message + sgl.gen("reply")

    history = LONG
    with mock.patch.object(runs, "ended_prompts", EndedPrompts()):
        for message in ("one", "two", "three"):
            history = turn.run(history, message).text()
    assert listener.hints == [Hints(ends=2), NO_HINTS, NO_HINTS]


def test_one_of_many_chats_is_enough_to_see_that_they_go_on(listener):
    @sgl.function
    async def turn(s, history):
        s += history + sgl.gen("reply")

    histories = [f"{LONG}{number:03}: " for number in range(200)]
    with mock.patch.object(runs, "ended_prompts", EndedPrompts()):
        for _ in range(2):
            histories = [turn.run(history).text() for history in histories]
    assert listener.hints[:200] == [Hints(ends=2)] * 200
    assert sum(one == NO_HINTS for one in listener.hints[200:]) > 100


# -- what a server receives -----------------------------------------------------------------------


def test_a_server_receives_them_beside_the_program(server, backend):
    @sgl.function
    async def program(s):
        s += "a" + sgl.gen("x", regex="[0-9]+") + sgl.tool("t", look) + sgl.select("y", ["b", "c"])
        s += sgl.gen("z")

    program.run(backend=backend)
    sent = [body["vllm_xargs"] for body in server.calls]
    program_id = sent[0]["sgl_program"]
    assert sent[0] == {"sgl_program": program_id, "sgl_next_tool": "look", "sgl_report": 1}
    assert sent[-1] == {"sgl_program": program_id, "sgl_ends": 3}
    assert not any("sgl_ends" in one for one in sent[:-1])


# -- all programs ---------------------------------------------------------------------------------


STEPS = ("text", "gen", "gen", "select", "tool", "var", "read", "pause", "return")
JOINS = ("gather_variable", "concate_and_append", "best", "none")

blocks = st.recursive(
    st.lists(st.sampled_from(STEPS), min_size=1, max_size=6),
    lambda inner: st.lists(
        st.sampled_from(STEPS)
        | st.tuples(st.sampled_from(JOINS), st.lists(inner, min_size=1, max_size=3)),
        min_size=1,
        max_size=6,
    ),
    max_leaves=8,
)


class Player:
    """Writes the program that steps describe. No two texts are equal."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._numbers = itertools.count()

    async def play(self, s: Any, steps: list[Any]) -> bool:
        """Returns whether the function is to return."""
        for step in steps:
            number = next(self._numbers)
            match step:
                case "text":
                    s += f" text {number} " + "." * 70 * (number % 2)
                case "gen":
                    s += sgl.gen("x")
                case "select":
                    s += sgl.select("y", ["one", "another"])
                case "tool":
                    s += sgl.tool("t", self._tool(number))
                case "var" if "x" in s:
                    s += sgl.var("x")
                case "read" if "x" in s:
                    await s["x"]
                case "pause":
                    await asyncio.sleep(0.001)
                case "return":
                    return True
                case (join, branches):
                    group = s.fork(len(branches))
                    for branch, its in zip(group, branches, strict=True):
                        if await self.play(branch, its):
                            return True
                    if join == "best" and "x" in group[0]:
                        s += str(await group[0]["x"])
                    elif join in JOINS[:2]:
                        group.join(join)
        return False

    def _tool(self, number: int) -> Any:
        async def tool() -> str:
            self._listener.sent.append(Sent("tool", tool.__name__))
            await asyncio.sleep(0)
            return f"[{number}]"

        tool.__name__ = f"tool_{number}"
        return tool


def check(sent: list[Sent]) -> None:
    """Every hint against what happened afterwards."""
    for index, one in enumerate(sent):
        if one.hints.ends:
            assert not any(extends(other, one) for other in sent[index + 1 :])
        if one.hints.next_tool is not None:
            others = (o for o in sent[index + 1 :] if o.kind == "tool" or extends(o, one))
            assert next(others).text == one.hints.next_tool


def check_shared(sent: list[Sent]) -> None:
    """What an ended prompt shares with a later one has been used as often as its hint says, so that
    it is known to go on."""
    for index, one in enumerate(sent):
        for later in sent[index + 1 :] if one.hints.ends else []:
            num_shared = len(shared(one, later)) - UNSEEN_CHARS
            users = [o for o in sent[: index + 1] if len(shared(o, one)) >= num_shared]
            assert num_shared <= 0 or len(users) >= one.hints.ends


def extends(later: Sent, one: Sent) -> bool:
    return later.kind != "tool" and later.text.startswith(one.context)


def shared(left: Sent, right: Sent) -> list[Any]:
    pairs = zip(left.context, right.context, strict=False)
    return list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


@given(blocks)
@settings(max_examples=examples(1000))
def test_no_hint_of_a_random_program_is_wrong(steps):
    listener = Listener()

    @sgl.function
    async def program(s):
        s += "begin "
        await Player(listener).play(s, steps)

    with mock.patch.object(runs, "ended_prompts", EndedPrompts()):
        program.run(backend=listener)
    check(listener.sent)
    check_shared(listener.sent)


@given(sources(), st.text("abct", max_size=5), st.integers(1, 9), st.booleans())
@settings(max_examples=examples(200))
def test_no_hint_of_random_source_text_is_wrong(source, a, k, is_compiled):
    listener = Listener()
    program = program_of(source.text)
    remembered = mock.patch.object(runs, "ended_prompts", EndedPrompts())
    with remembered, contextlib.suppress(Exception):  # what is sent before a failure counts too
        (program.compile() if is_compiled else program).run(a, k, backend=listener)
    for one in listener.sent:  # the tools here do not record that they run
        one.hints = replace(one.hints, next_tool=None)
    check(listener.sent)
