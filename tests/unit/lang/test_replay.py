"""Recording and replaying runs: the same variables without a server, and clear errors."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sgl_vllm as sgl
from sgl_vllm.lang.backends.base import Backend
from sgl_vllm.lang.backends.requests import (
    GenAnswer,
    Generated,
    GenRequest,
)
from sgl_vllm.lang.media import Media
from sgl_vllm.lang.prompts import ChatPrompt, Message, TextPrompt
from sgl_vllm.lang.sampling import DEFAULT_SAMPLING, Sampling
from sgl_vllm.lang.usage import Usage
from tests.unit.lang.scripted import ScriptedBackend

KEY = "sk-a-secret-of-some-length"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.jsonl"


def request_of(text: str = "Hello", **sampling: Any) -> GenRequest:
    return GenRequest(TextPrompt(text), Sampling(**sampling).over(DEFAULT_SAMPLING))


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Luck(ScriptedBackend):
    """Never gives the same answer twice, and answers in a random order."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count()

    async def generate(self, request: GenRequest) -> GenAnswer:
        await asyncio.sleep(random.random() * 0.003)
        self.reply = lambda _: f"<{next(self._numbers)}>"
        return await super().generate(request)


def values_of(state: sgl.ProgramState) -> dict[tuple[str, str], Any]:
    """All variables of a run, including those of its branches."""
    found = {}
    waiting = [state._stream]
    while waiting:
        stream = waiting.pop()
        waiting += stream.children
        for name, future in stream.variables.items():
            found[stream.where, name] = future.result().value
    return found


# --- random programs -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    kind: str
    number: int
    branches: tuple[tuple[Step, ...], ...] = ()


plain_steps = st.builds(
    Step, st.sampled_from(["text", "gen", "select", "many", "cold", "regex"]), st.integers(0, 3)
)
steps = st.recursive(
    st.lists(plain_steps, min_size=1, max_size=4).map(tuple),
    lambda inner: st.tuples(
        plain_steps,
        st.builds(
            Step,
            st.sampled_from(["fork", "texts"]),
            st.integers(0, 3),
            st.lists(inner, min_size=1, max_size=3).map(tuple),
        ),
        plain_steps,
    ),
    max_leaves=6,
)


def write(s: Any, program: tuple[Step, ...], path: str = "") -> None:
    for index, step in enumerate(program):
        name = f"v{step.number}"
        match step.kind:
            case "text":
                s += f" word{step.number}" * 8
            case "gen":
                s += sgl.gen(name)
            case "select":
                s += sgl.select(name, ["yes", "no", "maybe"])
            case "many":
                s += sgl.gen(name, n=step.number + 1)
            case "cold":
                s += sgl.gen(name, temperature=0, max_tokens=step.number + 1)
            case "regex":
                s += sgl.gen(name, regex="<[0-9]+>", stop=["a", "b"])
            case _:
                forks = s.fork(len(step.branches))
                for fork, branch in zip(forks, step.branches, strict=True):
                    write(fork, branch, f"{path}.{index}")
                forks.join("gather_variable" if step.kind == "fork" else "concate_and_append")


@settings(deadline=None, max_examples=60)
@given(program=steps, stream=st.booleans())
def test_a_recorded_program_has_the_same_variables_without_a_server(
    tmp_path_factory: pytest.TempPathFactory, program: tuple[Step, ...], stream: bool
) -> None:
    file = tmp_path_factory.mktemp("record") / "run.jsonl"

    @sgl.function
    def written(s):
        s += "Begin"
        write(s, program)

    def run(backend: Backend) -> sgl.ProgramState:
        state = written.run(backend=backend, stream=stream)
        state.sync()
        state._stream.run.background.run_blocking(state._stream.run.all_ended)
        return state

    with sgl.Recorder(Luck(), file) as recorder:
        recorded = run(recorder)
    for _ in range(2):
        replay = sgl.Replay(file)
        replayed = run(replay)
        assert values_of(replayed) == values_of(recorded)
        assert replayed.text() == recorded.text()
        assert replayed.usage == recorded.usage
        assert replay.unused == []


