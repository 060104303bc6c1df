"""What a mistake in a program says: the argument, the item or the exception, and what to do."""

from __future__ import annotations

import traceback
from typing import Any

import pytest

import sgl_vllm as sgl
from tests.unit.lang.http_server import refusing
from tests.unit.lang.scripted import ScriptedBackend, appending


@sgl.function
def story(s, animal):
    s += f"A story about a {animal}:" + sgl.gen("story")


untyped: Any = story  # a type checker would find these mistakes


def test_an_item_with_a_wrong_keyword_is_named_with_what_the_program_takes():
    backend = ScriptedBackend()
    with pytest.raises(TypeError, match=r"item 1 of the batch: story .*'anmal'; did you mean an"):
        story.run_batch([{"animal": "hare"}, {"anmal": "fox"}], backend=backend)
    with pytest.raises(TypeError, match=r"item 0 of the batch: story .*'x'; it takes animal"):
        story.run_batch([{"x": "hare"}], backend=backend)
    with pytest.raises(TypeError, match=r"item 0 of the batch: an item is a dict .*, not 3"):
        untyped.run_batch([3], backend=backend)
    assert backend.asked == []


def test_a_keyword_that_no_batch_has_is_named():
    with pytest.raises(TypeError, match=r"argument 'animal'; put arguments of story into"):
        untyped.run_batch([{"animal": "hare"}], animal="fox", backend=ScriptedBackend())


def test_an_address_is_no_backend_and_the_message_makes_one_of_it(monkeypatch):
    monkeypatch.setattr(sgl.global_config, "default_backend", None)
    set_default: Any = sgl.set_default_backend
    url = "http://127.0.0.1:8000"
    for give in (lambda: untyped.run("hare", backend=url), lambda: set_default(url)):
        with pytest.raises(TypeError, match=r"such as VLLM\('http://127\.0\.0\.1:8000'\), not"):
            give()
    with pytest.raises(TypeError, match="a backend is an object such as VLLM"):
        set_default(sgl.VLLM)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("{'type': 'object'}", r"json_schema is not valid JSON .*\"{'type': 'object'}\""),
        ("[1, 2]", r"json_schema must be a JSON object, not '\[1, 2\]'"),
        ({"enum": {1}}, r"json_schema is not valid JSON .* set .*{'enum': \{1\}}"),
    ],
)
def test_a_schema_that_is_none_is_shown_where_the_program_gives_it(schema, message):
    with pytest.raises(ValueError, match=message):
        sgl.gen("card", json_schema=schema)


def test_a_schema_that_the_server_refuses_is_shown_in_the_traceback(server, backend):
    """Its own words name neither the schema nor the option."""
    refused = "Grammar error: Invalid type: strin"
    server.fault = refusing(lambda path, body: "structured_outputs" in body, message=refused)
    program = appending("A card: " + sgl.gen("card", json_schema={"type": "strin"}))
    with pytest.raises(sgl.ProgramError, match=r"'card' failed: .*Invalid type: str") as caught:
        program.run()
    shown = "".join(traceback.format_exception(caught.value))
    assert 'The request\'s json_schema: {"type": "strin"}' in shown


@pytest.mark.parametrize("option", ["stop", "stop_regex", "stop_token_ids"])
@pytest.mark.parametrize("value", [3, [None], [1.5]])
def test_an_option_of_the_wrong_type_is_named(option, value):
    with pytest.raises(TypeError, match=f"{option} must be a .*list of t.*, not "):
        sgl.gen("a", **{option: value})
    with pytest.raises(TypeError, match=f"{option} must be a .*list of t.*, not "):
        story.run("hare", backend=ScriptedBackend(), **{option: value})


def test_half_of_a_surrogate_pair_is_named_before_anything_is_sent():
    backend = ScriptedBackend()

    @sgl.function
    def program(s, text):
        s += sgl.user(sgl.tool("t", lambda: text))
        s += sgl.assistant(sgl.gen("a"))

    with pytest.raises(sgl.ProgramError, match=r"surrogate pair, '\\ud83d', at character 2"):
        program.run("é \ud83d.", backend=backend)
    with pytest.raises(ValueError, match=r"surrogate pair, '\\udc00', at character 0"):
        sgl.select("a", ["fine", "\udc00"])
    with pytest.raises(ValueError, match="half of a surrogate pair"):
        sgl.gen("a", stop="\ud83d")
    assert backend.asked == []
    assert program.run("é 😀.", backend=backend)["t"] == "é 😀."


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (KeyError("Peru"), "KeyError: 'Peru'"),
        (ValueError(), "ValueError"),
        (OSError("gone"), "OSError: gone"),
    ],
)
def test_a_failed_tool_names_the_exceptions_type(error, shown):
    def look():
        raise error

    with pytest.raises(sgl.ProgramError, match=f"tool look for 'found' failed: {shown}") as caught:
        appending(sgl.tool("found", look)).run(backend=ScriptedBackend())
    assert caught.value.__cause__ is error


def test_the_traceback_of_a_server_that_is_not_there_is_short():
    """It was 158 lines, of which 136 were about the inside of the client."""
    with pytest.raises(sgl.ProgramError) as caught:
        story.run("hare", backend=sgl.VLLM("http://127.0.0.1:9", max_retries=0))
    lines = "".join(traceback.format_exception(caught.value)).splitlines()
    assert not [line for line in lines if "site-packages" in line]
    assert len(lines) < 40
    cause = caught.value.__cause__
    assert isinstance(cause, sgl.BackendError)
    assert type(cause.__context__).__name__ == "APIConnectionError"  # for those who look for it
