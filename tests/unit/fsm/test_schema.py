"""JSON schemas -> expressions: compared with the `jsonschema` package, and with hostile input."""

import datetime
import ipaddress
import json
import random
import re
import time
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_vllm.fsm.automaton import Automaton
from sgl_vllm.fsm.errors import TooComplexError
from sgl_vllm.fsm.schema import (
    SchemaSemantics,
    UnsupportedSchemaError,
    compile_schema,
    compiled_schema,
    workspace,
)
from sgl_vllm.fsm.schema.keywords import CONSTRAINTS
from tests.effort import examples
from tests.unit.fsm.texts import accepts, after, random_text, random_walk

jsonschema = pytest.importorskip("jsonschema")

NAMES = ["a", "ab", "b", "é", 'q"', "back\\", "n\n", "😀"]
TEXTS = ["", "a", "ab", "é", '"', "\\", "\n", "😀😀", "a\x01b", "/", "12"]
STYLES: list[dict[str, Any]] = [
    {"indent": 2},
    {"separators": (",", ":")},
    {},
    {"separators": (" ,\t", "\n:  ")},
]


def dumps(value, **style) -> str:
    return json.dumps(value, ensure_ascii=False, **style)


def is_valid(instance, schema) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(instance)


def automaton(schema, **options) -> Automaton:
    return Automaton(compile_schema(schema, **options))


# -- random schemas, each with random instances in the order of its members -------------------


def with_instances(schema, instances):
    """A pair: the schema, and a strategy of texts' values that are valid by construction."""
    return st.just((schema, instances))


scalars = st.one_of(
    with_instances({"type": "boolean"}, st.booleans()),
    with_instances({"type": "null"}, st.none()),
    with_instances({"type": "integer"}, st.integers(-(10**20), 10**20)),
    with_instances({"type": "number"}, st.floats(allow_nan=False, allow_infinity=False)),
    with_instances({"type": "string"}, st.sampled_from(TEXTS) | st.text('a"\\\n😀é\x7f')),
    st.tuples(st.integers(-120, 120), st.integers(0, 200)).flatmap(
        lambda b: with_instances(
            {"type": "integer", "minimum": b[0], "maximum": b[0] + b[1]},
            st.integers(b[0], b[0] + b[1]),
        )
    ),
    st.tuples(st.integers(0, 3), st.none() | st.integers(0, 3)).flatmap(
        lambda b: with_instances(
            {"type": "string", "minLength": b[0]}
            | ({} if b[1] is None else {"maxLength": b[0] + b[1]}),
            st.text('a"\\\n😀é', min_size=b[0], max_size=None if b[1] is None else b[0] + b[1]),
        )
    ),
    with_instances({"type": "string", "pattern": "^[aé]+$"}, st.text("aé", min_size=1)),
    with_instances(
        {"type": "string", "pattern": "😀|n", "maxLength": 3}, st.sampled_from(["n", "x😀n", "aan"])
    ),
    st.lists(
        st.sampled_from([*TEXTS, None, True, False, 0, 1, 2.5, -3, {"a": [1, {}]}, [], {}, [True]]),
        min_size=1,
        max_size=5,
    ).flatmap(lambda values: with_instances({"enum": values}, st.sampled_from(values))),
    st.sampled_from([*TEXTS, None, 7, {"é": '"'}, [1, [2]]]).flatmap(
        lambda value: with_instances({"const": value}, st.just(value))
    ),
)


@st.composite
def objects(draw, inner):
    names = draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=4))
    members = {name: draw(inner) for name in names}
    required = [name for name in names if draw(st.booleans())]
    extra = draw(st.none() | st.just(True) | inner)
    schema = {
        "type": "object",
        "properties": {name: member[0] for name, member in members.items()},
        "required": required,
        "additionalProperties": False if extra is None else extra if extra is True else extra[0],
    }
    low = draw(st.integers(0, len(names))) if draw(st.booleans()) else 0
    if low:
        schema["minProperties"] = low

    @st.composite
    def instances(draw):
        taken = [n for n in names if n in required or draw(st.booleans())]
        for name in names:
            if len(taken) < low and name not in taken:
                taken.append(name)
        value = {name: draw(members[name][1]) for name in names if name in taken}
        if extra is not None and draw(st.booleans()):
            name = draw(st.sampled_from([n for n in ["x", "a\\", "abc", "é\n"] if n not in names]))
            value[name] = draw(st.just(1) if extra is True else extra[1])
        return value

    return schema, instances()


