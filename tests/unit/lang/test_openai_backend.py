"""The OpenAI backend against a scripted service, through the official client."""

from __future__ import annotations

import json
import logging

import pydantic
import pytest
from fastapi.responses import PlainTextResponse
from hypothesis import given, settings
from hypothesis import strategies as st

import sgl_vllm as sgl
from sgl_vllm.lang.backends.openai_service import OPENAI_URL, OpenAI, options_body, without_defaults
from sgl_vllm.lang.backends.scoreless import strict_schema
from sgl_vllm.lang.sampling import DEFAULT_SAMPLING
from tests.effort import examples
from tests.unit.lang.scripted import appending
from tests.unit.lang.services import OPENAI_ROUTES, Service, error, serving


@pytest.fixture
def service():
    with serving(Service(), OPENAI_ROUTES) as service:
        yield service


@pytest.fixture
def chat(service):
    return OpenAI("a-chat-model", base_url=f"{service.url}/v1", timeout_s=10, max_retries=0)


@pytest.fixture
def completer(service):
    return OpenAI("davinci-002", base_url=f"{service.url}/v1", timeout_s=10, max_retries=0)


@sgl.function
def ask(s, question, **options):
    s += sgl.system("Be brief.")
    s += sgl.user(question)
    s += sgl.assistant(sgl.gen("answer", **options))


@sgl.function
def complete(s, prompt, **options):
    s += prompt + sgl.gen("answer", **options)


# --- requests on the wire ------------------------------------------------------------------------


def test_a_chat_is_sent_with_the_options_that_the_api_has_and_no_others(service, chat):
    state = ask.run("Why?", backend=chat, max_new_tokens=9, stop=["\n", "."], temperature=0.5)
    assert state["answer"] == "fine"
    assert service.requests[0][0] == "/v1/chat/completions"
    assert service.body == {
        "model": "a-chat-model",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Why?"},
        ],
        "max_tokens": 9,
        "n": 1,
        "stop": ["\n", "."],
        "temperature": 0.5,
        "top_p": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
    }


def test_a_completion_model_gets_the_text(service, completer):
    state = complete.run("Once", backend=completer, return_logprob=True, top_logprobs_num=2)
    assert state.text() == "Oncefine"
    assert service.requests[0][0] == "/v1/completions"
    assert (service.body["prompt"], service.body["logprobs"]) == ("Once", 2)
    told = state.get_meta_info("answer")["output_token_logprobs"]
    assert [(token["text"], token["logprob"]) for token in told] == [(c, -0.5) for c in "fine"]


def test_openai_itself_gets_its_own_words_and_no_defaults(monkeypatch):
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    backend = OpenAI("o1")
    assert backend.base_url == OPENAI_URL and backend.is_openai_itself
    body = {"messages": [], **options_body(DEFAULT_SAMPLING, chat=True)}
    assert backend.adapted(body) == {"messages": [], "max_completion_tokens": 128}
    assert not OpenAI("o1", base_url="http://evil-openai.com/v1").is_openai_itself
    body = {"temperature": 0.0, "top_p": 1.0, "n": 2, "stop": "x"}
    assert without_defaults(body) == {"temperature": 0.0, "n": 2, "stop": "x"}


def test_the_kind_of_model_follows_from_its_name_or_the_argument():
    completing = ["gpt-3.5-turbo-instruct", "gpt-3.5-turbo-instruct-0914", "babbage-002"]
    for model in (*completing, "gpt-4o", "Qwen2.5-7B-Instruct"):
        is_chat = model not in completing
        assert OpenAI(model).is_chat_model is is_chat
        assert OpenAI(model, is_chat_model=not is_chat).is_chat_model is not is_chat


def test_several_texts_logprobs_and_usage_are_read(service, chat):
    state = ask.run(
        "Why?", n=2, return_logprob=True, top_logprobs_num=1, temperature=0.7, backend=chat
    )
    assert state["answer"] == ["fine", "fine"]
    assert service.body["logprobs"] is True and service.body["top_logprobs"] == 1
    told = state.get_meta_info("answer")["output_token_logprobs"]
    assert [len(of_one) for of_one in told] == [4, 4]
    assert state.usage.prompt_tokens == 10
    assert state.usage.cached_prompt_tokens == 4
    assert state.usage.completion_tokens == 4
    assert state.usage.calls == 1


