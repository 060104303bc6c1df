"""The OpenAI backend against a scripted service, through the official client."""

from __future__ import annotations

import json
import logging

import pydantic
import pytest
import tiktoken
import tiktoken.model
import tiktoken.registry
from fastapi.responses import PlainTextResponse
from hypothesis import given, settings
from hypothesis import strategies as st

import sgl_vllm as sgl
from sgl_vllm.lang.backends.openai_service import (
    OPENAI_URL,
    OpenAI,
    options_body,
    without_defaults,
)
from sgl_vllm.lang.backends.scoreless import strict_schema
from sgl_vllm.lang.sampling import DEFAULT_SAMPLING
from tests.effort import examples
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


@pytest.fixture
def tiny_tokenizer(monkeypatch):
    """Gives davinci-002 a tokenizer of bytes in which " no" is also one token."""
    ranks = {bytes([i]): i for i in range(256)} | {b" n": 256, b" no": 257}
    encoding = tiktoken.Encoding(
        "tiny", pat_str=r"(?s:.+)", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 300}
    )
    monkeypatch.setitem(tiktoken.registry.ENCODINGS, "tiny", encoding)
    monkeypatch.setitem(tiktoken.model.MODEL_TO_ENCODING, "davinci-002", "tiny")


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
    state = complete.run("Once", backend=completer, temperature=0.0)
    assert state.text() == "Oncefine"
    assert service.requests[0][0] == "/v1/completions"
    assert service.body["prompt"] == "Once"


@pytest.mark.parametrize(
    ("model", "is_chat"),
    [
        ("gpt-4o", True),
        ("gpt-3.5-turbo-instruct", False),
        ("gpt-3.5-turbo-instruct-0914", False),
        ("babbage-002", False),
        ("Qwen2.5-7B-Instruct", True),
    ],
)
def test_the_kind_of_model_follows_from_its_name_or_the_argument(model, is_chat):
    assert OpenAI(model).is_chat_model is is_chat
    assert OpenAI(model, is_chat_model=not is_chat).is_chat_model is not is_chat


def test_openai_itself_gets_its_own_words_and_no_defaults(monkeypatch):
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    backend = OpenAI("o1")
    assert backend.base_url == OPENAI_URL and backend.is_openai_itself
    body = {"messages": [], **options_body(DEFAULT_SAMPLING, chat=True)}
    assert backend.adapted(body) == {"messages": [], "max_completion_tokens": 128}
    assert not OpenAI("o1", base_url="http://evil-openai.com/v1").is_openai_itself


def test_only_defaults_are_left_out():
    body = {"temperature": 0.0, "top_p": 1.0, "n": 2, "stop": "x"}
    assert without_defaults(body) == {"temperature": 0.0, "n": 2, "stop": "x"}


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


def test_logprobs_of_a_completion_are_read(service, completer):
    complete.run("Once", return_logprob=True, top_logprobs_num=2, backend=completer)
    assert service.body["logprobs"] == 2