@st.composite
def arrays(draw, inner):
    first = draw(st.lists(inner, max_size=2))
    rest = draw(st.none() | inner)
    low = draw(st.integers(0, len(first) if rest is None else 3))
    high = draw(st.none() | st.integers(low, 4))
    schema = {"type": "array", "minItems": low}
    if first:
        schema["prefixItems"] = [item[0] for item in first]
    schema["items"] = False if rest is None else rest[0]
    if high is not None:
        schema["maxItems"] = high
    most = len(first) if rest is None else len(first) + 3
    most = max(low, most if high is None else min(most, high))

    @st.composite
    def instances(draw):
        size = draw(st.integers(low, most))
        return [draw(first[i][1] if i < len(first) else rest[1]) for i in range(size)]

    return schema, instances()


def alternatives(inner):
    return st.lists(inner, min_size=1, max_size=3).map(
        lambda options: (
            {"anyOf": [option[0] for option in options]},
            st.one_of([option[1] for option in options]),
        )
    )


schemas = st.recursive(
    scalars, lambda inner: objects(inner) | arrays(inner) | alternatives(inner), max_leaves=6
)


@settings(max_examples=examples(80), deadline=None)
@given(st.data())
def test_valid_values_are_accepted_however_they_are_spaced(data):
    schema, instances = data.draw(schemas)
    loose, tight = automaton(schema), automaton(schema, any_whitespace=False)
    for _ in range(3):
        instance = data.draw(instances)
        assert is_valid(instance, schema)
        if "e" in re.sub(r'"(\\.|[^"])*"|true|false', "", dumps(instance)):
            continue  # a number with an exponent is not within bounds
        for style in STYLES:
            assert accepts(loose, dumps(instance, **style)), dumps(instance, **style)
        compact = dumps(instance, separators=(",", ":"))
        assert accepts(tight, compact), compact
        if (spaced := dumps(instance)) != compact:
            assert not accepts(tight, spaced), spaced


@settings(max_examples=examples(80), deadline=None)
@given(st.data(), st.integers(0, 10**9))
def test_what_is_accepted_is_valid(data, seed):
    schema, instances = data.draw(schemas)
    rng = random.Random(seed)
    grammar = automaton(schema)
    texts: list[str | bytes | None] = [random_text(grammar.start, rng, 300) for _ in range(4)]
    texts += [mutated(dumps(data.draw(instances)), rng) for _ in range(6)]
    other, _ = data.draw(schemas)
    texts += [random_text(automaton(other).start, rng, 100)]
    for text in texts:
        if text is not None and accepts(grammar, text):
            # Decimal: a float may be rounded onto a bound.
            value = json.loads(text)
            assert is_valid(value, schema), text


def mutated(text: str, rng: random.Random) -> str:
    at = rng.randrange(len(text) + 1)
    piece = rng.choice(
        ["", '"', "}", "]", ",", "1", "0", "-", " ", "a", "é", "null", "\\u0061", "😀"]
    )
    return text[:at] + piece + text[at + rng.randrange(3) :]


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(0, 10**9))
def test_every_way_leads_to_an_end(data, seed):
    schema, _ = data.draw(schemas)
    rng = random.Random(seed)
    for states in (random_walk(automaton(schema).start, rng, 60) for _ in range(3)):
        assert can_end(states[-1])


def can_end(state) -> bool:
    """By closing whatever is open, and a search where that is not enough."""
    pending, seen = [state], {state}
    while pending and len(seen) < 20_000:
        state = pending.pop()
        if state.accepting:
            return True
        for byte in sorted(range(256), key=lambda b: b in b'"]}'):
            if state.first >> byte & 1:
                following = state.step(byte)
                assert following is not None
                if following not in seen:
                    seen.add(following)
                    pending.append(following)
    return False