# --- JSON ----------------------------------------------------------------------------------------


class Person(pydantic.BaseModel):
    name: str
    age: int


def test_a_json_schema_is_a_strict_response_format_where_it_can_be(service, chat):
    service.reply = lambda body: '{"name": "Ada", "age": 36}'
    state = ask.run("Who?", json_schema=Person, backend=chat)
    assert state["answer"] == Person(name="Ada", age=36)
    optional = {"type": "object", "properties": {"a": {"type": "integer"}}}
    ask.run("Who?", json_schema=optional, backend=chat)
    strict, loose = (body["response_format"]["json_schema"] for body in service.bodies)
    assert strict["strict"] is True and strict["schema"]["additionalProperties"] is False
    assert loose["strict"] is False and loose["schema"] == optional


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"type": "string"}},
        {"type": "object", "properties": {"a": {"type": "string", "minLength": 3}},
         "required": ["a"]},
        {"type": "object", "properties": {}, "additionalProperties": {"type": "string"}},
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/A", "title": "A"}},
         "required": ["a"], "$defs": {"A": {"type": "string"}}},
        {"type": "object", "properties": {"a": True}, "required": ["a"]},
    ],
)  # fmt: skip
def test_what_strict_mode_cannot_express_is_sent_without_it(schema):
    assert strict_schema(schema) is None


def test_strict_mode_closes_the_objects_inside_too():
    inner = {"type": "object", "properties": {"b": {"type": "null"}}, "required": ["b"]}
    schema = {
        "type": "object",
        "properties": {"a": {"anyOf": [{"$ref": "#/$defs/I"}, {"type": "array", "items": inner}]}},
        "required": ["a"],
        "$defs": {"I": inner},
    }
    strict = strict_schema(schema)
    assert strict is not None
    closed = {**inner, "additionalProperties": False}
    assert strict["$defs"]["I"] == closed
    assert strict["properties"]["a"]["anyOf"][1]["items"] == closed
    assert "additionalProperties" not in inner  # the given schema stays as it is


_leaves = st.sampled_from(
    [
        {"type": "integer"},
        {"type": "string"},
        {"enum": ["a", 1]},
        {"type": "string", "minLength": 2},
    ]
)


def _schemas(inner):
    def object_of(properties, required, closed):
        schema = {"type": "object", "properties": properties}
        schema["required"] = [key for key in properties if key in required]
        return schema | ({} if closed is None else {"additionalProperties": closed})

    properties = st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    required = st.sampled_from(["abc", "abc", "a", ""])
    objects = st.builds(object_of, properties, required, st.sampled_from([None, None, False, True]))
    arrays = st.builds(lambda items: {"type": "array", "items": items}, inner)
    return objects | arrays | st.builds(lambda *of: {"anyOf": list(of)}, inner, inner)


