"""Schemas by example, each with texts that are accepted and texts that are not.

Of what a value must not be (`not`, `if`, `oneOf`, `contains`, and their relatives) `jsonschema` is
asked as well; `schema_fuzz.py` compares with it at random.
"""

import datetime
import ipaddress
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_vllm.fsm.schema import UnsupportedSchemaError, compile_schema
from tests.unit.fsm.texts import accepts

jsonschema = pytest.importorskip("jsonschema")

DRAFT_4 = "http://json-schema.org/draft-04/schema#"
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
CLOSED = {"properties": {"a": {"type": "integer"}}, "additionalProperties": False}

TREE = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "children": {"type": "array", "items": {"$ref": "#"}},
    },
    "required": ["name"],
    "additionalProperties": False,
}

EXAMPLES: list[tuple[Any, list[str], list[str]]] = [
    (TREE, ['{"name":"a"}', '{"name": "a", "children": [{"name": "b", "children": []}]}'],
     ['{"name":"a","children":[{}]}', '{"children":[]}']),
    ({"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
                {"properties": {"a": {"minimum": 5}, "b": {"type": "null"}}, "required": ["b"]}]},
     ['{"a": 7, "b": null}'], ['{"a": 3, "b": null}', '{"a": 7}']),
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
    ({"type": ["integer", "null"]}, ["1", "-0", "1.0", "null"], ["1.5", '"1"']),
    ({"type": "number", "minimum": 1, "exclusiveMinimum": True}, ["1.1"], ["1", "0"]),
    ({"$ref": "#/$defs/o", "additionalProperties": False, "properties": {"b": True}, "$defs": {
      "o": {"type": "object", "properties": {"a": True}}}}, ['{"b": 1}', "{}"],
     ['{"a": 1}', '{"a": 1, "b": 1}']),
    ({"$ref": "#/$defs/r", "$defs": {"x": {"const": 1}, "r": {"$id": "http://a.example/r",
      "items": {"$ref": "#/$defs/x"}, "type": "array", "$defs": {"x": {"const": 2}}}}},
     ["[2, 2]"], ["[1]"]),
    ({"$ref": "#/definitions/a", "maximum": 3, "definitions": {"a": {"type": "integer"}},
      "$schema": "http://json-schema.org/draft-07/schema#"}, ["2", "4"], ['"a"']),
    ({"type": "integer", "$schema": DRAFT_4}, ["1", "-30"], ["1.0"]),
    ({"type": "integer", "minimum": 2, "$schema": DRAFT_4}, ["2", "30"], ["1", "2.0"]),
    ({"type": "integer", "enum": [1, 2.0], "$schema": DRAFT_4}, ["1"], ["2.0", "2"]),
    ({"type": "integer"}, ["1", "1.0"], ["1.5"]),
    ({"type": "string", "pattern": "^a.b$"}, ['"a b"'], [r'"a\nb"', '"a\u2028b"']),
    ({}, ["1", "{}", '[{"a": [null, "x", 1e5]}]', '" "'], ["", "{]", "nul"]),
]  # fmt: skip


def record(names: str, required: str = "", others: Any = False, **keywords: int) -> Any:
    nulls = {name: {"type": "null"} for name in names}
    closing = {"required": [*required], "additionalProperties": others}
    return {"type": "object", "properties": nulls, **closing, **keywords}


ORDERS: list[tuple[Any, str, str]] = [
    # any order while an optional member is left
    (record("abc"), "- b ac ca cba bca", "aa aba ax"),
    (record("abc", required="b"), "b ba cb acb cba", "- ac bab"),
    (record("abc", required="bc"), "bc cb abc cba bca", "acb ca ab"),
    (record("abc", required="abc"), "abc", "acb cba ab"),
    (record("abcdef", required="f"), "f fedcba bdf", "edcba ff"),
    (record("abcdefg"), "- g abcdefg acg", "ba ga aa"),
    # members that are not listed come last
    (record("ab", others={"type": "null"}), "bax bxx x", "xa bxa bb"),
    # what is counted
    (record("abc", minProperties=2), "ca bac", "c cc -"),
    (record("abc", minProperties=3), "abc", "acb ca"),
    (record("abc", required="b", maxProperties=2), "cb bc ba b", "ac bac c"),
    (record("abc", required="bc", maxProperties=2), "bc", "cb ab bca"),
    (record("ab", others={"type": "null"}, minProperties=2, maxProperties=2), "ba ax", "bax xx b"),
]


