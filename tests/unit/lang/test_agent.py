"""`sgl.agent`: turns of tool calls, their budgets, and the answer."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterable
from typing import Any, Literal

import pytest
from pydantic import BaseModel

import sgl_vllm as sgl
from sgl_vllm.lang.backends.requests import GenRequest
from tests.unit.lang.scripted import ScriptedBackend, appending

pytestmark = pytest.mark.timeout(20)

CAPITALS = {"Peru": "Lima", "Kenya": "Nairobi"}
NONE = '{"calls": []}'


def capital(country: str) -> str:
    """The capital of a country."""
    return CAPITALS[country]


async def add(a: int, b: int = 1) -> int:
    return a + b


def calls(*asked: tuple[str, dict[str, Any]]) -> str:
    """What a model writes to call tools."""
    return json.dumps({"calls": [{"tool": name, "arguments": given} for name, given in asked]})


def saying(*replies: str) -> ScriptedBackend:
    """A model that writes these texts, one after the other."""
    left = iter(replies)
    return ScriptedBackend(reply=lambda prompt: next(left))


def results_in(state: sgl.ProgramState) -> list[Any]:
    """What the model was shown, turn by turn."""
    users = [m["content"] for m in state.messages() if m["role"] == "user"]
    shown = [text.splitlines()[0] for text in users[1:]]
    return [json.loads(text) for text in shown if text.startswith("[")]


@sgl.function
def asking(s, tools, options=None):
    s += sgl.agent("answer", "Go.", tools, **(options or {}))


def run(backend: ScriptedBackend, tools: Iterable[Callable[..., Any]], **options: Any) -> Any:
    return asking.run(list(tools), options, backend=backend)


def test_a_chat_has_the_calls_in_assistant_turns_and_their_results_in_user_turns():
    backend = saying(calls(("capital", {"country": "Peru"})), NONE, "It is Lima.")
    program = appending(
        sgl.system("You help."),
        sgl.agent("answer", "What is the capital of Peru?", [capital]),
        sgl.user("Thanks."),
    )
    state = program.run(backend=backend)
    roles = [message["role"] for message in state.messages()]
    texts = [message["content"] for message in state.messages()]
    assert roles == ["system", *["user", "assistant"] * 3, "user"]
    assert texts[1].endswith("\nWhat is the capital of Peru?")
    assert "- capital: The capital of a country. Arguments: {" in texts[1]
    assert texts[2:] == [
        '{"calls": [{"tool": "capital", "arguments": {"country": "Peru"}}]}',
        '[{"result":"Lima"}]',
        '{"calls": []}',
        "Answer now.",
        "It is Lima.",
        "Thanks.",
    ]
    assert state["answer"] == "It is Lima."
    meta = state.get_meta_info("answer")
    assert (meta["turns"], meta["ended_by"], meta["finish_reason"]) == (2, "model", "stop")
    (called,) = meta["tool_calls"]
    assert (called.tool, called.arguments, called.result, called.error) == (
        "capital",
        {"country": "Peru"},
        "Lima",
        None,
    )


def test_a_prompt_without_roles_has_them_in_lines():
    backend = saying(calls(("add", {"a": 2})), NONE, "3")
    program = appending(
        "A test.", sgl.agent("answer", "Add.", [add], instructions="Tools: {tools}\n") + "!"
    )
    tools = (
        'Tools: - add: Arguments: {"type": "object", "properties": {"a": {"type": "integer"}, "b": '
        '{"type": "integer", "default": 1}}, "required": ["a"], "additionalProperties": false}\n'
    )
    assert program.run(backend=backend).text() == (
        f"A test.\n{tools}Add.\n"
        'Calls: {"calls": [{"tool": "add", "arguments": {"a": 2}}]}\n[{"result":3}]\n'
        'Calls: {"calls": []}\nAnswer now.\nAnswer: 3!'
    )


def test_a_second_agent_of_a_prompt_does_not_describe_the_tools_again():
    backend = saying(NONE, "one", NONE, "two")
    program = appending(sgl.agent("first", "Go.", [add]), sgl.agent("second", "Go on.", [add]))
    state = program.run(backend=backend)
    assert state.text().count("- add: Arguments") == 1
    assert state.messages()[-4]["content"] == "Go on."


def test_an_open_turn_is_refused():
    with pytest.raises(sgl.ProgramError, match=r"agent 'answer' failed: .*close the user turn"):
        appending(sgl.user(sgl.agent("answer", "Go.", [add]))).run(backend=saying())


# --- schemas and types ---------------------------------------------------------------------------


class City(BaseModel):
    name: str
    people: int = 0


def found(city: City, kind: Literal["big", "small"], *, exact: bool = False) -> City:
    assert isinstance(city, City)
    return City(name=city.name + kind, people=city.people + exact)


class Counter:
    """Counts."""

    def __call__(self, by: int) -> int:
        return by + 1

    def down(self, by: int) -> int:
        return by - 1


def test_calls_are_held_to_the_schemas_of_all_tools():
    backend = saying(NONE, "x")
    run(backend, [found, add], max_parallel=3)
    constraint = backend.requests[0].constraint
    assert constraint is not None
    schema = constraint.value
    calls = schema["properties"]["calls"]
    assert (schema["required"], calls["type"], calls["maxItems"]) == (["calls"], "array", 3)
    each = {one["properties"]["tool"]["enum"][0]: one for one in calls["items"]["anyOf"]}
    assert [*each["found"]["properties"]] == ["tool", "arguments"]
    assert each["found"]["properties"]["arguments"]["properties"]["city"] == {
        "$ref": "#/$defs/City"
    }
    assert each["found"]["properties"]["arguments"]["required"] == ["city", "kind"]
    assert each["add"]["properties"]["arguments"]["properties"]["a"]["type"] == "integer"
    assert schema["$defs"]["City"]["required"] == ["name"]
    assert backend.requests[1].constraint is None


def test_arguments_have_the_annotated_types_and_results_are_json():
    given = {"city": {"name": "Ur"}, "kind": "big", "exact": True}
    state = run(saying(calls(("found", given)), NONE, "x"), [found])
    assert results_in(state) == [[{"result": {"name": "Urbig", "people": 1}}]]
    assert state.get_meta_info("answer")["tool_calls"][0].result == City(name="Urbig", people=1)


def test_methods_and_objects_are_tools_too():
    counter = Counter()
    asked = calls(("Counter", {"by": 1}), ("down", {"by": 1}))
    state = run(saying(asked, NONE, "x"), [counter, counter.down])
    assert results_in(state) == [[{"result": 2}, {"result": 0}]]
    assert "- Counter: Counts. Arguments" in state.text()


def test_the_runs_stop_does_not_cut_the_calls():
    backend = saying(NONE, "x")
    asking.run([add], backend=backend, stop="]")
    assert [request.sampling.stop for request in backend.requests] == [(), "]"]


@pytest.mark.parametrize(
    ("tools", "error"),
    [
        ([], "at least one tool"),
        ([add, add], "same name: add, add"),
        ([lambda a: a], "needs a type for its parameter a"),
        ([print], "takes args by position only, or any number"),
    ],
)
def test_what_is_no_tool_is_refused_at_once(tools, error):
    with pytest.raises((TypeError, ValueError), match=error):
        sgl.agent("answer", "Go.", tools)


# --- calls ---------------------------------------------------------------------------------------


def test_the_calls_of_a_turn_run_at_the_same_time():
    together = threading.Barrier(2, timeout=10)
    met = asyncio.Event()

    def plain(a: int) -> int:
        together.wait()
        return a

    async def waits() -> str:
        await met.wait()
        return "met"

    async def meets() -> str:
        met.set()
        return "meets"

    asked = calls(("plain", {"a": 1}), ("waits", {}), ("plain", {"a": 2}), ("meets", {}))
    state = run(saying(asked, NONE, "x"), [plain, waits, meets])
    wanted = [{"result": 1}, {"result": "met"}, {"result": 2}, {"result": "meets"}]
    assert results_in(state) == [wanted]


def test_errors_are_shown_to_the_model():
    asked = calls(
        ("capital", {"country": "Mars"}),
        ("add", {"a": "many"}),
        ("add", {"a": 1, "c": 2}),
        ("sub", {}),
        ("add", {"a": 1}),
    )
    state = run(saying(asked, "no JSON", NONE, "x"), [capital, add])
    assert results_in(state) == [
        [
            {"error": "KeyError: 'Mars'"},
            {"error": "a: Input should be a valid integer, unable to parse string as an integer"},
            {"error": "c: Unexpected keyword argument"},
            {"error": "there is no tool 'sub', only capital, add"},
            {"result": 2},
        ],
        [{"error": "the calls are not valid JSON: Expecting value: line 1 column 1 (char 0)"}],
    ]
    called = state.get_meta_info("answer")["tool_calls"]
    assert [call.error is None for call in called] == [False, False, False, False, True]
    assert isinstance(called[0].exception, KeyError)


@pytest.mark.parametrize(
    ("asked", "cause"),
    [
        (calls(("capital", {"country": "Mars"})), KeyError),
        (calls(("sub", {})), ValueError),
        ("no JSON", ValueError),
    ],
)
def test_errors_can_be_raised_instead(asked, cause):
    with pytest.raises(sgl.ProgramError, match="agent 'answer' failed: tool capital") as caught:
        run(saying(asked), [capital], on_error="raise")
    inner = caught.value.__cause__
    assert isinstance(inner, sgl.ProgramError) and isinstance(inner.__cause__, cause)


# --- budgets -------------------------------------------------------------------------------------


def endless(prompt: str) -> str:
    """A model that always wants two more calls."""
    asked = prompt.endswith(("Answer now.", "Answer: "))
    return "enough" if asked else calls(("add", {"a": 1}), ("add", {"a": 2}))


@pytest.mark.parametrize(
    ("options", "ended_by", "turns", "num_calls"),
    [
        ({}, "turns", 8, 16),
        ({"max_turns": 2}, "turns", 2, 4),
        ({"max_calls": 3}, "calls", 2, 3),
        ({"max_calls": 0}, "calls", 0, 0),
        ({"max_tokens": len(endless("")) + 1}, "tokens", 2, 4),
        ({"max_s": 0.0}, "time", 0, 0),
    ],
)
def test_a_budget_ends_the_calls_and_the_model_answers(options, ended_by, turns, num_calls):
    backend = ScriptedBackend(reply=endless)
    state = run(backend, [add], **options)
    meta = state.get_meta_info("answer")
    assert state["answer"] == "enough"
    assert (meta["ended_by"], meta["turns"], len(meta["tool_calls"])) == (
        ended_by,
        turns,
        num_calls,
    )
    assert len(backend.asked) == turns + 1
    assert state.messages()[-2]["content"].endswith("No more calls are possible. Answer now.")


def test_a_call_over_the_budget_is_not_made():
    made: list[int] = []

    def note(a: int) -> int:
        made.append(a)
        return a

    asked = calls(("note", {"a": 1}), ("note", {"a": 2}))
    state = run(saying(asked, "x"), [note], max_calls=1)
    assert made == [1]
    assert results_in(state) == [
        [{"result": 1}, {"error": "not called, because no calls are left"}]
    ]


# --- beside the rest of the language -------------------------------------------------------------


class Hanging:
    """A tool that runs until it is canceled."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self.was_canceled = threading.Event()

    async def __call__(self) -> None:
        self.has_begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.was_canceled.set()
            raise