def test_branches_get_their_own_answers_whichever_asks_first(path: Path) -> None:
    """The tools write nothing, so the branches' requests are equal."""

    @sgl.function
    def equal(s, delays_s):
        async def wait(delay_s: float) -> str:
            await asyncio.sleep(delay_s)
            return ""

        s += "x"
        forks = s.fork(2)
        forks += [sgl.tool(None, wait, delay_s) for delay_s in delays_s]
        forks += sgl.gen("a")
        forks.join()

    with sgl.Recorder(Luck(), path) as recorder:
        recorded = equal.run([0.1, 0.0], backend=recorder)["a"]
    assert recorded[0] != recorded[1]
    assert equal.run([0.0, 0.1], backend=sgl.Replay(path))["a"] == recorded


def test_equal_requests_are_answered_in_the_order_of_asking_not_of_answering(path: Path) -> None:
    answers = iter(["first", "second", "third"])
    delays_s = iter([0.1, 0.05, 0.0])

    class Overtaking(ScriptedBackend):
        async def generate(self, request: GenRequest) -> GenAnswer:
            text = next(answers)
            await asyncio.sleep(next(delays_s))
            return GenAnswer((Generated(text, "stop"),), Usage())

    async def ask(backend: Backend) -> list[str]:
        asked = [backend.generate(request_of("x")) for _ in range(3)]
        return [answer.texts[0].text for answer in await asyncio.gather(*asked)]

    with sgl.Recorder(Overtaking(), path) as recorder:
        assert asyncio.run(ask(recorder)) == ["first", "second", "third"]
    assert lines_of(path)[1]["answer"]["texts"][0]["text"] == "third"
    assert asyncio.run(ask(sgl.Replay(path))) == ["first", "second", "third"]


def test_losers_that_were_cancelled_lose_again(path: Path) -> None:
    async def slow_but_one(request: GenRequest) -> None:
        await asyncio.sleep(0 if request.prompt == TextPrompt("x2") else 0.3)

    @sgl.function
    def race(s):
        s += "x"
        forks = s.fork(4)
        forks += lambda index: str(index)
        forks += sgl.gen("a")
        s.ret_value = forks.first(lambda fork: True).text()
        return s.ret_value

    with sgl.Recorder(ScriptedBackend(before=slow_but_one), path) as recorder:
        assert race.run(backend=recorder).ret_value.startswith("x2")
    assert sum("cancelled" in line for line in lines_of(path)) == 3
    for _ in range(5):
        assert race.run(backend=sgl.Replay(path)).ret_value.startswith("x2")


# --- streaming -----------------------------------------------------------------------------------


@sgl.function
def asking(s):
    s += "Question?" + sgl.gen("answer")


def test_a_streamed_generation_has_the_recorded_pieces(path: Path) -> None:
    with sgl.Recorder(ScriptedBackend(lambda _: "a hare"), path) as recorder:
        asking.run(backend=recorder, stream=True).sync()
    assert [text for text, _ in lines_of(path)[1]["pieces"]] == list("a hare")
    state = asking.run(backend=sgl.Replay(path), stream=True)
    assert "".join(state.text_iter("answer")) == "a hare"
    with sgl.Recorder(ScriptedBackend(lambda _: "a hare"), path) as recorder:
        asking.run(backend=recorder)  # not streamed, but it can be read as a stream
    state = asking.run(backend=sgl.Replay(path), stream=True)
    assert "".join(state.text_iter()) == "Question?a hare"
    with pytest.raises(sgl.ProgramError, match="is closed"):
        asking.run(backend=recorder)