@pytest.mark.parametrize(("schema", "accepted", "refused"), ORDERS)
def test_members_come_in_any_order_while_an_optional_one_is_left(schema, accepted, refused):
    def text(names):
        return "{" + ", ".join([f'"{name}": null' for name in names.strip("-")]) + "}"

    grammar = compile_schema(schema)
    assert [names for names in accepted.split() if not accepts(grammar, text(names))] == []
    assert [names for names in refused.split() if accepts(grammar, text(names))] == []


LOGIC: list[tuple[Any, list[str], list[str]]] = [
    # not
    ({"not": {"type": "string"}}, ["1", "null", "{}"], ['"a"']),
    ({"not": {"type": "integer"}}, ["1.5", "true", '"1"'], ["1", "1.0"]),
    ({"type": "object", "not": {"required": ["a", "b"]}}, ["{}", '{"a": 1}'], ['{"a":1,"b":2}']),
    ({"type": "string", "not": {"enum": ["a", "\n"]}}, ['"b"', '"aa"', '""'],
     ['"a"', r'"\n"', r'"\u000a"', r'"\u0061"']),
    ({"type": "string", "not": {"pattern": "^a"}, "minLength": 1}, ['"b"', '"ba"'], ['"a"', '""']),
    ({"type": "integer", "not": {"enum": [1, 2.0]}}, ["3", "0", "12"], ["1", "2", "1.0"]),
    ({"type": "number", "not": {"const": -0.5}}, ["0.5", "-0.51"], ["-0.5", "-0.50"]),
    ({"type": "array", "not": {"const": [1, 2]}}, ["[]", "[1]", "[2, 1]", "[1, 2, 3]"], ["[1, 2]"]),
    ({"type": "object", "not": {"properties": {"a": {"type": "null"}}}}, ['{"a": 1}'],
     ["{}", '{"a": null}']),
    ({"type": "object", "not": {"additionalProperties": {"type": "null"}}},
     ['{"x": 1}', '{"x": null, "y": 1}'], ["{}", '{"x": null}', '{"x": 1, "x": null}']),
    ({"type": "object", "not": {"propertyNames": {"maxLength": 1}}}, ['{"ab": 1}'],
     ["{}", '{"a": 1}']),
    ({"type": "array", "not": {"contains": {"const": 1}}}, ["[]", "[2, 3]"], ["[1]", "[2, 1]"]),
    ({"not": {"oneOf": [{"minimum": 1}, {"maximum": 3}]}}, ["2", '"a"'], ["0", "4"]),
    ({"not": {"if": {"minimum": 1}, "then": {"maximum": 3}, "else": False}}, ["0", "4"],
     ["2", '"a"']),
    ({"type": "string", "not": {"format": "date"}}, ['"2020"', '"2020-02-30"'], ['"2020-02-20"']),
    # if
    ({"if": {"type": "string"}, "then": {"maxLength": 1}, "else": {"type": "null"}},
     ['"a"', "null"], ['"ab"', "1"]),
    ({"type": "object", "properties": {"k": {"enum": ["x", "y"]}, "v": True}, "required": ["k"],
      "if": {"properties": {"k": {"const": "x"}}}, "then": {"required": ["v"]}},
     ['{"k": "y"}', '{"k": "x", "v": 1}'], ['{"k": "x"}', "{}"]),
    # oneOf
    ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, ["1", "2.5"], ["3", "1.5"]),
    ({"oneOf": [{"type": "string"}, {"pattern": "^a"}, {"maxLength": 1}]}, ['"bb"'],
     ['"a"', '"aa"', '"b"', "1"]),
    # dependencies
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, ["{}", '{"b": 1}', '{"b": 2, "a": 1}'],
     ['{"a": 1}']),
    ({"dependencies": {"a": ["b"], "c": {"required": ["a"]}}, "type": "object",
      "$schema": DRAFT_7}, ['{"b": 1, "a": 1}', '{"b": 1}'], ['{"a": 1}', '{"c": 1}']),
    # numbers
    ({"type": "number", "multipleOf": 0.25}, ["0.75", "-1.50", "3", "0.2500"], ["0.3", "0.125"]),
    ({"type": "number", "multipleOf": 1e-8}, ["12391239123", "0.00000001"], ["0.000000001"]),
    # contains
    ({"type": "array", "contains": {"const": 1}, "minContains": 2, "maxContains": 2},
     ["[1, 1]", "[1, 0, 1]"], ["[1]", "[1, 1, 1]"]),
    ({"type": "array", "contains": {"const": 1}, "minContains": 0}, ["[]", "[2]"], ["1"]),
    # uniqueItems
    ({"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True},
     ["[]", '["a"]', '["b", "a"]'], ['["a", "a"]', '["a", "b", "a"]']),
    ({"type": "array", "prefixItems": [{"enum": [1, 2]}, {"enum": [2, 3]}], "maxItems": 2,
      "uniqueItems": True}, ["[]", "[1]", "[2, 3]"], ["[2, 2]", "[2, 3, 4]"]),
    # names of members
    ({"type": "object", "propertyNames": {"pattern": "^a", "not": {"const": "ab"}}},
     ['{"a": 1, "ac": 2}', "{}"], ['{"b": 1}', '{"ab": 1}', r'{"\u0061b": 1}']),
    # unevaluated
    ({"type": "object", "allOf": [{"properties": {"a": True}}], "unevaluatedProperties": False},
     ['{"a": 1}', "{}"], ['{"b": 1}']),
    ({"type": "object", "if": {"required": ["a"]}, "then": {"properties": {"a": True, "b": True}},
      "unevaluatedProperties": {"type": "null"}}, ['{"a": 1, "b": 1}', '{"c": null}'],
     ['{"b": 1}', '{"a": 1, "c": 1}']),
    ({"type": "object", "$ref": "#/$defs/o", "unevaluatedProperties": False, "$defs": {"o": {
      "patternProperties": {"^x": True}}}}, ['{"x1": 1}'], ['{"a": 1}']),
    ({"not": {"unevaluatedProperties": False}}, ['{"a": 1}'], ["{}", "1"]),
    ({"type": "array", "contains": {"const": 1}, "unevaluatedItems": {"const": 2}}, ["[1, 2, 1]"],
     ["[2]", "[1, 3]"]),
    # references
    ({"$ref": "#here", "$defs": {"x": {"$anchor": "here", "type": "null"}}}, ["null"], ["1"]),
    ({"$id": "http://a.example/root.json", "$ref": "item.json", "$defs": {"x": {
      "$id": "item.json", "type": "null"}}}, ["null"], ["1"]),
    ({"$dynamicRef": "#n", "$defs": {"x": {"$dynamicAnchor": "n", "type": "null"}}}, ["null"],
     ["1"]),
    # branches and types that nothing is valid against are left out
    ({"anyOf": [False, {"allOf": [{"type": "string"}, {"type": "null"}]}, {"const": 1}]}, ["1"],
     ["null"]),
    ({"enum": ["a", "bb", 3], "minLength": 2}, ['"bb"', "3"], ['"a"']),
]  # fmt: skip


