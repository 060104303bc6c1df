"""Recording and replaying runs: the same variables without a server, and clear errors."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sgl_vllm as sgl
from sgl_vllm.lang.backends.base import Backend
from sgl_vllm.lang.backends.requests import (
    ChoiceAnswer,
    GenAnswer,
    Generated,
    GenRequest,
    ScoreAnswer,
    TokenLogprob,
)
from sgl_vllm.lang.constraints import JSON_SCHEMA, REGEX, Constraint
from sgl_vllm.lang.media import Media
from sgl_vllm.lang.prompts import ChatPrompt, Message, TextPrompt
from sgl_vllm.lang.sampling import DEFAULT_SAMPLING, Sampling
from sgl_vllm.lang.usage import Usage
from sgl_vllm.protocol.scoring import ChoiceTokens
from tests.unit.lang.random_programs import program_of, sources
from tests.unit.lang.scripted import ScriptedBackend, appending
from tests.unit.lang.test_compile import facts, facts_or_error

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


# --- the same variables --------------------------------------------------------------------------


@settings(deadline=None, max_examples=30)
@given(sources(), st.booleans())
def test_a_recorded_program_has_the_same_variables_without_a_server(
    tmp_path_factory: pytest.TempPathFactory, source: Any, stream: bool
) -> None:
    file = tmp_path_factory.mktemp("record") / "run.jsonl"
    program = program_of(source.text)

    def run(backend: Backend) -> Any:
        def run() -> sgl.ProgramState:
            state = program.run(a="ab", k=3, backend=backend, stream=stream)
            state.sync()
            return state

        with pytest.MonkeyPatch.context() as patch:  # otherwise, the time that tools take counts
            patch.setattr(sgl.global_config, "enable_prefill_during_tools", False)
            return facts_or_error(run)

    with sgl.Recorder(Luck(), file) as recorder:
        recorded = run(recorder)
    for _ in range(2):
        replay = sgl.Replay(file)
        assert run(replay) == recorded
        assert replay.unused == [] or isinstance(recorded, str)


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


asking = appending("Question?" + sgl.gen("answer"))


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
    until_digit = appending("?" + sgl.gen("answer", stop_regex="[0-9]"))
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
    assert facts(replayed) == facts(recorded)


# --- what was not recorded -----------------------------------------------------------------------


def recorded(path: Path, *requests: GenRequest) -> sgl.Replay:
    async def ask(recorder: sgl.Recorder) -> None:
        for request in requests:
            await recorder.generate(request)

    with sgl.Recorder(ScriptedBackend(), path) as recorder:
        asyncio.run(ask(recorder))
    return sgl.Replay(path)


def refusal(replay: sgl.Replay, request: GenRequest) -> str:
    with pytest.raises(sgl.BackendError) as caught:
        asyncio.run(replay.generate(request))
    return str(caught.value)


def test_a_request_that_was_not_recorded_says_what_differs_from_the_nearest(path: Path) -> None:
    long = "a common beginning that is long " * 20
    replay = recorded(path, request_of("Bye"), request_of(long + "red"), request_of("Hello"))
    said = refusal(replay, request_of(long + "blue"))
    assert "line 3" in said
    assert f"at character {len(long)}" in said
    assert "blue'" in said and "red'" in said
    assert len(said) < 400


def shown(media: Media, ending: Any = "generate") -> GenRequest:
    message = Message("user", ("Look: ", media))
    return GenRequest(ChatPrompt((message,), ending), DEFAULT_SAMPLING)


def constrained(kind: Any, text: str) -> GenRequest:
    return GenRequest(TextPrompt("Hello"), DEFAULT_SAMPLING, Constraint(kind, text))


IMAGE = Media("image", "data:image/png;base64,AAAA")


@pytest.mark.parametrize(
    ("asked", "changed", "said"),
    [
        (request_of(), request_of(temperature=0.5), "temperature is 0.5, was 1.0"),
        (request_of(), request_of(stop=("a", "b")), 'stop is ["a", "b"], was null'),
        (request_of(), request_of(max_new_tokens=7), "max_new_tokens is 7, was 128"),
        (request_of(), constrained(REGEX, "[0-9]+"), 'regex is "[0-9]+", was null'),
        # The order of a schema's keys is the order in which the model writes them.
        (
            constrained(JSON_SCHEMA, '{"a": 1, "b": 2}'),
            constrained(JSON_SCHEMA, '{"b": 2, "a": 1}'),
            "has no such generate",
        ),
        (shown(IMAGE), shown(Media("image", IMAGE.url + "BBBB")), "the prompt at character"),
        (shown(IMAGE), shown(Media("video", IMAGE.url)), "the prompt at character"),
        (shown(IMAGE), shown(replace(IMAGE, num_frames=3)), "the prompt at character"),
        (shown(IMAGE), shown(IMAGE, "closed"), "ends differently"),
    ],
)
def test_every_part_of_a_request_counts(
    path: Path, asked: GenRequest, changed: GenRequest, said: str
) -> None:
    replay = recorded(path, asked)
    assert said in refusal(replay, changed)
    asyncio.run(replay.generate(asked))


def test_an_answer_is_given_again_only_if_nothing_in_it_is_sampled(path: Path) -> None:
    sampled, fixed = request_of(temperature=0.7), request_of(temperature=0.0)
    replay = recorded(path, sampled, fixed, request_of("two"))
    answers = [asyncio.run(replay.generate(fixed)) for _ in range(3)]
    assert answers[0] == answers[1] == answers[2]
    asyncio.run(replay.generate(sampled))
    assert "requested once more" in refusal(replay, sampled)
    assert replay.unused == ["line 4: generate 'two'"]
    assert asyncio.run(replay.warm(TextPrompt("a prefix that was not recorded"))) == Usage()


# --- the file ------------------------------------------------------------------------------------


def test_a_record_that_is_damaged_is_refused_but_for_its_last_line(path: Path) -> None:
    recorded(path, request_of("one"), request_of("two"))
    whole = path.read_text()
    path.write_text(whole[:-20])
    replay = sgl.Replay(path)
    asyncio.run(replay.generate(request_of("one")))
    assert "has no such generate" in refusal(replay, request_of("two"))
    head, _, last = whole.splitlines()
    for content, said in (
        ("", "not a record"),
        ("hello\n", "not a record"),
        ('{"sgl_vllm_record": 99}\n', "not a record"),
        (f"{head}\nbroken\n{last}\n", "line 2"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=said):
            sgl.Replay(path)


def test_a_record_is_for_people_to_read(path: Path) -> None:
    recorded(path, request_of("Grüße an 木", temperature=0.0))
    head, line = path.read_text().splitlines()
    assert head == (
        '{"sgl_vllm_record": 1, "backend": "the scripted backend", "continues_turns": true, '
        '"tells_tokens": true}'
    )
    assert line == (
        '{"call": "generate", "request": {"prompt": "Grüße an 木", "sampling": {"temperature": '
        '0.0}}, "answer": {"texts": [{"text": "(10)", "finish_reason": "stop"}], "usage": '
        '{"prompt_tokens": 10, "cached_prompt_tokens": 5, "completion_tokens": 4, "calls": 1}}}'
    )


finite = st.floats(allow_nan=False)
usages = st.builds(Usage, *[st.integers(0, 99)] * 7)
logprobs = st.builds(
    TokenLogprob, st.text(), finite, st.lists(st.tuples(st.text(), finite), max_size=2).map(tuple)
)
texts = st.builds(
    Generated,
    st.text(st.characters(codec=None)),
    st.sampled_from(["stop", "length"]),
    st.lists(logprobs, max_size=2).map(tuple),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=2).map(tuple),
)
answers = st.builds(
    GenAnswer,
    st.lists(texts, min_size=1, max_size=3).map(tuple),
    usages,
    st.lists(logprobs, max_size=2).map(tuple),
)
choice_tokens = st.builds(
    ChoiceTokens,
    st.lists(st.integers(0, 9)).map(tuple),
    st.lists(finite).map(tuple),
    st.none() | st.lists(st.none() | finite).map(tuple),
)
scores = st.builds(ScoreAnswer, st.lists(choice_tokens, max_size=3).map(tuple), usages)
chosen = st.builds(ChoiceAnswer, st.integers(0, 1), usages)


@settings(deadline=None, max_examples=50)
@given(answer=answers, score=scores | chosen, prompt=st.text(st.characters(codec=None)))
def test_any_answer_is_replayed_unchanged(
    tmp_path_factory: pytest.TempPathFactory, answer: Any, score: Any, prompt: str
) -> None:
    file = tmp_path_factory.mktemp("record") / "run.jsonl"

    class Answering(ScriptedBackend):
        async def generate(self, request):
            return answer

        async def score(self, prompt, choices, *, unconditional, warm):
            return score

    async def ask(backend: Backend) -> tuple[Any, Any]:
        return (
            await backend.generate(request_of(prompt)),
            await backend.score(TextPrompt(prompt), ("a", "b"), unconditional=False, warm=True),
        )

    with sgl.Recorder(Answering(), file) as recorder:
        asyncio.run(ask(recorder))
    assert asyncio.run(ask(sgl.Replay(file))) == (answer, score)
