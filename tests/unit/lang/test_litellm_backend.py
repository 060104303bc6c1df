"""The LiteLLM backend against a scripted service.

LiteLLM needs an older openai package than vLLM, so the two are rarely installed together. If it is
missing, a module of two dozen lines takes its place and sends its arguments with the official
openai client. The tests then check the calls to LiteLLM, not LiteLLM itself.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import types

import openai
import pydantic
import pytest

import sgl_vllm as sgl
from tests.unit.lang.services import OPENAI_ROUTES, Service, error, serving


async def _acompletion(*, model, timeout, num_retries, api_key=None, base_url=None, **options):
    client = openai.AsyncOpenAI(
        api_key=api_key or "none", base_url=base_url, timeout=timeout, max_retries=num_retries
    )
    answer = await client.chat.completions.create(model=model.removeprefix("openai/"), **options)
    return _Stream(answer) if options.get("stream") else answer


class _Stream:
    def __init__(self, stream):
        self._stream = stream

    def __aiter__(self):
        return self._stream.__aiter__()

    async def aclose(self):
        await self._stream.close()


@pytest.fixture(autouse=True, scope="module")
def litellm():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # prices are in the network
        if importlib.util.find_spec("litellm") is None:
            standing_in = types.ModuleType("litellm")
            vars(standing_in).update(acompletion=_acompletion)
            patch.setitem(sys.modules, "litellm", standing_in)
        yield


@pytest.fixture
def service():
    with serving(Service(), OPENAI_ROUTES) as service:
        yield service


def backend_of(service, **options):
    defaults = {"api_key": "key", "max_retries": 0, "timeout_s": 10}
    return sgl.LiteLLM("openai/a-model", base_url=f"{service.url}/v1", **{**defaults, **options})


@pytest.fixture
def backend(service):
    backend = backend_of(service)
    sgl.set_default_backend(backend)
    return backend


@sgl.function
def ask(s, question, **options):
    s += sgl.user(question)
    s += sgl.assistant(sgl.gen("answer", **options))


class Person(pydantic.BaseModel):
    name: str
    age: int


def test_a_chat_is_sent_without_what_is_at_its_default(service, backend):
    state = ask.run("Why?", max_new_tokens=9, temperature=0.5, stop=["x", "y"])
    assert state["answer"] == "fine"
    body = service.body
    assert body["model"] == "a-model"
    assert body["messages"] == [{"role": "user", "content": "Why?"}]
    assert (body["max_tokens"], body["temperature"], body["stop"]) == (9, 0.5, ["x", "y"])
    assert not {"top_p", "n", "frequency_penalty", "presence_penalty"} & body.keys()
    assert service.requests[0][2]["authorization"] == "Bearer key"


def test_usage_is_read(service, backend):
    usage = ask.run("Why?").usage
    assert (usage.prompt_tokens, usage.cached_prompt_tokens) == (10, 4)
    assert (usage.completion_tokens, usage.calls) == (4, 1)


def test_text_is_streamed(service, backend):
    service.reply = lambda body: "one two three"
    state = ask.run("Count.", stream=True)
    assert "".join(state.text_iter("answer")) == "one two three"
    assert service.body["stream"] is True


def test_a_stop_pattern_ends_the_stream(service, backend):
    service.reply = lambda body: "abc123" * 50
    assert ask.run("Go.", stop_regex=r"\d")["answer"] == "abc"


def test_a_json_schema_is_a_response_format(service, backend):
    service.reply = lambda body: '{"name": "Ada", "age": 36}'
    assert ask.run("Who?", json_schema=Person)["answer"] == Person(name="Ada", age=36)
    assert service.body["response_format"]["type"] == "json_schema"


def test_a_select_lets_the_model_choose(service, backend):
    service.reply = lambda body: '{"choice": "b"}'
    assert ask.run("Which?", choices=["a", "b"])["answer"] == "b"


@pytest.mark.parametrize(
    ("options", "feature"),
    [({"top_k": 5}, "top_k"), ({"regex": "a"}, "regex"), ({"min_tokens": 1}, "min_tokens")],
)
def test_what_openais_words_lack_is_refused_by_name(service, backend, options, feature):
    with pytest.raises(sgl.ProgramError, match=rf"{feature}.* by openai/a-model through LiteLLM"):
        ask.run("Why?", **options)
    assert service.requests == []


def test_a_prompt_without_roles_is_refused(backend):
    @sgl.function
    def plain(s):
        s += "Once" + sgl.gen("a")

    with pytest.raises(sgl.ProgramError, match="without roles"):
        plain.run()


def test_a_rejected_key_is_reported(service, backend):
    service.fault = lambda body: error(401, "invalid key")
    with pytest.raises(sgl.ProgramError, match=r"rejected the api_key: .*LiteLLM\(..., api_key="):
        ask.run("Why?")


@pytest.mark.parametrize("status", [400, 404])
def test_what_the_service_says_is_passed_on(service, backend, status):
    service.fault = lambda body: error(status, "no such model")
    with pytest.raises(sgl.ProgramError, match=rf"answered {status}: .*no such model"):
        ask.run("Why?")


def test_too_many_requests_are_tried_again(service):
    left = iter([error(429, "slow down")])
    service.fault = lambda body: next(left, None)
    assert ask.run("Why?", backend=backend_of(service, max_retries=1))["answer"] == "fine"
    assert len(service.requests) == 2


def test_a_service_that_stalls_is_left_after_the_timeout(service):
    async def stall(body):
        await asyncio.sleep(20)

    service.fault = stall
    with pytest.raises(sgl.ProgramError, match=r"did not answer within 0\.5 s"):
        ask.run("Why?", backend=backend_of(service, timeout_s=0.5))