# -- single features --------------------------------------------------------------------------

TREE = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "children": {"type": "array", "items": {"$ref": "#"}},
    },
    "required": ["name"],
    "additionalProperties": False,
}

EXAMPLES = [
    (TREE, ['{"name":"a"}', '{"name": "a", "children": [{"name": "b", "children": []}]}'],
     ['{"name":"a","children":[{}]}', '{"children":[],"name":"a"}']),
    ({"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
                {"properties": {"a": {"minimum": 5}, "b": {"type": "null"}}, "required": ["b"]}]},
     ['{"a": 7, "b": null}'], ['{"a": 3, "b": null}', '{"a": 7}']),
    ({"allOf": [{"enum": [1, 2, True]}, {"enum": [True, 2.0, 3]}]}, ["2", "true"], ["1", "3"]),
    ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"const": 1}}}, ["1"], ["2"]),
    ({"type": "string", "$ref": "#/$defs/x", "$defs": {"x": {"maxLength": 1}}},
     ['"a"'], ['"ab"', "1"]),
    ({"oneOf": [{"type": "object", "properties": {"k": {"const": k}, k: {"type": "integer"}},
                 "required": ["k", k], "additionalProperties": False} for k in ("cat", "dog")]},
     ['{"k": "cat", "cat": 1}', '{"k":"dog","dog":2}'], ['{"k": "cat", "dog": 1}']),
    ({"enum": ["é", '"', "\\", 1, 10, None, {"a": {"b": [1, "x"]}}, "😀"]},
     ['"é"', '"\\""', '"\\\\"', "1", "10", "null", '{"a": {"b": [1, "x"]}}', '"😀"'],
     ['"e"', '"\\"', "11", '{"a": {"b": [1]}}', "true"]),
    ({"type": "object", "patternProperties": {"^i": {"type": "integer"}, "^s": {"type": "string"}},
      "additionalProperties": False},
     ["{}", '{"i": 1}', '{"sx": "", "i2": 3}'], ['{"i": ""}', '{"x": 1}', '{"\\u0069": ""}']),
    ({"type": "object", "properties": {"a": {"type": "null"}},
      "patternProperties": {"^i": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
     ['{"a": null, "i": 1, "z": "x"}', '{"z\\n\\u0001": ""}'],
     ['{"i": "x"}', '{"\\u0069": "x"}', '{"\\u0061": "x"}', '{"z": 1}', '{"a": ""}']),
    ({"type": "object", "patternProperties": {"": {"type": "integer"}},
      "additionalProperties": True},
     ['{"a": 1}'], ['{: 1}', '{"a": ""}']),
    ({"type": "object", "properties": {n: {"type": "null"} for n in "abc"}, "minProperties": 2,
      "additionalProperties": False},
     ['{"a": null, "c": null}', '{"b":null,"c":null}', '{"a":null,"b":null,"c":null}'],
     ['{"c": null}', "{}", '{"a": null}']),
    ({"type": "object", "properties": {n: {"type": "null"} for n in "abc"}, "maxProperties": 2,
      "required": ["b"], "additionalProperties": {"type": "null"}},
     ['{"b": null}', '{"a": null, "b": null}', '{"b":null,"x":null}'],
     ['{"a":null,"c":null}', '{"a":null,"b":null,"c":null}', '{"a":null,"b":null,"x":null}']),
    ({"type": "object", "required": ["x", "x"], "additionalProperties": {"type": "integer"}},
     ['{"x": 1}', '{"x": 1, "y": 2}'], ["{}", '{"y": 1}']),
    ({"type": "array", "prefixItems": [{"const": 1}, {"const": 2}], "items": False},
     ["[]", "[1]", "[1, 2]"], ["[2]", "[1, 2, 3]"]),
    ({"type": "array", "items": [{"const": 1}], "additionalItems": {"const": 3}, "maxItems": 2},
     ["[]", "[1]", "[1,3]"], ["[3]", "[1,3,3]"]),
    ({"type": "string", "maxLength": 2}, ['"😀😀"', r'"\u00e9\n"'], ['"abc"', r'"\u00e9\n."']),
    ({"type": "string", "minLength": 2}, ['"😀😀"', r'"\u00e9\n"'],
     ['"😀"', r'"\u00e9"', '"\\ud83d\\ude00"']),
    ({"type": "string", "maxLength": 1}, [r'"\ud83d\ude00"', r'"\uDBFF\uDFFF"', r'"\ud7ff"'],
     [r'"\ud83d"', r'"\ude00"', r'"\ud83d\ud83d"', r'"\ud83dx"', r'"\ud83d\n"',
      r'"\ud83d\ude00a"']),
    ({"type": "string", "minLength": 2, "maxLength": 3}, [r'"a\uD83D\uDE00"', r'"\ud83d\ude00😀"'],
     [r'"\ud83d\ude00"', r'"\ude00\ud83d"', r'"a\ud83d"']),
    ({"type": "string", "minLength": 1, "maxLength": 2, "pattern": "a"},
     ['"a"', '"éa"'], ['""', '"é"', '"aaa"']),
    ({"type": "string", "pattern": "^[\"\\\\]$"}, [r'"\""', r'"\\"'], ['"a"', '"""']),
    ({"type": ["integer", "null"]}, ["1", "-0", "1.0", "null"], ["1.5", '"1"']),
    ({"type": "number", "minimum": 0, "exclusiveMaximum": 1.5}, ["0", "1.49", "1"], ["1.5", "-1"]),
    ({"type": "integer", "exclusiveMinimum": 2.5, "maximum": 4}, ["3", "4"], ["2", "5"]),
    ({"type": "number", "minimum": 1, "exclusiveMinimum": True}, ["1.1"], ["1", "0"]),
    ({"allOf": [{"prefixItems": [{"minimum": 3}]}], "items": {"minimum": 5}},
     ["[5, 6]", "[]", '["a"]'], ["[3, 5]", "[4]", "[5, 3]"]),
    ({"allOf": [{"prefixItems": [{"const": 1}, {"const": 2}]}, {"items": False}]}, ["[]"],
     ["[1]", "[1, 2]"]),
    ({"$ref": "#/$defs/t", "items": {"type": "integer"}, "$defs": {"t": {"type": "array",
      "prefixItems": [{"minimum": 3}]}}}, ["[3, 1]"], ["[2]", '["a"]', '[3, "a"]']),
    ({"items": [{"minimum": 3}], "additionalItems": {"minimum": 5},
      "allOf": [{"items": {"maximum": 7}}]}, ["[3, 5]"], ["[2]", "[8]", "[3, 4]", "[3, 8]"]),
    ({"type": "object", "allOf": [{"patternProperties": {"^a": {"minimum": 3}}},
      {"additionalProperties": {"maximum": 5}}]}, ['{"a": 4, "b": 1}', '{"b": 5}'],
     ['{"a": 2}', '{"a": 6}', '{"b": 6}']),
    ({"$ref": "#/$defs/o", "additionalProperties": False, "properties": {"b": True}, "$defs": {
      "o": {"type": "object", "properties": {"a": True}}}}, ['{"b": 1}', "{}"],
     ['{"a": 1}', '{"a": 1, "b": 1}']),
    ({"$ref": "#/$defs/r", "$defs": {"x": {"const": 1}, "r": {"$id": "http://a.example/r",
      "items": {"$ref": "#/$defs/x"}, "type": "array", "$defs": {"x": {"const": 2}}}}},
     ["[2, 2]"], ["[1]"]),
    ({"$ref": "#/definitions/a", "maximum": 3, "definitions": {"a": {"type": "integer"}},
      "$schema": "http://json-schema.org/draft-07/schema#"}, ["2", "4"], ['"a"']),
    ({"type": "object", "minProperties": 2, "properties": {"a": True}},
     ['{"a": 1, "x": 1}', '{"a": 1, "x": 1, "x": 2}'], ['{"x": 1, "x": 2}', '{"a": 1}']),
    ({"type": "object", "minProperties": 1}, ['{"x": 1}', '{"x": 1, "x": 2}'], ["{}"]),
    ({"allOf": [{"minimum": 3, "exclusiveMinimum": True}, {"minimum": 5}], "type": "number"},
     ["5", "6"], ["3", "4"]),
    ({"type": "string", "pattern": "^a.b$"}, ['"a b"'], [r'"a\nb"', '"a\u2028b"']),
    ({"type": ["object", "null"], "anyOf": [{"type": "object"}, {"type": "null"},
      {"type": "string"}]}, ["{}", "null"], ['"a"']),
    ({}, ["1", "{}", '[{"a": [null, "x", 1e5]}]', '" "'], ["", "{]", "nul"]),
    (True, ["1"], ["x"]),
    ({"anyOf": [{"const": "ab"}, {"const": "abc"}, {"type": "integer"}], "title": "t"},
     ['"ab"', '"abc"', "12"], ['"a"', "null"]),
]  # fmt: skip


@pytest.mark.parametrize("schema, legal, illegal", EXAMPLES)
def test_examples(schema, legal, illegal):
    grammar = automaton(schema)
    assert [t for t in legal if not accepts(grammar, t)] == []
    assert [t for t in illegal if accepts(grammar, t)] == []


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"const": 1}, {"const": 1.0}]},
        {"$ref": "https://example.com/other"},
        {"$ref": "#/nowhere"},
        {
            "type": "object",
            "properties": {"a": {}},
            "additionalProperties": False,
            "minProperties": 2,
        },
        {"type": "object", "required": ["a", "b"], "maxProperties": 1},
        {"type": "string", "minLength": 2, "maxLength": 1},
        {"type": "array", "minItems": 2, "maxItems": 1},
        {"type": "integer", "minimum": 2, "maximum": 1},
        {"allOf": [{"type": "string"}, {"type": "null"}]},
        {"type": "object", "minProperties": 2},
        {"type": "string", "format": "regex"},
        {"type": "string", "not": {"format": "time"}},
        {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        {"not": {"uniqueItems": True}},
        {"type": "number", "multipleOf": 0.123456789},
        {"not": {"unevaluatedProperties": False}},
        {"not": {"minContains": 0}, "$schema": "http://json-schema.org/draft-07/schema#"},
        {"type": "array", "minItems": 2, "uniqueItems": True, "items": {"const": 1}},
        {"$recursiveRef": "#"},
        {"prefixItems": [True], "$schema": "http://json-schema.org/draft-07/schema#"},
        {"$defs": {"a": {"$id": "http://a.example/", "$schema": "http://b.example/"}}},
        False,
    ],
)
def test_what_is_not_ours_is_handed_on(schema):
    with pytest.raises(UnsupportedSchemaError):
        compile_schema(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"anyOf": [{"$ref": "#"}]},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "object", "required": ["a"], "additionalProperties": {"$ref": "#"}},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"type": "array", "prefixItems": [{}, {"$ref": "#"}], "minItems": 2},
        {"properties": {"a": {"$ref": "#/$defs/x"}},
         "$defs": {"x": {"allOf": [{"$ref": "#/$defs/x"}]}}},
    ],
)  # fmt: skip
def test_values_that_would_contain_themselves_are_refused(schema):
    with pytest.raises(UnsupportedSchemaError):
        compile_schema(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        {"type": "array", "items": {"$ref": "#"}},
        {"type": ["object", "null"], "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "object", "properties": {"a": {"anyOf": [{"$ref": "#"}, {"const": 1}]}},
         "required": ["a"]},
    ],
)  # fmt: skip
def test_values_that_may_contain_themselves_have_an_end(schema):
    rng = random.Random(0)
    for _ in range(5):
        assert can_end(random_walk(automaton(schema).start, rng, 40)[-1])


