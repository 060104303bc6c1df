"""Python types as constraints, and generated texts read as their values."""

from __future__ import annotations

import json
import re
import sys
import types
from dataclasses import dataclass
from enum import Enum, StrEnum

import pytest
import typing_extensions
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

import sgl_vllm as sgl
from sgl_vllm.lang.constraints import Constraint, ConstraintKind, dtype_constraint, regex_constraint
from sgl_vllm.lang.ir import Gen
from sgl_vllm.lang.sampling import Sampling
from tests.unit.lang.scripted import appending

pytestmark = [pytest.mark.usefixtures("backend"), pytest.mark.timeout(20)]


class Colour(Enum):
    RED = "red"
    GREEN = "green"


class Mood(StrEnum):
    GOOD = "good"
    BAD = "bad"


@dataclass
class Point:
    x: int
    y: float = 0.0


class Film(typing_extensions.TypedDict):
    title: str
    year: int


class Person(BaseModel):
    name: str
    friends: list[Person] = []


def run(expr, **options):
    return appending("x" + expr).run(**options)


# --- literals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [int, float, bool, str])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_every_text_that_the_constraint_allows_can_be_read(dtype, data):
    constraint, read = dtype_constraint(dtype)
    text = data.draw(st.from_regex(re.compile(constraint.text), fullmatch=True))
    assert type(read(text)) is dtype


@given(st.integers(-(10**17), 10**17), st.booleans(), st.text("abc \\\"'/é", max_size=9))
def test_usual_values_can_be_written(number, truth, text):
    for value, written in ((number, str(number)), (truth, str(truth)), (text, json.dumps(text))):
        constraint, read = dtype_constraint(type(value))
        if not re.search(r"\\u", written):
            assert re.fullmatch(constraint.text, written)
            assert read(written) == value


@pytest.mark.parametrize("dtype", [int, float, bool, str])
def test_a_type_and_its_name_are_the_same(dtype):
    assert dtype_constraint(dtype.__name__) == dtype_constraint(dtype)


@pytest.mark.parametrize("text", ["007", "+1", "1.5", "", "--1", "1" * 30])
def test_the_int_regex_holds_to_one_bounded_form(text):
    assert not re.fullmatch(dtype_constraint(int)[0].text, text)


def test_other_types_are_refused_when_the_program_is_written():
    with pytest.raises(ValueError, match="int, float, str or bool, not list"):
        sgl.gen("a", dtype=list)


# --- schemas ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (Point, '{"x": 1, "y": 2.5}', Point(1, 2.5)),
        (Point, '{"x": 1}', Point(1)),
        (Film, '{"title": "M", "year": 1931}', {"title": "M", "year": 1931}),
        (
            Person,
            '{"name": "A", "friends": [{"name": "B"}]}',
            Person(name="A", friends=[Person(name="B")]),
        ),
        ({"type": "object"}, '{"k": 1}', '{"k": 1}'),
        ('{"type": "object"}', '{"k": 1}', '{"k": 1}'),
    ],
    ids=["dataclass", "dataclass with default", "TypedDict", "pydantic", "dict", "JSON text"],
)
def test_a_schema_is_sent_and_a_class_makes_an_instance(server, schema, text, value):
    server.reply = lambda prompt: text
    state = run(sgl.gen("v", json_schema=schema))
    assert state["v"] == value
    assert type(state["v"]) is type(value)
    assert state.text() == "x" + text
    sent = server.calls[0]["structured_outputs"]["json"]
    assert sent.get("type") == "object" or sent["$ref"] == "#/$defs/Person"


def test_what_is_no_schema_is_refused_when_the_program_is_written():
    for wrong in (int, 3, object()):
        with pytest.raises(ValueError, match="json_schema must be"):
            sgl.gen("v", json_schema=wrong)  # type: ignore[arg-type]


def test_a_text_of_the_wrong_form_is_generated_again_and_each_time_counts(server):
    replies = iter(['{"x": ', '{"x": "no"}', '{"x": 3}'])
    server.reply = lambda prompt: next(replies)
    state = run(sgl.gen("v", json_schema=Point, retries=2))
    assert state["v"] == Point(3)
    assert state.usage.calls == 3
    assert state.text() == 'x{"x": 3}'
    assert [body["prompt"] for body in server.calls] == ["x"] * 3


def test_after_the_last_retry_the_error_shows_the_text_and_says_what_to_do(server):
    server.reply = lambda prompt: '{"x": '
    with pytest.raises(sgl.ProgramError, match=r"gen 'v' failed: .*'\{\"x\": ' does not have the"):
        run(sgl.gen("v", json_schema=Point, retries=1))
    assert len(server.calls) == 2
    server.document = lambda prompt: '{"x": 1}'
    with pytest.raises(sgl.ProgramError, match="it was cut off, raise max_tokens"):
        run(sgl.gen("v", json_schema=Point, max_tokens=3))


# --- choices ------------------------------------------------------------------------------------


@pytest.mark.parametrize("enum", [Colour, Mood])
def test_an_enum_gives_a_member(server, enum):
    second = list(enum)[1]
    server.logprob = lambda token, position: -0.1 if chr(token) in second.value else -3.0
    for expr in (sgl.select("v", enum), sgl.gen("v", choices=enum)):
        state = run(expr)
        assert state["v"] is second
        assert state.text() == "x" + second.value
        assert state.get_meta_info("v")["choices"] == [member.value for member in enum]


