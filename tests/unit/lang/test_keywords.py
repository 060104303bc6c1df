"""A misspelled option is answered with the one that was meant, wherever it is given."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

import sgl_vllm as sgl
import sgl_vllm.sglang as sglang
from tests.unit.lang.scripted import ScriptedBackend

pytestmark = pytest.mark.timeout(20)

Given = dict[str, Any]
BACKEND = ScriptedBackend()
URL = "http://127.0.0.1:8000"


@sgl.function
def program(s, question=""):
    s += question + sgl.gen("answer")


@sglang.function
def of_sglang(s, question=""):
    s += question + sglang.gen("answer")


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(coroutine)


CALLS: list[tuple[str, Callable[..., Any], str, str]] = [
    # What is called, how, the misspelled option, and the right one.
    ("gen", lambda **o: sgl.gen("a", **o), "temprature", "temperature"),
    ("gen", lambda **o: sgl.gen("a", **o), "max_new_tokens", "max_tokens"),
    ("gen", lambda **o: sgl.gen_int("a", **o), "temprature", "temperature"),
    ("gen", lambda **o: sgl.gen_string("a", **o), "stops", "stop"),
    ("select", lambda **o: sgl.select("a", ["x"], **o), "choice_method", "choices_method"),
    ("any_order", lambda **o: sgl.any_order("x", **o), "repeatd", "repeated"),
    ("speech", lambda **o: sgl.speech("a", "x", **o), "voise", "voice"),
    ("picture", lambda **o: sgl.picture("a", **o), "sise", "size"),
    ("transcribe", lambda **o: sgl.transcribe("a", b"", **o), "langage", "language"),
    ("video", lambda **o: sgl.video("x", **o), "num_frame", "num_frames"),
    ("agent", lambda **o: sgl.agent("a", "x", [run], **o), "max_turn", "max_turns"),
    ("vote", lambda **o: sgl.vote("a", **o), "kee", "key"),
    ("best_of", lambda **o: sgl.best_of("a", **o), "enogh", "enough"),
    ("judge", lambda **o: sgl.judge("a", **o), "scales", "scale"),
    ("map_reduce", lambda **o: sgl.map_reduce("a", **o), "reduces", "reduce"),
    ("retry_until", lambda **o: sgl.retry_until("a", **o), "atempts", "attempts"),
    ("function", lambda **o: sgl.function(**o), "num_api_spec_token", "num_api_spec_tokens"),
    ("program", lambda **o: program.run(**o), "temprature", "temperature"),
    ("program", lambda **o: program.run("x", **o), "max_tokens", "max_new_tokens"),
    ("program", lambda **o: program(**o), "bakend", "backend"),
    ("program", lambda **o: program.run(**o), "quetsion", "question"),
    ("program", lambda **o: run(program.run_async(**o)), "temprature", "temperature"),
    ("program", lambda **o: program.bind(**o), "quetsion", "question"),
    ("program", lambda **o: program.compile().run(**o), "temprature", "temperature"),
    ("with_options", lambda **o: program.with_options(**o), "temprature", "temperature"),
    ("program", lambda **o: program.with_options().run(**o), "quetsion", "question"),
    ("program", lambda **o: run(program.with_options().run_async(**o)), "quetsion", "question"),
    ("run_batch", lambda **o: program.run_batch([{}], **o), "temprature", "temperature"),
    ("run_batch", lambda **o: program.run_batch([{}], **o), "num_thread", "num_threads"),
    ("run_batch", lambda **o: run(program.run_batch_async([{}], **o)), "top_pp", "top_p"),
    ("VLLM", lambda **o: sgl.VLLM(URL, **o), "cache_sald", "cache_salt"),
    ("VLLM", lambda **o: sgl.RuntimeEndpoint(URL, **o), "api_ky", "api_key"),
    ("OpenAI", lambda **o: sgl.OpenAI("m", **o), "base_ulr", "base_url"),
    ("Anthropic", lambda **o: sgl.Anthropic("m", **o), "timeout", "timeout_s"),
    ("LiteLLM", lambda **o: sgl.LiteLLM("m", **o), "temprature", "temperature"),
    ("Combined", lambda **o: sgl.Combined(BACKEND, **o), "pictures", "picture"),
    ("Recorder", lambda **o: sgl.Recorder(BACKEND, **o), "paths", "path"),
    ("Replay", lambda **o: sgl.Replay(**o), "paths", "path"),
    ("gen", lambda **o: sglang.gen("a", **o), "temprature", "temperature"),
    ("select", lambda **o: sglang.select("a", ["x"], **o), "choice_method", "choices_method"),
    ("of_sglang", lambda **o: of_sglang.run(**o), "temprature", "temperature"),
    ("RuntimeEndpoint", lambda **o: sglang.RuntimeEndpoint(URL, **o), "api_ky", "api_key"),
]


@pytest.mark.parametrize(("called", "call", "wrong", "right"), CALLS)
def test_a_misspelled_option_is_answered_with_the_nearest(
    called: str, call: Callable[..., Any], wrong: str, right: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = ScriptedBackend()
    monkeypatch.setattr(sgl.global_config, "default_backend", backend)
    message = f"got an unexpected keyword argument {wrong!r}; did you mean {right}?"
    with pytest.raises(TypeError, match=rf"^{called}(\(\))? {re.escape(message)}$") as refused:
        call(**{wrong: 0})
    assert refused.value.__suppress_context__ and backend.asked == []


def test_an_option_that_nothing_resembles_is_refused_as_python_does() -> None:
    make: Any = sgl.gen
    with pytest.raises(TypeError, match=r"^gen\(\) got an unexpected keyword argument 'xyz'$"):
        make("a", xyz=0)
    with pytest.raises(TypeError, match="stop must be a text or a list of texts, not 3"):
        make("a", stop=3)
    with pytest.raises(ValueError, match="max_tokens must be at least 1, not 0"):
        make("a", max_tokens=0)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("temperature", -1, "temperature must be at least 0, not -1"),
        ("temperature", "hot", "temperature must be a number, not 'hot'"),
        ("temperature", float("nan"), "temperature must be a number, not nan"),
        ("top_p", 1.5, "top_p must be at most 1, not 1.5"),
    ],
)
def test_a_number_that_no_server_takes_is_refused_before_anything_is_sent(
    option: str, value: Any, message: str
) -> None:
    for make in (sgl.gen, program.with_options, program.run):
        with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}$"):
            make(**{option: value})


def test_services_behind_litellm_may_have_options_that_are_not_known_here() -> None:
    sgl.LiteLLM("m", timeout=3, num_retries=1, api_base=URL, vertex_project="p", temperature=0)


def test_a_program_that_takes_any_keyword_gets_it() -> None:
    @sgl.function
    def open_program(s, **given):
        s += str(given)

    assert open_program.run(temprature=0, backend=BACKEND).text() == "{'temprature': 0}"