@settings(max_examples=60, deadline=None)
@given(
    st.dates(datetime.date(1, 1, 1)),
    st.times(),
    st.integers(0, 23),
    st.uuids(),
    st.integers(0, 128),
)
def test_formats_hold_what_is_in_them(date, moment, offset, uuid, shift):
    for form, text in {
        "date": date.isoformat(),
        "time": f"{moment.isoformat()}+{offset:02}:30",
        "date-time": f"{date.isoformat()}T{moment.isoformat()}Z",
        "uuid": str(uuid),
        "ipv4": ".".join(str(b) for b in uuid.bytes[:4]),
        "ipv6": str(ipaddress.IPv6Address(uuid.int >> shift)),
        "uri": f"http://[{ipaddress.IPv6Address(uuid.int >> shift << shift)}]:80/",
    }.items():
        assert accepts(automaton({"type": "string", "format": form}), f'"{text}"'), text


@pytest.mark.parametrize(
    "form, text",
    [
        ("date", "2023-02-29"), ("date", "2023-13-01"), ("date", "1900-02-29"),
        ("date", "2023-1-1"),
        ("time", "24:00:00Z"), ("time", "10:00:00"), ("date-time", "2023-01-01"),
        ("time", "22:59:60Z"), ("time", "23:59:60+01:00"), ("date-time", "1998-12-31T23:58:60Z"),
        ("ipv6", "1::2::3"), ("ipv6", "1:2:3:4:5:6:7"), ("ipv6", "::12345"), ("ipv6", "::1.2.3"),
        ("ipv6", "1:2:3:4:5:6:7:8::"), ("ipv6", "::1%eth0"), ("uri", "http://[::01.2.3.4]"),
        ("ipv4", "256.1.1.1"), ("ipv4", "01.1.1.1"), ("uuid", "0" * 32), ("email", "a@"),
        ("email", "a"), ("hostname", "-a.b"), ("hostname", "a..b"), ("hostname", "a" * 64),
    ],
)  # fmt: skip
def test_formats_refuse_what_is_not_in_them(form, text):
    assert not accepts(automaton({"type": "string", "format": form}), f'"{text}"')


