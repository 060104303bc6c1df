"""Hostile schemas: soon refused, or they work, and what they take is limited."""

import json
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_vllm.fsm.automaton import Automaton
from sgl_vllm.fsm.errors import TooComplexError
from sgl_vllm.fsm.schema import (
    UnsupportedSchemaError,
    compile_schema,
    compiled_schema,
    workspace,
)
from sgl_vllm.fsm.schema.keywords import CONSTRAINTS
from tests.effort import examples, some_nightly
from tests.unit.fsm.test_schema import automaton, schemas
from tests.unit.fsm.texts import after, random_walk

MAX_CPU_S = 4.0
"""Of this thread, so that other load on the machine does not count."""


def tried(schema) -> None:
    """Compile and walk a little: nothing but the promised errors, and soon."""
    rng = random.Random(1)
    began = time.thread_time()
    try:
        expression = compile_schema(schema)
    except ValueError:
        assert time.thread_time() - began < MAX_CPU_S
        return
    try:
        start = Automaton(expression).start
        assert time.thread_time() - began < MAX_CPU_S
        for _ in range(2):
            for state in random_walk(start, rng, 50):
                state.forced()
    except TooComplexError:
        pass


def nested(key, depth, bottom=True):
    schema = bottom
    for _ in range(depth):
        schema = {key: [schema] if key.endswith("Of") else schema}
    return schema


BIG = 10**6
HOSTILE = {
    "circle": {"$ref": "#/a", "a": {"$ref": "#/b"}, "b": {"$ref": "#/a"}},
    "circle of conjunctions": {"allOf": [{"$ref": "#"}, {"$ref": "#"}]},
    "circle with siblings": {"$ref": "#", "minLength": 1},
    "deep items": nested("items", 10_000),
    "deep allOf": nested("allOf", 10_000),
    "deep enum": {"enum": [json.loads("[" * 500 + "]" * 500)]},
    "huge minItems": {"type": "array", "minItems": 10**9},
    "many minItems": {"type": "array", "minItems": 1000, "items": {
        "type": "array", "minItems": 1000}},
    "huge minLength": {"type": "string", "minLength": 10**5},
    "endless minLength": {"type": "string", "minLength": float("inf")},
    "endless bound": {"type": "integer", "minimum": -float("inf"), "maximum": float("inf")},
    "no number": {"type": "number", "minimum": float("nan")},
    "huge bound": {"type": "integer", "maximum": 10**4000},
    "huge integer in enum": {"enum": [10**4000], "type": "integer"},
    "tiny bound": {"type": "number", "minimum": 5e-324},
    "enormous enum": {"enum": [f"value {i}" for i in range(100_000)]},
    "enormous enum of objects": {"enum": [{"a": i} for i in range(20_000)]},
    "many properties": {"type": "object", "properties": {f"p{i}": {} for i in range(20_000)}},
    "many required": {"type": "object", "required": [f"p{i}" for i in range(20_000)]},
    "megabyte of title": {"title": "x" * BIG, "type": "null"},
    "product of alternatives": {
        "allOf": [{"anyOf": [{"minimum": 10 * i + j} for j in range(10)]} for i in range(20)]},
    "many properties in many branches": {
        "properties": {f"p{i}": True for i in range(3_000)},
        "anyOf": [{"minimum": i} for i in range(3_000)]},
    "pairs of oneOf": {
        "oneOf": [{"type": "object", "properties": {"k": {"const": i}}, "required": ["k"]}
                  for i in range(2_000)]},
    "surrogate in enum": {"enum": ["\ud800"]},
    "surrogate in a name": {"properties": {"\ud800": {}}},
    "surrogates in a pattern": {"type": "string", "pattern": "[\ud800-\udfff]"},
    "surrogate in patternProperties": {"type": "object", "patternProperties": {"\ud800": {}}},
    "surrogate in $ref": {"$ref": "#/\ud800"},
    "names that are none": {"properties": {1: {}, None: {}}},
    "values that are none": {"enum": [b"", {1}, object()]},
    "keywords that are none": {None: 1, 1: 2, "type": "null"},
    "bad escapes in $ref": {"$ref": "#/%ff%GG/~2"},
    "no schema": "{",
    "pattern of many classes": {"type": "string", "pattern": "[^a]" * 200},
}  # fmt: skip