_documents = st.recursive(
    st.sampled_from(["a", "ab", 1, 2]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abcd"), inner),
    max_leaves=6,
)


@settings(max_examples=examples(150), deadline=None)
@given(st.recursive(_leaves, _schemas, max_leaves=6), _documents)
def test_every_document_of_a_strict_schema_is_one_of_the_given(schema, document):
    jsonschema = pytest.importorskip("jsonschema")
    schema = {"type": "object", "properties": {"top": schema}, "required": ["top"]}
    strict = strict_schema(schema)
    document = {"top": document}
    if strict is not None and jsonschema.Draft202012Validator(strict).is_valid(document):
        assert jsonschema.Draft202012Validator(schema).is_valid(document)


def test_a_refusal_is_an_error_that_quotes_it(service, chat):
    refusal = {
        "message": {"content": None, "refusal": "I would rather not"},
        "finish_reason": "stop",
    }
    service.fault = lambda body: PlainTextResponse(
        json.dumps({"choices": [refusal]}), media_type="application/json"
    )
    with pytest.raises(sgl.ProgramError, match="refused to answer: I would rather not"):
        ask.run("Who?", json_schema=Person, backend=chat)


# --- streaming -----------------------------------------------------------------------------------


SIX = ("#", "@", "%", "&", "END", "four")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_of_more_than_four_stop_texts_four_are_sent_and_the_client_cuts_at_all(
    service, chat, completer, caplog, kind, stream
):
    service.reply = lambda body: "one two three four five END"
    program, backend = (ask, chat) if kind == "chat" else (complete, completer)
    for _ in range(2):
        state = program.run("Count.", stop=SIX, stream=stream, backend=backend)
        assert "".join(state.text_iter("answer")) == "one two three "
        assert state.get_meta_info("answer")["finish_reason"] == "stop"
    assert [body["stop"] for body in service.bodies] == [["#", "@", "%", "&"]] * 2
    assert caplog.text.count("the API takes 4 stop texts") == 1


def test_several_texts_are_cut_at_all_stop_texts_with_their_logprobs(service, chat):
    service.reply = lambda body: "a END b"
    state = ask.run("Go.", n=2, stop=SIX, return_logprob=True, backend=chat)
    assert state["answer"] == ["a ", "a "]
    tokens = state.get_meta_info("answer")["output_token_logprobs"]
    assert [[token["text"] for token in text] for text in tokens] == [["a", " "]] * 2


# --- what it lacks -------------------------------------------------------------------------------


def test_a_prompt_that_a_model_does_not_take_is_refused_with_advice(service, chat, completer):
    begun = appending(sgl.user("Who?") + sgl.assistant("Name: " + sgl.gen("name")))

    @sgl.function
    def watch(s, **options):
        s += sgl.user("This:" + sgl.video("https://example.org/a.mp4", **options))
        s += sgl.assistant(sgl.gen("answer"))

    itself = OpenAI("gpt-4o", base_url=OPENAI_URL, api_key="none")
    for run, message in (
        (lambda: ask.run("Why?", backend=completer), r"with roles .*leave the roles out"),
        (lambda: begun.run(backend=chat), "gen after other text in a turn is not supported"),
        (lambda: watch.run(backend=itself), "video is not supported by OpenAI's gpt-4o"),
        (lambda: watch.run(backend=chat, num_frames=4), "num_frames"),
        (
            lambda: complete.run("Who?", json_schema=Person, backend=completer),
            r"json_schema .*use a chat model",
        ),
    ):
        with pytest.raises(sgl.ProgramError, match=message):
            run()
    for ask_server in (sgl.flush_cache, sgl.get_server_info):
        with pytest.raises(sgl.UnsupportedError, match=ask_server.__name__):
            ask_server(chat)
    assert service.requests == []


# --- select --------------------------------------------------------------------------------------


@sgl.function
def pick(s, choices, method=None):
    s += sgl.user("Which?")
    s += sgl.assistant(sgl.select("pick", choices, choices_method=method))


def test_a_chat_chooses_within_a_schema_and_says_so_once(service, chat, caplog):
    service.reply = lambda body: '{"choice": " no"}'
    with caplog.at_level(logging.WARNING, "sgl_vllm"):
        for _ in range(2):
            state = pick.run([" yes", " no"], backend=chat)
    assert state["pick"] == " no"
    asked = service.bodies[0]["response_format"]["json_schema"]
    assert asked["strict"] is True
    assert asked["schema"]["properties"]["choice"]["enum"] == [" yes", " no"]
    assert service.bodies[0]["temperature"] == 0.0
    assert [r.message for r in caplog.records if "lets the model choose" in r.message][1:] == []
    assert state.get_meta_info("pick")["scores"] in ([], ())
    assert state.usage.calls == 1


@sgl.function
def pick_text(s, choices, method=None):
    s += "Well" + sgl.select("pick", choices, choices_method=method)


def test_a_completion_model_cannot_choose(service, completer):
    with pytest.raises(sgl.ProgramError, match="select on a completion model is not supported"):
        pick_text.run(["x", "y"], backend=completer)
    assert service.requests == []


# --- failures ------------------------------------------------------------------------------------


def test_a_missing_key_is_asked_for(service, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    service.fault = lambda body: error(401, "no")
    with pytest.raises(sgl.ProgramError, match=r"needs an api_key: .*OPENAI_API_KEY"):
        ask.run("Why?", backend=OpenAI("m", base_url=f"{service.url}/v1"))