@pytest.mark.parametrize("day", ["2000-02-29", "2024-02-29"])
def test_leap_days_are_days(day):
    assert accepts(automaton({"type": "string", "format": "date"}), f'"{day}"')


def test_numbers_of_many_digits_keep_them_all():
    bound = 12345678901234567890123456789012345
    grammar = automaton({"type": "integer", "minimum": bound})
    assert accepts(grammar, str(bound)) and not accepts(grammar, str(bound - 1))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_both_readings_agree_where_a_schema_says_it_all(data):
    simple = st.sampled_from(
        [{"type": "boolean"}, {"type": "null"}, {"type": "string"}, {"enum": ["a", 1, None]}]
    )
    properties = data.draw(st.dictionaries(st.sampled_from(NAMES), simple, min_size=1))
    schema = {
        "type": "object",
        "properties": properties,
        "required": [n for n in properties if data.draw(st.booleans())],
        "additionalProperties": False,
    }
    schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": 2}
    strict, spec = automaton(schema, semantics=SchemaSemantics.STRICT), automaton(schema)
    rng = random.Random(0)
    for one, other in ((strict, spec), (spec, strict)):
        text = random_text(one.start, rng, 200)
        assert text is None or accepts(other, text)


def test_the_strict_reading_is_closed_and_implies_objects():
    schema = {"properties": {"a": {"type": "integer"}}}
    assert not accepts(automaton(schema, semantics=SchemaSemantics.STRICT), "1")
    assert not accepts(automaton(schema, semantics=SchemaSemantics.STRICT), '{"a": 1, "b": 2}')
    assert accepts(automaton(schema), "1") and accepts(automaton(schema), '{"a": 1, "b": 2}')