def test_a_call_that_is_running_when_the_time_is_up_is_ended():
    hanging = Hanging()
    state = run(saying(calls(("Hanging", {})), "x"), [hanging], max_s=0.1)
    assert results_in(state) == [[{"error": "it was ended, because no time is left"}]]
    assert state.get_meta_info("answer")["ended_by"] == "time"
    assert hanging.was_canceled.is_set()


@pytest.mark.parametrize(
    ("result", "error"), [(b"\xff\xfe", "invalid utf-8"), ("half \ud83d", "surrogates")]
)
def test_a_result_that_is_no_json_is_an_error_that_the_model_sees(result, error):
    def thing() -> Any:
        return result

    ((shown,),) = results_in(run(saying(calls(("thing", {})), NONE, "x"), [thing]))
    assert shown["error"].startswith("its result cannot be written as JSON: ")
    assert error in shown["error"]


def test_a_branch_that_loses_has_its_tools_canceled():
    hanging = Hanging()

    def done() -> str:
        assert hanging.has_begun.wait(10)
        return "done"

    def reply(prompt: str) -> str:
        if prompt.endswith(("]", "Answer now.")):
            return NONE if prompt.endswith("]") else "x"
        return calls(("Hanging" if "Hang." in prompt else "done", {}))

    @sgl.function
    def program(s):
        forks = s.fork(2)
        forks += lambda i: sgl.agent("answer", "Hang." if i else "Go.", [hanging, done])
        return forks.first(lambda branch: True)["answer"]

    assert program.run(backend=ScriptedBackend(reply=reply)).ret_value == "x"
    assert hanging.was_canceled.wait(10)