def test_images_go_as_content_parts(service, chat):
    @sgl.function
    def look(s):
        s += sgl.user("This: " + sgl.image("https://example.org/a.png") + "?")
        s += sgl.assistant(sgl.gen("answer"))

    look.run(backend=chat)
    assert service.body["messages"][0]["content"] == [
        {"type": "text", "text": "This: "},
        {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
        {"type": "text", "text": "?"},
    ]


# --- JSON ----------------------------------------------------------------------------------------


class Person(pydantic.BaseModel):
    name: str
    age: int


def test_a_json_schema_is_a_strict_response_format_where_it_can_be(service, chat):
    service.reply = lambda body: '{"name": "Ada", "age": 36}'
    state = ask.run("Who?", json_schema=Person, backend=chat)
    assert state["answer"] == Person(name="Ada", age=36)
    asked = service.body["response_format"]["json_schema"]
    assert asked["strict"] is True and asked["schema"]["additionalProperties"] is False


def test_a_json_schema_with_optional_properties_is_not_strict(service, chat):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    service.reply = lambda body: "{}"
    ask.run("Who?", json_schema=schema, backend=chat)
    asked = service.body["response_format"]["json_schema"]
    assert asked["strict"] is False and asked["schema"] == schema


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


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_text_is_streamed(service, chat, completer, kind):
    service.reply = lambda body: "one two three"
    if kind == "chat":
        state = ask.run("Count.", stream=True, backend=chat)
    else:
        state = complete.run("Count.", stream=True, backend=completer)
    pieces = list(state.text_iter("answer"))
    assert "".join(pieces) == "one two three"
    state.sync()
    assert service.body["stream"] is True
    assert state.usage.completion_tokens == len("one two three")


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


def test_four_stop_texts_are_left_to_the_service(service, chat):
    ask.run("Go.", stop=SIX[:4], backend=chat)
    assert service.body["stop"] == list(SIX[:4])
    assert "stream" not in service.body


# --- what it lacks -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "feature"),
    [
        ({"min_tokens": 3}, "min_tokens"),
        ({"ignore_eos": True}, "ignore_eos"),
        ({"stop_token_ids": [1]}, "stop_token_ids"),
        ({"top_k": 5}, "top_k"),
        ({"min_p": 0.1}, "min_p"),
        ({"return_logprob": True, "logprob_start_len": 0}, "logprob_start_len"),
        ({"regex": "[0-9]+"}, "regex"),
        ({"dtype": int}, "dtype"),
    ],
)
def test_an_option_that_the_api_lacks_is_refused_by_name(service, chat, options, feature):
    with pytest.raises(sgl.ProgramError, match=rf"{feature}.* not supported by the server at"):
        ask.run("Why?", backend=chat, **options)
    assert service.requests == []


def test_json_schema_on_a_completion_model_is_refused(completer):
    with pytest.raises(sgl.ProgramError, match=r"json_schema .*use a chat model"):
        complete.run("Who?", json_schema=Person, backend=completer)


def test_a_chat_model_wants_roles_and_a_completion_model_none(chat, completer):
    with pytest.raises(sgl.ProgramError, match=r"without roles .*put the text into turns"):
        complete.run("Once", backend=chat)
    with pytest.raises(sgl.ProgramError, match=r"with roles .*leave the roles out"):
        ask.run("Why?", backend=completer)


def test_a_turn_that_has_begun_cannot_be_continued(chat):
    @sgl.function
    def begun(s):
        s += sgl.user("Who?") + sgl.assistant("Name: " + sgl.gen("name"))

    with pytest.raises(sgl.ProgramError, match="gen after other text in a turn is not supported"):
        begun.run(backend=chat)


def test_videos_are_refused_by_openai_itself_and_their_frames_by_all(chat):
    @sgl.function
    def watch(s, **options):
        s += sgl.user("This:" + sgl.video("https://example.org/a.mp4", **options))
        s += sgl.assistant(sgl.gen("answer"))

    with pytest.raises(sgl.ProgramError, match="video is not supported by OpenAI's gpt-4o"):
        watch.run(backend=OpenAI("gpt-4o", base_url=OPENAI_URL, api_key="none"))
    with pytest.raises(sgl.ProgramError, match="num_frames"):
        watch.run(backend=chat, num_frames=4)


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


def test_a_recorded_chat_refuses_the_same_methods(service, chat, tmp_path):
    with (
        sgl.Recorder(chat, tmp_path / "run.jsonl") as recorder,
        pytest.raises(sgl.ProgramError, match=r"select by \w+ is not supported"),
    ):
        pick.run(["a", "b"], sgl.unconditional_likelihood_normalized, backend=recorder)
    assert service.requests == []


@sgl.function
def pick_text(s, choices, method=None):
    s += "Well" + sgl.select("pick", choices, choices_method=method)


