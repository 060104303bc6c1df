"""The files of recorded runs: what is in them, and which requests they answer."""

from __future__ import annotations

import asyncio
import json
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
from tests.unit.lang.scripted import ScriptedBackend


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.jsonl"


def request_of(text: str = "Hello", **sampling: Any) -> GenRequest:
    return GenRequest(TextPrompt(text), Sampling(**sampling).over(DEFAULT_SAMPLING))


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
    sampled, fixed, other = (
        request_of(temperature=0.7),
        request_of(temperature=0.0),
        request_of("two"),
    )
    replay = recorded(path, sampled, fixed, other)
    answers = [asyncio.run(replay.generate(fixed)) for _ in range(3)]
    assert answers[0] == answers[1] == answers[2]
    asyncio.run(replay.generate(sampled))
    assert "requested once more" in refusal(replay, sampled)
    assert replay.unused == ["line 4: generate 'two'"]
    assert asyncio.run(replay.warm(TextPrompt("a prefix that was not recorded"))) == Usage()


# --- the file ------------------------------------------------------------------------------------


def test_an_exchange_is_in_the_file_as_soon_as_it_ends(path: Path) -> None:
    recorder = sgl.Recorder(ScriptedBackend(), path)
    asyncio.run(recorder.generate(request_of()))
    _, line = path.read_text().splitlines()
    assert json.loads(line)["call"] == "generate"
    recorder.close()


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


@settings(deadline=None, max_examples=100)
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