@pytest.mark.parametrize("schema, legal, illegal", [*EXAMPLES, *LOGIC])
def test_examples(schema, legal, illegal):
    grammar = compile_schema(schema)
    assert [text for text in legal if not accepts(grammar, text)] == []
    assert [text for text in illegal if accepts(grammar, text)] == []


@pytest.mark.parametrize("schema, legal, illegal", LOGIC)
def test_the_reference_reads_the_examples_so(schema, legal, illegal):
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    is_valid = kind(schema, format_checker=kind.FORMAT_CHECKER).is_valid
    assert [text for text in legal if not is_valid(json.loads(text))] == []
    assert [text for text in illegal if is_valid(json.loads(text))] == []


@pytest.mark.parametrize(
    "schema, place",
    [
        ({"properties": {"a/b": {"items": {"format": "regex"}}}}, "#/properties/a~1b/items"),
        ({"not": {"anyOf": [{"uniqueItems": True}]}}, "#"),
        ({"$defs": {"x": {"pattern": "(?=a)"}}, "$ref": "#/$defs/x"}, "#/$defs/x"),
        ({"anyOf": [{"type": "null"}, {"$ref": "#/nowhere"}]}, "#/anyOf/1"),
    ],
)
def test_a_message_says_where_in_the_schema(schema, place):
    with pytest.raises(UnsupportedSchemaError) as caught:
        compile_schema(schema)
    assert str(caught.value).endswith(f"({place})")