def one_call(prompt: str) -> str:
    """A model that calls `add` once."""
    if prompt.endswith("Answer now."):
        return "x"
    return NONE if '"result"' in prompt else calls(("add", {"a": 1}))


def test_the_text_is_streamed_while_the_agent_runs():
    has_read = threading.Event()

    async def wait_for_the_reader(request: GenRequest) -> None:
        if len(backend.requests) == 2:
            assert await asyncio.to_thread(has_read.wait, 10)

    backend = ScriptedBackend(reply=one_call, before=wait_for_the_reader)
    state = asking.run([add], stream=True, backend=backend)
    text = ""
    for piece in state.text_iter():
        text += piece
        if '[{"result":2}]' in text:  # the second turn waits for this
            has_read.set()
    assert text == state.text()
    assert text.endswith("Answer now.x")
    assert "".join(state.text_iter("answer")) == "x"


@sgl.function
def about(s, country):
    s += sgl.system("You help.")
    s += sgl.agent("answer", f"What is the capital of {country}?", [capital])
    return s["answer"]


def test_a_program_with_an_agent_can_be_compiled():
    replies = (calls(("capital", {"country": "Peru"})), NONE, "Lima.")
    plain = about.run("Peru", backend=saying(*replies))
    for compiled, args in ((about.compile(), ("Peru",)), (about.compile("Peru"), ())):
        told: list[Any] = []
        backend = saying(*replies)

        async def note(request: GenRequest, told: list[Any] = told) -> None:
            told.append(request.hints().next_tool)

        backend.before = note
        state = compiled.run(*args, backend=backend)
        assert state.messages() == plain.messages()
        assert state.ret_value == plain.ret_value == "Lima."
        assert told == ["capital", "capital", None]


def test_an_error_of_the_server_names_the_agent_and_the_generation():
    def fails(prompt: str) -> str:
        raise sgl.BackendError("the server is gone")

    with pytest.raises(sgl.ProgramError) as caught:
        run(ScriptedBackend(reply=fails), [add])
    assert str(caught.value) == ("agent 'answer' failed: gen 'calls' failed: the server is gone")
