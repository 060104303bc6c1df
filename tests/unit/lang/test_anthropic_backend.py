"""The Anthropic backend against a scripted service, through the official client."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sgl_vllm as sgl
from sgl_vllm.lang.backends.requests import Generated
from sgl_vllm.lang.backends.scoreless import StopWatch, cut_at_stop
from tests.unit.lang.scripted import appending
from tests.unit.lang.services import ANTHROPIC_ROUTES, Service, serving
from tests.unit.lang.test_openai_backend import Person, ask

pytest.importorskip("anthropic")


@pytest.fixture
def service():
    with serving(Service(finish="end_turn"), ANTHROPIC_ROUTES) as service:
        yield service


def backend_of(service, **options):
    defaults = {"api_key": "key", "timeout_s": 10, "max_retries": 0}
    return sgl.Anthropic("claude-x", base_url=service.url, **{**defaults, **options})


@pytest.fixture
def backend(service):
    backend = backend_of(service)
    sgl.set_default_backend(backend)
    return backend


@sgl.function
def begun(s, begin, expr):
    s += sgl.user("Who?") + sgl.assistant(begin + expr)


# --- requests on the wire ------------------------------------------------------------------------


def test_system_turns_go_apart_and_options_by_the_apis_names(service, backend):
    state = ask.run("Why?", max_new_tokens=9, stop=["END", "."], temperature=0.5, top_k=7)
    assert state["answer"] == "fine"
    assert service.requests[0][0] == "/v1/messages"
    assert service.body == {
        "model": "claude-x",
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": [{"role": "user", "content": "Why?"}],
        "max_tokens": 9,
        "stop_sequences": ["END", "."],
        "temperature": 0.5,
        "top_k": 7,
    }


def test_a_turn_that_has_begun_is_prefilled(service, backend):
    service.reply = lambda body: " Ada"
    state = begun.run("Name:", sgl.gen("name"))
    assert service.body["messages"] == [
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": "Name:"},
    ]
    assert state.messages()[-1]["content"] == "Name: Ada"


def test_images_go_as_sources(service, backend):
    data = b"\x89PNG and so on"
    look = appending(
        sgl.user("A" + sgl.image("https://example.org/a.png") + sgl.image(data)),
        sgl.assistant(sgl.gen("answer")),
    )
    look.run()
    encoded = base64.b64encode(data).decode()
    assert service.body["messages"][0]["content"] == [
        {"type": "text", "text": "A"},
        {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encoded}},
    ]


def test_finish_reasons_and_usage_are_in_the_languages_words(service, backend):
    for reason, finish in (("end_turn", "stop"), ("max_tokens", "length"), ("refusal",) * 2):
        service.finish = reason
        state = ask.run("Why?")
        assert state.get_meta_info("answer")["finish_reason"] == finish
    usage = state.usage  # what came from the cache and what went there are parts of the prompt
    assert (usage.prompt_tokens, usage.cached_prompt_tokens) == (10, 4)
    assert (usage.completion_tokens, usage.calls) == (7, 1)


def test_a_fork_sends_no_hint_as_there_is_no_cache_to_fill(service, backend):
    @sgl.function
    def forked(s):
        s += sgl.user("x" * 500)
        s += sgl.assistant_begin()
        forks = s.fork(2)
        forks += sgl.gen("answer")
        forks.join()

    assert forked.run()["answer"] == ["fine", "fine"]
    assert len(service.requests) == 2


# --- stops of whitespace ------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_of_white_space_is_watched_for_here(service, backend, stream):
    service.reply = lambda body: "one two\n\nthree"
    state = ask.run("Count.", stop=["\n", "END"], stream=stream)
    assert state["answer"] == "one two"
    (asked,) = service.bodies
    assert asked["stop_sequences"] == ["END"] and asked["stream"] is True
    assert state.get_meta_info("answer")["finish_reason"] == "stop"
    service.reply, service.piece = lambda body: "one \n two\n\nthree", 1
    state = ask.run("Count.", stop="\n\n", stream=True)
    assert "".join(state.text_iter("answer")) == "one \n two"
    assert ask.run("Count.", stop="\t")["answer"] == "one \n two\n\nthree"


@given(
    st.lists(st.text("ab \n", min_size=1, max_size=4), max_size=8),
    st.lists(st.sampled_from(["\n", "\n\n", "  ", " \n"]), min_size=1, max_size=2),
)
def test_whatever_the_pieces_are_what_is_shown_begins_the_text_up_to_the_stop(pieces, stops):
    shown: list[str] = []
    taken = []

    def watch(piece: str, num_tokens: int | None) -> bool:
        shown.append(piece)
        return False

    watcher = StopWatch(tuple(stops), watch)
    for piece in pieces:
        taken.append(piece)
        if watcher(piece, None):
            break
    text = cut_at_stop(Generated("".join(taken), "length"), tuple(stops)).text
    whole = "".join(pieces)
    found = [(whole.find(s) + len(s), whole.find(s)) for s in stops if s in whole]
    # If several end together, the first one.
    first = min(found, key=lambda interval: interval[0], default=None)
    assert text == (whole if first is None else whole[: first[1]])
    assert text.startswith("".join(shown))
    held_back = text.removeprefix("".join(shown))
    assert not held_back or any(stop.startswith(held_back) for stop in stops)


# --- JSON and select -----------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_json_schema_is_a_tool_that_must_be_called(service, backend, stream):
    service.finish = "tool_use"
    service.reply = lambda body: '{"name": "Adé", "age": 36}'
    state = ask.run("Who?", json_schema=Person, stream=stream)
    assert state["answer"] == Person(name="Adé", age=36)
    assert '"Adé"' in state.text()
    (tool,) = service.body["tools"]
    assert tool["input_schema"]["required"] == ["name", "age"]
    assert service.body["tool_choice"] == {"type": "tool", "name": tool["name"]}
    service.finish = "refusal"
    if not stream:
        with pytest.raises(sgl.ProgramError, match=r"not answer in the required form: .*'refusal'"):
            ask.run("Who?", json_schema=Person)


def test_a_select_is_a_tool_that_takes_the_choices_only(service, backend):
    service.finish = "tool_use"
    service.reply = lambda body: '{"choice": "no"}'
    state = begun.run("", sgl.select("pick", ["yes", "no"]))
    assert state["pick"] == "no"
    schema = service.body["tools"][0]["input_schema"]
    assert schema["properties"]["choice"]["enum"] == ["yes", "no"]
    assert service.body["temperature"] == 0.0


# --- what it lacks -------------------------------------------------------------------------------


def test_a_prompt_that_the_api_does_not_take_is_refused(service, backend):
    late = appending(sgl.user("Hi") + sgl.system("Be brief.") + sgl.assistant(sgl.gen("a")))
    video = appending(
        sgl.user(sgl.video("https://example.org/a.mp4")) + sgl.assistant(sgl.gen("a"))
    )
    users = appending(sgl.user("I am " + sgl.gen("a")))
    structured = sgl.gen("a", json_schema=Person)
    for program, feature in (
        (late, "a system turn after another turn"),
        (video, "video"),
        (users, "gen in a user turn"),
        (begun.bind(begin="Name: ", expr=sgl.gen("a")), "whitespace .* a gen"),
        (begun.bind(begin="Name:", expr=structured), "json_schema after other text in a turn"),
        (begun.bind(begin="Name:", expr=sgl.select("a", ["b"])), "select after other text in a tu"),
    ):
        with pytest.raises(sgl.ProgramError, match=f"{feature}.* is not supported"):
            program.run()
    assert service.requests == []


# --- failures ------------------------------------------------------------------------------------


def test_without_any_key_one_is_asked_for(service, monkeypatch, tmp_path):
    for name in ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # where the client looks for a key
    with pytest.raises(sgl.ProgramError, match=r"needs an api_key: .*ANTHROPIC_API_KEY"):
        ask.run("Why?", backend=backend_of(service, api_key=None))
    assert service.requests == []