SLOW = ("pairs of oneOf", "many properties in many branches")


@pytest.mark.parametrize("name", some_nightly(HOSTILE, {*HOSTILE} - {*SLOW}))
def test_hostile_schemas_are_soon_refused_or_work(name):
    tried(HOSTILE[name])


def test_automata_that_take_too_long_together_are_given_up(monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(workspace, "thread_time", lambda: next(clock))
    slow = {f"p{i}": {"type": "string", "pattern": f"a{i}"} for i in range(200)}
    with pytest.raises(UnsupportedSchemaError, match="more than 5 s"):
        compile_schema({"type": "object", "properties": slow})
    assert next(clock) < 10


def test_tables_are_counted_and_limited(monkeypatch):
    def form(count):
        text = {"type": "string", "pattern": "^(?:a1|b2)[a-z]*$"}
        texts = {f"p{i}": {**text, "maxLength": 1_100 - i} for i in range(count)}
        return {"type": "object", "properties": texts}

    def bytes_of(schema):
        compiled = compiled_schema(schema, whitespace="any")
        return compiled.table_bytes

    assert bytes_of({"type": "string"}) == 0
    assert 1_000 * 12 < bytes_of(form(1)) < bytes_of(form(2)) < 2.1 * bytes_of(form(1))
    monkeypatch.setattr(workspace, "MAX_TABLE_BYTES", 1 << 20)
    with pytest.raises(UnsupportedSchemaError, match="1 MiB"):
        bytes_of(form(200))


def test_chains_of_needed_members_are_followed_in_one_pass():
    """Each of 4,000 schemas needs the one before it; passes over all of them took 8 seconds."""
    links: dict[str, object] = {"d0": {"type": "null"}}
    for i in range(1, 4_000):
        needed = {"$ref": f"#/$defs/d{i - 1}"}
        links[f"d{i}"] = {"type": "object", "properties": {"x": needed}, "required": ["x"]}
    root = {"$defs": links, "properties": {name: {"$ref": f"#/$defs/{name}"} for name in links}}
    started = time.thread_time()
    compile_schema(root)
    assert time.thread_time() - started < 3


JUNK = [None, True, False, 0, 1, -1, 2.5, 1e308, float("inf"), float("nan"), 10**30, "", "a", "#"]
JUNK += ["integer", "object", "\ud800", "(", "^a$", "#/properties/a", "date"]
JUNK_NAMES = ["a", "type", "enum", "allOf", "anyOf", "$ref", "items", "properties"]
junk = st.recursive(
    st.sampled_from(JUNK),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(JUNK_NAMES), inner, max_size=3)
    ),
    max_leaves=5,
)
keywords = st.sampled_from(sorted(CONSTRAINTS | {"$defs", "title"}))


@settings(max_examples=examples(60), deadline=None)
@given(st.dictionaries(keywords, junk, max_size=4))
def test_keywords_with_values_of_any_kind_raise_only_what_is_promised(schema):
    tried(schema)
    tried({"allOf": [schema, {"properties": {"a": {"type": "string"}}, "minimum": 1}]})


@settings(max_examples=examples(50), deadline=None)
@given(st.data())
def test_schemas_with_spoiled_parts_raise_only_what_is_promised(data):
    schema, _ = data.draw(schemas)
    schema = json.loads(json.dumps(schema))
    for _ in range(data.draw(st.integers(1, 3))):
        holder = schema
        while True:
            options = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            if not options:
                break
            key = data.draw(st.sampled_from(options))
            if isinstance(holder[key], dict | list) and data.draw(st.booleans()):
                holder = holder[key]
                continue
            holder[key] = data.draw(junk)
            break
    tried(schema)


def test_a_long_walk_over_a_schema_that_contains_itself_costs_what_it_visits():
    grammar = automaton({"anyOf": [{"type": "array", "items": {"$ref": "#"}}, {"type": "integer"}]})
    state, rng = grammar.start, random.Random(3)
    for _ in range(4_000):
        options = [byte for byte in b"[[,1234567890]" if state.first >> byte & 1]
        following = state.step(rng.choice(options)) if options else grammar.start
        assert following is not None
        state = following
    assert grammar.num_states <= 8_001
    deep = after(grammar.start, "[" * 20_000)
    assert deep is not None
    end = after(deep, "]" * 20_000)
    assert end is not None and end.accepting