@pytest.mark.usefixtures("tiny_tokenizer")
def test_a_completion_model_chooses_token_by_token_where_choices_part(service, completer):
    wanted = iter([" ", "b"])
    service.reply = lambda body: next(wanted)
    state = pick_text.run([" no", " xa", " xb"], backend=completer)
    assert state["pick"] == " xb"
    first, second = service.bodies
    prefix = list(b"Well")
    assert first["prompt"] == prefix and first["max_tokens"] == 1
    assert first["logit_bias"] == {"257": 100, "32": 100}
    assert second["prompt"] == [*prefix, *b" x"]
    assert second["logit_bias"] == {str(ord("a")): 100, str(ord("b")): 100}
    assert state.usage.calls == 2


@pytest.mark.usefixtures("tiny_tokenizer")
def test_a_choice_that_begins_another_is_refused_where_nothing_tells_them_apart(completer):
    with pytest.raises(sgl.ProgramError, match="'x' and 'xy'"):
        pick_text.run(["x", "xy"], backend=completer)


@pytest.mark.usefixtures("tiny_tokenizer")
def test_greedy_selection_is_what_a_completion_model_does(service, completer):
    service.reply = lambda body: "y"
    assert pick_text.run(["x", "y"], sgl.greedy_token_selection, backend=completer)["pick"] == "y"
    with pytest.raises(sgl.ProgramError, match="select by Unconditional"):
        pick_text.run(["x", "y"], sgl.unconditional_likelihood_normalized, backend=completer)


def test_without_a_tokenizer_a_completion_model_cannot_select(service):
    backend = OpenAI("unheard-of", base_url=f"{service.url}/v1", is_chat_model=False)
    with pytest.raises(sgl.ProgramError, match="needs the model's tokenizer from tiktoken"):
        pick_text.run(["x", "y"], backend=backend)


# --- speculation ---------------------------------------------------------------------------------


@sgl.function(num_api_spec_tokens=64)
def sheet(s):
    s += sgl.user("Describe Ada, as Name: and Age: on two lines.")
    with s.assistant():
        s += "Name:" + sgl.gen("name", stop="\n")
        s += "\nAge:" + sgl.gen("age", stop="\n")


def test_a_turn_of_several_gens_is_one_call_if_the_model_writes_it_so(service, chat):
    service.reply = lambda body: "Name: Ada\nAge: 36\nJob: countess"
    state = sheet.run(backend=chat)
    assert (state["name"], state["age"]) == (" Ada", " 36")
    assert len(service.requests) == 1
    assert service.body["messages"][-1]["role"] == "user" and "stop" not in service.body
    assert service.body["max_tokens"] == 128 + 64
    assert state.usage.calls == 1 and state.usage.saved_calls == 1
    assert state.messages()[-1]["content"] == "Name: Ada\nAge: 36"


def test_a_model_that_writes_something_else_is_an_error_that_shows_it(service, chat):
    service.reply = lambda body: "Sure! Name: Ada"
    with pytest.raises(sgl.ProgramError, match=r"begins with 'Name:'.*'Sure! Name: Ada'"):
        sheet.run(backend=chat)


def test_a_model_that_continues_differently_is_an_error_too(service, chat):
    service.reply = lambda body: "Name: Ada\nBorn: 1815\n"
    with pytest.raises(sgl.ProgramError, match=r"begins with 'Name: Ada.nAge:'"):
        sheet.run(backend=chat)


# --- failures ------------------------------------------------------------------------------------


def test_a_missing_key_and_a_wrong_one_are_different_errors(service, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    service.fault = lambda body: error(401, "no")
    with pytest.raises(sgl.ProgramError, match=r"needs an api_key: .*OPENAI_API_KEY"):
        ask.run("Why?", backend=OpenAI("m", base_url=f"{service.url}/v1"))
    with pytest.raises(sgl.ProgramError, match="rejected the api_key"):
        ask.run("Why?", backend=OpenAI("m", base_url=f"{service.url}/v1", api_key="wrong"))
    assert service.requests[-1][2]["authorization"] == "Bearer wrong"


def test_what_only_a_server_of_ones_own_has_is_refused(chat):
    with pytest.raises(sgl.UnsupportedError, match="flush_cache"):
        sgl.flush_cache(chat)
    with pytest.raises(sgl.UnsupportedError, match="get_server_info"):
        sgl.get_server_info(chat)