@pytest.mark.parametrize(
    "form, legal, illegal",
    [
        ("duration", ["P1Y2M", "PT1H30M", "P3W"], ["P", "PT", "P1Y3D", "1D"]),
        ("json-pointer", ["", "/a~1b/0", '/\\"'], ["a", "/~2"]),
        ("relative-json-pointer", ["0#", "1/a"], ["-1/a", "01", "/a"]),
        ("uri", ["a:", "http://[v1.x]/"], ["//a", "http://[v1]/"]),
        ("uri-reference", ["", "//a/b", "../c?d#e", "a:b"], ["\\\\a", "a b", "1:b"]),
        ("iri", ["http://ü.example/ö"], ["/ü", "http://a b"]),
        ("iri-reference", ["/ü#ß"], ["#a b"]),
        ("uri-template", ["/{a}/{?b,c*}", "{+x:3}"], ["/{a", "{a b}"]),
        ("hostname", ["a", "a.b-c.example", "a" * 63], ["xn--x", "a.bc--d", ".".join("a" * 150)]),
        ("hostname", [], ["-a.b", "a..b", "a" * 64]),
        ("email", ["a.b--c@d.example"], ["a@xn--b.example", "a..b@c", "a@", "a"]),
        ("date", [], ["2023-02-29", "2023-13-01", "1900-02-29", "2023-1-1"]),
        ("time", [], ["24:00:00Z", "10:00:00", "22:59:60Z", "23:59:60+01:00"]),
        ("date-time", [], ["2023-01-01", "1998-12-31T23:58:60Z"]),
        ("ipv6", [], ["1::2::3", "1:2:3:4:5:6:7", "::12345", "::1.2.3", "1:2:3:4:5:6:7:8::"]),
        ("ipv6", [], ["::1%eth0"]),
        ("uri", [], ["http://[::01.2.3.4]"]),
        ("ipv4", [], ["256.1.1.1", "01.1.1.1"]),
        ("uuid", [], ["0" * 32]),
    ],
)
def test_formats(form, legal, illegal):
    grammar = compile_schema({"type": "string", "format": form})
    assert [text for text in legal if not accepts(grammar, f'"{text}"')] == []
    assert [text for text in illegal if accepts(grammar, f'"{text}"')] == []


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"const": 1}, {"const": 1.0}]},
        {"$ref": "https://example.com/other"},
        {**CLOSED, "type": "object", "minProperties": 2},
        {"type": "object", "required": ["a", "b"], "maxProperties": 1},
        {"allOf": [{"type": "string"}, {"type": "null"}]},
        {"type": "object", "minProperties": 2},
        {"type": "string", "format": "regex"},
        {"type": "string", "not": {"format": "time"}},
        {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        {"not": {"uniqueItems": True}},
        {"type": "array", "prefixItems": [False], "uniqueItems": True, "minItems": 1},
        {"type": "number", "multipleOf": 0.123456789},
        {"not": {"minContains": 0}, "$schema": "http://json-schema.org/draft-07/schema#"},
        {"type": "array", "minItems": 2, "uniqueItems": True, "items": {"const": 1}},
        {"$recursiveRef": "#"},
        {"prefixItems": [True], "$schema": "http://json-schema.org/draft-07/schema#"},
        {"items": {"$id": "http://a.example/", "$schema": "http://b.example/"}},
        {"$ref": "#/$defs/a/items", "$defs": {"a": {
            "$id": "http://a.example/", "$schema": "http://b.example/", "items": True}}},
        False,
        # values that would contain themselves
        {"$ref": "#"},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "object", "required": ["a"], "additionalProperties": {"$ref": "#"}},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"properties": {"a": {"$ref": "#/$defs/x"}},
         "$defs": {"x": {"allOf": [{"$ref": "#/$defs/x"}]}}},
    ],
)  # fmt: skip
def test_what_is_not_ours_is_handed_on(schema):
    with pytest.raises(UnsupportedSchemaError):
        compile_schema(schema)


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
        assert accepts(compile_schema({"type": "string", "format": form}), f'"{text}"'), text
