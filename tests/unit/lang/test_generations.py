"""What a generation's request says of the tool that follows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

import sgl_vllm as sgl
from sgl_vllm.lang.backends.requests import GenAnswer, GenRequest
from sgl_vllm.lang.settings import global_config
from sgl_vllm.protocol.hints import NO_HINTS, Hints
from tests.unit.lang.scripted import ScriptedBackend, appending

pytestmark = pytest.mark.timeout(120)


@dataclass
class Listener(ScriptedBackend):
    """Reads the hints as a backend does that sends them."""

    hints: list[Hints] = field(default_factory=list)

    async def generate(self, request: GenRequest) -> GenAnswer:
        self.hints.append(request.hints())
        return await super().generate(request)


@pytest.fixture
def listener() -> Listener:
    return Listener(lambda prompt: "")


def look() -> str:
    return "seen"


# -- a tool that follows --------------------------------------------------------------------------


@sgl.function
async def turns(s: Any) -> None:
    for _ in range(2):
        s += "a" + sgl.gen("x") + "b" + sgl.gen("y") + "c" + sgl.var("x") + sgl.tool("t", look)
    s += sgl.gen("z") + sgl.select("choice", ["b", "c"]) + sgl.tool("u", look)


@sgl.function
async def reads(s: Any) -> None:
    s += "a" + sgl.gen("x") + "b" + sgl.tool("t", look)
    s["first"] = (await s["x"])[:1]
    s += sgl.gen("y", stop=await s["first"]) + sgl.tool("u", look) + sgl.gen("z")


@pytest.mark.parametrize(
    ("program", "tools"),
    [
        (turns, [None, "look", None, "look", None]),
        (turns.compile(), [None, "look", None, "look", None]),
        (reads, ["look", "look", None]),
        (reads.compile(), ["look", None, None]),  # inside of the computed `gen`, nothing is known
    ],
)
def test_a_tool_that_is_queued_behind_a_generation_is_named(
    program: Any, tools: list[str | None], listener: Listener
) -> None:
    program.run(backend=listener)
    assert [one.next_tool for one in listener.hints] == tools


def test_a_server_receives_it_beside_the_program(server: Any, backend: Any) -> None:
    @sgl.function
    async def program(s: Any) -> None:
        s += "a" + sgl.gen("x", regex="[0-9]+") + sgl.tool("t", look) + sgl.gen("y")

    program.run(backend=backend)
    first, second = (body["vllm_xargs"] for body in server.calls)
    assert first == {**second, "sgl_next_tool": "look", "sgl_report": 1}
    assert set(second) == {"sgl_program"}


def test_the_last_attempt_says_what_follows(listener: Listener) -> None:
    answers = iter(["no number", "7", "text"])
    listener.reply = lambda prompt: next(answers)
    program = appending(
        "a" + sgl.gen("x", dtype=int, retries=1) + sgl.tool("t", look) + sgl.gen("y")
    )
    program.compile().run(backend=listener)
    assert [one.next_tool for one in listener.hints] == [None, "look", None]


def test_nothing_is_sent_if_hints_are_off(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(global_config, "enable_hints_of_what_follows", False)
    turns.run(backend=listener)
    assert listener.hints == [NO_HINTS] * 5