# -- hostile schemas --------------------------------------------------------------------------


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


def text_of_depth(begin: str, end: str, depth: int) -> str:
    return begin * depth + "true" + end * depth


BIG = 10**6
HOSTILE = {
    "circle": {"$ref": "#/a", "a": {"$ref": "#/b"}, "b": {"$ref": "#/a"}},
    "circle of conjunctions": {"allOf": [{"$ref": "#"}, {"$ref": "#"}]},
    "circle with siblings": {"$ref": "#", "minLength": 1},
    "deep items": nested("items", 10_000),
    "deep anyOf": nested("anyOf", 10_000),
    "deep allOf": nested("allOf", 10_000),
    "deep text": text_of_depth('{"items":', "}", 100_000),
    "deep enum": {"enum": [json.loads("[" * 500 + "]" * 500)]},
    "huge minItems": {"type": "array", "minItems": 10**9},
    "many minItems": {"type": "array", "minItems": 1000, "items": {
        "type": "array", "minItems": 1000}},
    "huge minLength": {"type": "string", "minLength": 10**5},
    "endless minLength": '{"type": "string", "minLength": 1e999}',
    "endless bound": '{"type": "integer", "minimum": -1e999, "maximum": 1e999}',
    "no number": '{"type": "number", "minimum": NaN}',
    "no number in enum": '{"enum": [NaN, Infinity, 1]}',
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
    "surrogate in enum of objects": {"enum": [{"\ud800": "\udfff"}]},
    "surrogate in const": {"const": "\udc00"},
    "surrogate in a name": {"properties": {"\ud800": {}}},
    "surrogate in required": {"type": "object", "required": ["\ud800"]},
    "surrogate in a pattern": {"type": "string", "pattern": "\ud800"},
    "surrogates in a pattern": {"type": "string", "pattern": "[\ud800-\udfff]"},
    "surrogate in patternProperties": {"type": "object", "patternProperties": {"\ud800": {}}},
    "surrogate in $ref": {"$ref": "#/\ud800"},
    "surrogate in text": '{"enum": ["\\ud800"]}',
    "names that are none": {"properties": {1: {}, None: {}}},
    "names that are none in enum": {"enum": [{1: 2}]},
    "values that are none": {"enum": [b"", {1}, object()]},
    "keywords that are none": {None: 1, 1: 2, "type": "null"},
    "bad escapes in $ref": {"$ref": "#/%ff%GG/~2"},
    "no schema": [1],
    "not JSON": "{",
    "nothing": "",
    "pattern of many classes": {"type": "string", "pattern": "[^a]" * 200},
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_schemas_are_soon_refused_or_work(name):
    tried(HOSTILE[name])


def test_ways_that_double_are_given_up_while_they_are_walked():
    item = {"type": "array", "items": {"$ref": "#"}}
    grammar = automaton({"anyOf": [item, {**item}, {"type": "null"}]})
    with pytest.raises(TooComplexError):
        after(grammar.start, "[" * 40)


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
        compiled = compiled_schema(schema, semantics=SchemaSemantics.SPEC, any_whitespace=True)
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


def test_an_enumeration_that_depends_on_itself_is_refused():
    with pytest.raises(UnsupportedSchemaError, match="depends on"):
        compile_schema({"enum": ["a", ["a"]], "items": {"$ref": "#"}})


junk = st.recursive(
    st.sampled_from(
        [
            None,
            True,
            False,
            0,
            1,
            -1,
            2.5,
            1e308,
            float("inf"),
            float("nan"),
            10**30,
            "",
            "a",
            "#",
            "integer",
            "object",
            "\ud800",
            "(",
            "^a$",
            "#/properties/a",
            "date",
        ]
    ),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["a", "type", "enum", "allOf", "anyOf", "$ref", "items", "properties"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=5,
)
keywords = st.sampled_from(sorted(CONSTRAINTS | {"$defs", "title"}))


@settings(max_examples=examples(200), deadline=None)
@given(st.dictionaries(keywords, junk, max_size=4))
def test_keywords_with_values_of_any_kind_raise_only_what_is_promised(schema):
    tried(schema)
    tried({"allOf": [schema, {"properties": {"a": {"type": "string"}}, "minimum": 1}]})


@settings(max_examples=examples(150), deadline=None)
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
    for _ in range(10_000):
        options = [byte for byte in b"[[,1234567890]" if state.first >> byte & 1]
        following = state.step(rng.choice(options)) if options else grammar.start
        assert following is not None
        state = following
    assert grammar.num_states <= 20_001
    deep = after(grammar.start, "[" * 20_000)
    assert deep is not None
    end = after(deep, "]" * 20_000)
    assert end is not None and end.accepting


def test_a_decimal_bound_is_exact():
    grammar = automaton({"type": "number", "exclusiveMinimum": 0.1})
    assert not accepts(grammar, "0.1") and not accepts(grammar, "0.10")
    assert accepts(grammar, str(Decimal("0.1") + Decimal("1e-20")))