def test_a_generation_that_its_reader_ended_ends_in_the_same_place(path: Path) -> None:
    @sgl.function
    def until_digit(s):
        s += "?" + sgl.gen("answer", stop_regex="[0-9]")

    with sgl.Recorder(ScriptedBackend(lambda _: "abc1def"), path) as recorder:
        recorded = until_digit.run(backend=recorder)["answer"]
    assert len(lines_of(path)[1]["pieces"]) == 5  # one after the digit
    assert until_digit.run(backend=sgl.Replay(path))["answer"] == recorded == "abc"


# --- errors --------------------------------------------------------------------------------------


class Refusing(Backend):
    """A backend that fails every request with one error."""

    def __init__(self, error: Exception, key: str | None = None) -> None:
        self.error = error
        self._secrets = () if key is None else (key,)

    @property
    def secrets(self) -> tuple[str, ...]:
        return self._secrets

    @property
    def name(self) -> str:
        return "the refusing one at http://me:password@127.0.0.1"

    async def generate(self, request: GenRequest) -> GenAnswer:
        raise self.error


@pytest.mark.parametrize(
    "error",
    [
        sgl.BackendError("it answered 429: too many", status=429),
        sgl.BackendError("no answer"),
        sgl.UnsupportedError("the small one", "a regex", "use another"),
    ],
)
def test_errors_are_played_back_as_they_were(path: Path, error: sgl.BackendError) -> None:
    with sgl.Recorder(Refusing(error), path) as recorder, pytest.raises(sgl.ProgramError):
        asking.run(backend=recorder)
    with pytest.raises(sgl.ProgramError) as caught:
        asking.run(backend=sgl.Replay(path))
    again = caught.value.__cause__
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_no_key_gets_into_a_record(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", KEY + "-2")
    error = sgl.BackendError(f"refused {KEY} and {KEY}-2 at http://user:pw@host/v1")
    with sgl.Recorder(Refusing(error, key=KEY), path) as recorder:
        with pytest.raises(sgl.ProgramError):
            asking.run(backend=recorder)
        url = f"http://user:pw@images.example/a.png?signature={KEY}"
        chat = ChatPrompt((Message("user", (Media("image", url), "What?")),), "closed")
        with pytest.raises(sgl.BackendError):
            asyncio.run(recorder.generate(GenRequest(chat, DEFAULT_SAMPLING)))
    written = path.read_text()
    for secret in (KEY, "password", "user:pw", "signature"):
        assert secret not in written
    assert "images.example/a.png" in written


def test_a_recorder_is_what_its_backend_is(path: Path) -> None:
    class Modest(ScriptedBackend):
        continues_turns = False
        tells_tokens = False
        scoreless_methods = (sgl.token_length_normalized,)

    with sgl.Recorder(Modest(), path) as recorder:
        assert (recorder.continues_turns, recorder.tells_tokens) == (False, False)
        assert recorder.scoreless_methods == Modest.scoreless_methods
        assert recorder.name == "the scripted backend"
    replay = sgl.Replay(path)
    assert (replay.continues_turns, replay.tells_tokens) == (False, False)


def test_a_run_over_http_is_played_back_after_its_server_has_gone(
    path: Path, backend: sgl.VLLM, running: Any
) -> None:
    @sgl.function
    def chat(s):
        s += sgl.system("Be brief. " * 20)
        s += sgl.user("Hello")
        s += sgl.assistant(sgl.gen("a") + " and " + sgl.gen("b", temperature=0))
        s += sgl.user("Which?")
        s.assistant_begin()
        s += "It is " + sgl.select("c", ["one", "two"])
        s.assistant_end()

    with sgl.Recorder(backend, path) as recorder:
        recorded = chat.run(backend=recorder)
        info = sgl.get_server_info(recorder)
    running.stop()
    replay = sgl.Replay(path)
    replayed = chat.run(backend=replay)
    assert sgl.get_server_info(replay) == info
    sgl.flush_cache(replay)
    assert values_of(replayed) == values_of(recorded)
    assert replayed.messages() == recorded.messages()
    assert replayed.get_meta_info("c") == recorded.get_meta_info("c")