def test_choices_that_are_none_are_refused_when_the_program_is_written():
    numbers = Enum("numbers", {"ONE": 1})

    class Empty(Enum):
        pass

    for wrong in ([], None, "yes", ["yes", ""], ["yes", 1], numbers, Empty):
        with pytest.raises(ValueError, match=r"choice"):
            sgl.select("v", wrong)  # type: ignore[arg-type]


# --- patterns -----------------------------------------------------------------------------------


@pytest.fixture
def outlines(monkeypatch):
    """outlines, or a stand-in that makes a pattern of a term in the same way."""
    try:
        import outlines.types
    except ImportError:
        package, module = types.ModuleType("outlines"), types.ModuleType("outlines.types")
        dsl = types.ModuleType("outlines.types.dsl")

        class Regex:
            __module__ = "outlines.types.dsl"

            def __init__(self, pattern):
                self.pattern = pattern

        vars(dsl).update(to_regex=lambda term: f"({term.pattern})")
        vars(module).update(dsl=dsl, Regex=Regex)
        vars(package).update(types=module)
        for name, made in (("outlines", package), ("outlines.types", module)):
            monkeypatch.setitem(sys.modules, name, made)
        monkeypatch.setitem(sys.modules, "outlines.types.dsl", dsl)
        return package
    return outlines


def test_a_term_of_outlines_is_a_pattern(server, outlines):
    run(sgl.gen("v", regex=outlines.types.Regex("[0-9]{2}")))
    assert server.calls[0]["structured_outputs"] == {"regex": "[0-9]{2}"}


def test_what_is_no_pattern_is_refused_when_the_program_is_written():
    assert regex_constraint("a+")[0].text == "a+"
    for wrong in (re.compile("a+"), 3, None.__class__):
        with pytest.raises(ValueError, match=r"string or a term of outlines\.types"):
            sgl.gen("v", regex=wrong)
    with pytest.raises(ValueError, match="look-around is not supported"):
        sgl.gen("v", regex="a(?=b)")


def test_only_one_constraint_at_a_time():
    with pytest.raises(ValueError, match="only one of dtype and regex"):
        sgl.gen("v", dtype=int, regex="a")
    with pytest.raises(ValueError, match="choices_method needs choices"):
        sgl.gen("v", choices_method=sgl.greedy_token_selection)


# --- another kind -------------------------------------------------------------------------------

GRAMMAR = ConstraintKind("grammar", "grammar", "grammar")
GREETING = Constraint(GRAMMAR, 'root ::= "hello" | "bye"')


greets = appending(sgl.user("Greet me."), sgl.assistant(Gen("greeting", Sampling(), GREETING)))


def test_a_new_kind_is_sent_to_vllm_and_recorded_without_changing_a_backend(server, tmp_path):
    server.reply = lambda prompt: "hello"
    path = tmp_path / "record.jsonl"
    with sgl.Recorder(sgl.VLLM(server.url), path) as recorder:
        greets.run(backend=recorder)
    assert server.calls[0]["structured_outputs"] == {"grammar": GREETING.text}
    assert greets.run(backend=sgl.Replay(path))["greeting"] == "hello"


def test_a_new_kind_is_refused_by_name_where_the_service_does_not_have_it():
    for backend in (sgl.OpenAI("gpt-4o", api_key="x"), sgl.Anthropic("claude-x", api_key="x")):
        with pytest.raises(sgl.ProgramError, match=r"grammar is not supported .*use json_schema"):
            greets.run(backend=backend)


# --- validate=True -------------------------------------------------------------------------------

TAGS = {
    "type": "object",
    "properties": {"tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}},
    "required": ["tags"],
}
TWICE, ONCE = '{"tags": ["a", "a"]}', '{"tags": ["a", "b"]}'


def replies(server, *texts):
    left = iter(texts)
    server.reply = lambda prompt: next(left)


def test_invalid_text_is_generated_again(server):
    replies(server, TWICE, TWICE, ONCE)
    state = run(sgl.gen("v", json_schema=TAGS, validate=True, retries=2))
    assert state["v"] == ONCE
    assert state.usage.calls == 3
    assert [body["structured_outputs"]["json"] for body in server.calls] == [TAGS] * 3
    replies(server, TWICE, TWICE)
    assert run(sgl.gen("v", json_schema=TAGS, retries=2))["v"] == TWICE  # the server is trusted
    with pytest.raises(sgl.ProgramError, match=r"has non-unique elements \(at \$\.tags\)"):
        run(sgl.gen("v", json_schema=TAGS, validate=True))


def test_every_one_of_several_texts_is_checked_and_then_read(server):
    class Tags(BaseModel):
        tags: set[str]

    replies(server, ONCE, TWICE, ONCE, ONCE)
    state = run(sgl.gen("v", json_schema=Tags, validate=True, retries=1, n=2))
    assert state["v"] == [Tags(tags={"a", "b"})] * 2


def test_what_is_wrong_in_the_program_is_an_error_where_it_is_written():
    with pytest.raises(ValueError, match="validate needs json_schema"):
        sgl.gen("v", regex="a", validate=True)
    with pytest.raises(ValueError, match=r"json_schema: 'strin' is not valid .*\(at \$\.type\)"):
        sgl.gen("v", json_schema={"type": "strin"}, validate=True)


def test_a_missing_package_is_named_with_the_way_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    with pytest.raises(ImportError, match="pip install jsonschema"):
        sgl.gen("v", json_schema={"type": "array", "minItems": 3}, validate=True)
