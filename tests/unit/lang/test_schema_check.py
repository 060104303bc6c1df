"""`gen(json_schema=..., validate=True)`: what is checked, sent and generated again."""

from __future__ import annotations

import json
import sys

import jsonschema
import pytest
from fastapi.responses import JSONResponse
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

import sgl_vllm as sgl
from sgl_vllm.lang.constraints import schema_constraint
from sgl_vllm.lang.schema_check import checked
from tests.unit.lang.test_constraints import run

pytestmark = [pytest.mark.usefixtures("backend"), pytest.mark.timeout(20)]

TAGS = {
    "type": "object",
    "properties": {"tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}},
    "required": ["tags"],
}
TWICE, ONCE = '{"tags": ["a", "a"]}', '{"tags": ["a", "b"]}'


def replies(server, *texts):
    left = iter(texts)
    server.reply = lambda prompt: next(left)


def refuse(server, is_refused):
    """Answer 400 to the formats for which `is_refused` holds."""

    def fault(path, body):
        schema = body.get("structured_outputs", {}).get("json")
        if schema is not None and is_refused(schema):
            return JSONResponse({"error": {"message": "uniqueItems is not supported"}}, 400)
        return None

    server.fault = fault


def sent(server):
    return [body["structured_outputs"]["json"] for body in server.calls]


def test_invalid_text_is_generated_again(server):
    replies(server, TWICE, TWICE, ONCE)
    state = run(sgl.gen("v", json_schema=TAGS, validate=True, retries=2))
    assert state["v"] == ONCE
    assert state.usage.calls == 3
    assert sent(server) == [TAGS] * 3
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


def test_a_refused_schema_is_sent_without_what_some_backends_do_not_support(server):
    refuse(server, lambda schema: "uniqueItems" in json.dumps(schema))
    replies(server, TWICE, ONCE)
    state = run(sgl.gen("v", json_schema=TAGS, validate=True, retries=3))
    assert state["v"] == ONCE
    items = {"type": "array", "items": {"type": "string"}}
    loose = {"type": "object", "properties": {"tags": items}, "required": ["tags"]}
    assert sent(server) == [TAGS, loose, loose]  # asked in full once


def test_if_that_is_refused_too_the_error_is_that_of_the_schema(server):
    refuse(server, lambda schema: True)
    with pytest.raises(sgl.ProgramError, match="uniqueItems") as caught:
        run(sgl.gen("v", json_schema=TAGS, validate=True, retries=3))
    assert len(server.calls) == 2
    assert getattr(caught.value.__cause__, "__notes__", None) == [
        f"The request's json_schema: {json.dumps(TAGS)}"
    ]


def test_what_is_wrong_in_the_program_is_an_error_where_it_is_written():
    with pytest.raises(ValueError, match="validate needs json_schema"):
        sgl.gen("v", regex="a", validate=True)
    with pytest.raises(ValueError, match=r"json_schema: 'strin' is not valid .*\(at \$\.type\)"):
        sgl.gen("v", json_schema={"type": "strin"}, validate=True)


def test_a_missing_package_is_named_with_the_way_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    with pytest.raises(ImportError, match=r"pip install 'sgl-vllm\[validate\]'"):
        sgl.gen("v", json_schema={"type": "array", "minItems": 3}, validate=True)


# --- the looser schema --------------------------------------------------------------------------

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from(["", "a", "b"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2)
    ),
    max_leaves=6,
)
TYPES = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])


def schemas(inner):
    by_name = st.dictionaries(st.sampled_from("ab"), inner, max_size=2)
    several = st.lists(inner, min_size=1, max_size=3)
    return st.fixed_dictionaries(
        {},
        optional={
            "type": TYPES,
            "properties": by_name,
            "patternProperties": by_name,
            "additionalProperties": inner,
            "required": st.lists(st.sampled_from("ab"), unique=True),
            "items": inner,
            "prefixItems": several,
            "uniqueItems": st.booleans(),
            "allOf": several,
            "anyOf": several,
            "oneOf": several,
            "not": inner,
            "if": inner,
            "then": inner,
            "minimum": st.integers(-2, 2),
            "enum": st.lists(VALUES, min_size=1, max_size=3),
        },
    )


SCHEMAS = st.recursive(st.booleans() | schemas(st.booleans()), schemas, max_leaves=6)


@given(SCHEMAS, VALUES)
def test_what_is_valid_is_valid_against_the_looser_schema(schema, value):
    constraint, _ = checked(schema_constraint(json.dumps(schema))[0], None)
    if constraint.looser is not None and jsonschema.Draft202012Validator(schema).is_valid(value):
        loose = jsonschema.Draft202012Validator(constraint.looser.value)
        assert loose.is_valid(value), constraint.looser.text
