"""What all hosted services have in common: streams, retries, errors, and choices without scores.

Also the packages that backends need.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fastapi.responses import PlainTextResponse

import sgl_vllm as sgl
from tests.unit.lang.scripted import appending
from tests.unit.lang.services import (
    ANTHROPIC_ROUTES,
    OPENAI_ROUTES,
    Service,
    error,
    litellm_or_a_stand_in,
    serving,
)

Make = Callable[..., sgl.Backend]

MAKERS: dict[str, Callable[..., sgl.Backend]] = {
    "OpenAI": lambda url, **options: sgl.OpenAI("m", base_url=f"{url}/v1", **options),
    "Anthropic": lambda url, **options: sgl.Anthropic("m", base_url=url, **options),
    "LiteLLM": lambda url, **options: sgl.LiteLLM("openai/m", base_url=f"{url}/v1", **options),
}
BUT_LITELLM = pytest.mark.parametrize("kind", ["OpenAI", "Anthropic"], indirect=True)


@pytest.fixture(params=[*MAKERS])
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "Anthropic":
        pytest.importorskip("anthropic")
    return str(request.param)


@pytest.fixture
def service(kind: str) -> Iterator[Service]:
    finish = "end_turn" if kind == "Anthropic" else "stop"
    routes = ANTHROPIC_ROUTES if kind == "Anthropic" else OPENAI_ROUTES
    with litellm_or_a_stand_in(), serving(Service(finish=finish), routes) as service:
        yield service


@pytest.fixture
def make(kind: str, service: Service) -> Make:
    """Makes a backend for the service, which is also the default one."""

    def made(**options: Any) -> sgl.Backend:
        backend = MAKERS[kind](
            service.url, **{"api_key": "key", "timeout_s": 10, "max_retries": 0, **options}
        )
        sgl.set_default_backend(backend)
        return backend

    made()
    return made


@sgl.function
def ask(s, question, **options):
    s += sgl.user(question)
    s += sgl.assistant(sgl.gen("answer", **options))


@sgl.function
def pick(s, method=None):
    s += sgl.user("Which?")
    s += sgl.assistant(sgl.select("pick", ["a", "b"], choices_method=method))


# --- LiteLLM, whose requests are OpenAI's ---------------------------------------------------------

LITELLM = pytest.mark.parametrize("kind", ["LiteLLM"], indirect=True)


@LITELLM
def test_litellm_gets_a_chat_without_what_is_at_its_default(service, make):
    service.reply = lambda body: "{}"
    options = {"max_new_tokens": 9, "temperature": 0.5, "stop": ["x", "y"]}
    ask.run("Why?", json_schema={"type": "object"}, **options)
    body = service.body
    assert body["model"] == "m"
    assert body["messages"] == [{"role": "user", "content": "Why?"}]
    assert (body["max_tokens"], body["temperature"], body["stop"]) == (9, 0.5, ["x", "y"])
    assert not {"top_p", "n", "frequency_penalty", "presence_penalty"} & body.keys()
    assert body["response_format"]["type"] == "json_schema"
    assert service.requests[0][2]["authorization"] == "Bearer key"


# --- what they lack ------------------------------------------------------------------------------

NAMES = {
    "OpenAI": "the server at",
    "Anthropic": "Anthropic's m",
    "LiteLLM": "openai/m through LiteLLM",
}
OBJECT = {"type": "object", "properties": {}}
OF_NO_SERVICE: list[dict[str, Any]] = [
    {"min_tokens": 3}, {"ignore_eos": True}, {"stop_token_ids": [1]}, {"min_p": 0.1},
    {"regex": "[0-9]+"}, {"dtype": int},
]  # fmt: skip
LACKING: dict[str, list[tuple[dict[str, Any], str]]] = {
    "OpenAI": [({"return_logprob": True, "logprob_start_len": 0}, "logprob_start_len")],
    "Anthropic": [
        ({"n": 2}, "n"),
        ({"frequency_penalty": 0.1}, "frequency_penalty"),
        ({"presence_penalty": 0.1}, "presence_penalty"),
        ({"return_logprob": True}, "return_logprob"),
        ({"json_schema": OBJECT, "stop": "x"}, "stop with json_schema"),
        ({"json_schema": {"type": "string"}}, "a json_schema that is not of an object"),
    ],
    "LiteLLM": [({"top_k": 5}, "top_k")],
}
for lacking in LACKING.values():
    lacking += [(options, next(iter(options))) for options in OF_NO_SERVICE]


@pytest.mark.parametrize(
    ("kind", "options", "feature"),
    [(kind, *case) for kind, cases in LACKING.items() for case in cases],
    indirect=["kind"],
)
def test_an_option_that_an_api_lacks_is_refused_by_name(kind, service, make, options, feature):
    with pytest.raises(sgl.ProgramError, match=f"{feature}.* is not supported by {NAMES[kind]}"):
        ask.run("Why?", **options)
    assert service.requests == []


def test_a_prompt_without_roles_is_refused(service, make):
    with pytest.raises(sgl.ProgramError, match=r"a prompt without roles.*put the text into turns"):
        appending("Once" + sgl.gen("a")).run()
    assert service.requests == []


# --- streams -------------------------------------------------------------------------------------


def test_text_is_streamed(service, make):
    service.reply = lambda body: "one two three"
    state = ask.run("Count.", stream=True)
    assert "".join(state.text_iter("answer")) == "one two three"
    state.sync()
    assert service.body["stream"] is True
    assert (state.usage.prompt_tokens, state.usage.calls) == (10, 1)
    assert state.usage.completion_tokens > 0


def test_a_stop_pattern_ends_the_stream(service, make):
    service.reply = lambda body: "abc123" * 50
    assert ask.run("Go.", stop_regex=r"\d")["answer"] == "abc"


@BUT_LITELLM
@pytest.mark.parametrize("rudely", [False, True])
def test_a_stream_that_breaks_off_is_an_error(service, make, rudely):
    service.break_off_rudely = rudely
    service.reply, service.break_off_after = lambda body: "one two three", 2
    with pytest.raises(sgl.ProgramError, match="stopped in the middle"):
        ask.run("Count.", stop_regex="never")


@BUT_LITELLM
def test_an_error_within_a_stream_is_reported(kind, service, make):
    said = '{"type": "error", "error": {"type": "overloaded_error", "message": "it fell over"}}'
    event = "event: error\n" if kind == "Anthropic" else ""
    service.fault = lambda body: PlainTextResponse(
        f"{event}data: {said}\n\n", media_type="text/event-stream"
    )
    with pytest.raises(sgl.ProgramError, match="it fell over"):
        ask.run("Count.", stop_regex="never")


# --- choices -------------------------------------------------------------------------------------


def chooses(kind: str, service: Service, document: str) -> None:
    service.reply = lambda body: document
    if kind == "Anthropic":
        service.finish = "tool_use"


def test_the_model_chooses_without_a_temperature_if_it_takes_none(kind, service, make):
    chooses(kind, service, '{"choice": "b"}')
    assert pick.run()["pick"] == "b"
    assert service.body["temperature"] == 0.0
    service.fault = lambda body: (
        error(400, "temperature may not be set for this model") if "temperature" in body else None
    )
    assert pick.run()["pick"] == "b"
    assert len(service.requests) == 3


@pytest.mark.parametrize("said", ['{"choice": "c"}', "{}", "[]"])
def test_a_choice_that_is_none_is_an_error(kind, service, make, said):
    chooses(kind, service, said)
    with pytest.raises(sgl.ProgramError, match="none of the choices"):
        pick.run()


@pytest.mark.parametrize(
    "method", [sgl.greedy_token_selection, sgl.unconditional_likelihood_normalized]
)
def test_methods_that_need_scores_are_refused(service, make, method):
    with pytest.raises(sgl.ProgramError, match=r"select by \w+ is not supported"):
        pick.run(method)
    assert service.requests == []


# --- failures ------------------------------------------------------------------------------------


def test_a_wrong_key_is_reported_as_rejected(service, make):
    service.fault = lambda body: error(401, "invalid key")
    with pytest.raises(sgl.ProgramError, match=r"rejected the api_key: .*api_key="):
        ask.run("Why?")


@pytest.mark.parametrize("status", [400, 500])
def test_what_the_service_says_is_passed_on(service, make, status):
    service.fault = lambda body: error(status, "no such model")
    with pytest.raises(sgl.ProgramError, match=f"answered {status}: .*no such model") as caught:
        ask.run("Why?")
    assert isinstance(caught.value.__cause__, sgl.BackendError)
    assert caught.value.__cause__.status == status


def test_too_many_requests_are_tried_again(service, make):
    left = iter([error(429, "slow down"), error(503, "busy")])
    service.fault = lambda body: next(left, None)
    assert ask.run("Why?", backend=make(max_retries=2))["answer"] == "fine"
    assert len(service.requests) == 3


@BUT_LITELLM
@pytest.mark.parametrize(
    "garbage", ["<html>", "{", "[1]", "{}", '{"stop_reason": "x", "choices": [{"message": 1}]}']
)
def test_an_answer_that_cannot_be_read_is_an_error(service, make, garbage):
    service.fault = lambda body: PlainTextResponse(garbage, media_type="application/json")
    with pytest.raises(sgl.ProgramError, match="cannot be read"):
        ask.run("Why?")


def test_a_service_that_stalls_is_left_after_the_timeout(service, make):
    async def stall(body):
        await asyncio.sleep(20)

    service.fault = stall
    begun_s = time.monotonic()
    with pytest.raises(sgl.ProgramError, match=r"did not answer within 0\.3 s"):
        ask.run("Why?", backend=make(timeout_s=0.3))
    assert time.monotonic() - begun_s < 10


@BUT_LITELLM
def test_an_address_without_a_server_is_an_error_that_names_it(kind):
    backend = MAKERS[kind]("http://127.0.0.1:9", api_key="k", max_retries=0)
    with pytest.raises(sgl.ProgramError, match=r"no answer from .* at http://127.0.0.1:9"):
        ask.run("Why?", backend=backend)


# --- packages ------------------------------------------------------------------------------------

HEAVY = {"anthropic", "httpx", "litellm", "openai", "pydantic", "torch", "vllm"}

MAKE_ALL = """
import sys
import sgl_vllm as sgl
sgl.VLLM("http://127.0.0.1:1")
sgl.OpenAI("m"), sgl.Anthropic("m"), sgl.LiteLLM("m"), sgl.Engine("m", plugin=True)
print(*{name.split(".")[0] for name in sys.modules})
"""


def test_nothing_heavy_is_imported_before_a_backend_is_used():
    done = subprocess.run([sys.executable, "-c", MAKE_ALL], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert HEAVY.isdisjoint(done.stdout.split())


@pytest.mark.parametrize(
    ("backend", "package", "advice"),
    [
        (sgl.Anthropic("m", api_key="k"), "anthropic", "pip install anthropic"),
        (sgl.LiteLLM("m"), "litellm", "pip install litellm"),
        (sgl.Engine("m"), "vllm.engine.arg_utils", "needs vLLM .*sgl-vllm doctor"),
    ],
)
def test_a_missing_package_is_named_with_the_way_to_get_it(monkeypatch, backend, package, advice):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(sgl.ProgramError, match=advice):
        ask.run("Why?", backend=backend)
