"""The LiteLLM backend against a scripted service.

If LiteLLM is missing, the tests check the calls to it (`litellm_or_a_stand_in`).
"""

from __future__ import annotations

import pydantic
import pytest

import sgl_vllm as sgl
from tests.unit.lang.services import OPENAI_ROUTES, Service, litellm_or_a_stand_in, serving


@pytest.fixture(autouse=True, scope="module")
def litellm():
    with litellm_or_a_stand_in():
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


def test_a_json_schema_is_a_response_format(service, backend):
    service.reply = lambda body: '{"name": "Ada", "age": 36}'
    assert ask.run("Who?", json_schema=Person)["answer"] == Person(name="Ada", age=36)
    assert service.body["response_format"]["type"] == "json_schema"


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
