"""Schemas that say what a value must not be: `not`, `if`, `oneOf`, `contains`, and their relatives.

Each example has texts that are valid and texts that are not. `jsonschema` is asked as well whether
that is so; `schema_fuzz.py` compares with it at random.
"""

import json
from typing import Any

import pytest

from sgl_vllm.fsm.schema import UnsupportedSchemaError, compile_schema
from tests.unit.fsm.texts import accepts

jsonschema = pytest.importorskip("jsonschema")

DRAFT_7 = "http://json-schema.org/draft-07/schema#"
CLOSED = {"properties": {"a": {"type": "integer"}}, "additionalProperties": False}

EXAMPLES: list[tuple[Any, list[str], list[str]]] = [
    # not
    ({"not": {"type": "string"}}, ["1", "null", "{}"], ['"a"']),
    ({"not": {"type": "integer"}}, ["1.5", "true", '"1"'], ["1", "1.0"]),
    ({"not": {"type": ["number", "object"]}}, ["[]", '"a"'], ["1", "{}"]),
    ({"type": "object", "not": {"required": ["a", "b"]}}, ["{}", '{"a": 1}'], ['{"a":1,"b":2}']),
    ({"not": {"required": ["a"]}}, ['{"b": 1}'], ["1", '{"a": 1}']),
    ({"type": "string", "not": {"enum": ["a", "\n"]}}, ['"b"', '"aa"', '""'],
     ['"a"', r'"\n"', r'"\u000a"', r'"\u0061"']),
    ({"type": "string", "not": {"pattern": "^a"}, "minLength": 1}, ['"b"', '"ba"'], ['"a"', '""']),
    ({"type": "string", "pattern": "^[ab]+$", "not": {"const": "ab"}}, ['"a"', '"abb"'],
     ['"ab"', '"c"']),
    ({"type": "string", "not": {"maxLength": 2}}, ['"abc"'], ['"ab"']),
    ({"type": "integer", "not": {"enum": [1, 2.0]}}, ["3", "0", "12"], ["1", "2", "1.0"]),
    ({"type": "number", "not": {"const": -0.5}}, ["0.5", "-0.51"], ["-0.5", "-0.50"]),
    ({"type": "number", "not": {"minimum": 3}}, ["2.9"], ["3"]),
    ({"not": {"const": True}, "type": "boolean"}, ["false"], ["true"]),
    ({"type": "array", "not": {"const": [1, 2]}}, ["[]", "[1]", "[2, 1]", "[1, 2, 3]"], ["[1, 2]"]),
    ({"enum": [[1], [1, 2], "a"], "not": {"enum": [[1.0], "a"]}}, ["[1,2]"], ["[1]", '"a"']),
    ({"type": "object", "not": {"const": {"a": 1}}}, ["{}", '{"a": 2}', '{"a": 1, "b": 2}'],
     ['{"a": 1}']),
    ({"type": "object", "not": {"properties": {"a": {"type": "null"}}}}, ['{"a": 1}'],
     ["{}", '{"a": null}']),
    ({"type": "object", "not": {"additionalProperties": {"type": "null"}}},
     ['{"x": 1}', '{"x": null, "y": 1}'], ["{}", '{"x": null}', '{"x": 1, "x": null}']),
    ({"type": "object", "properties": {"a": True, "b": True}, "additionalProperties": False,
      "not": CLOSED}, ['{"a": "x"}', '{"b": 1}', '{"a": 1, "b": 1}'], ["{}", '{"a": 1}']),
    ({"type": "object", "not": {"patternProperties": {"^x": {"type": "null"}}}},
     ['{"y": 1, "x": 1}'], ["{}", '{"x": null}', '{"y": 1}']),
    ({"type": "object", "not": {"propertyNames": {"maxLength": 1}}}, ['{"ab": 1}'],
     ["{}", '{"a": 1}']),
    ({"type": "array", "not": {"items": {"type": "integer"}}}, ['["a"]', '[1, "a", 2]'],
     ["[]", "[1, 2]"]),
    ({"type": "array", "not": {"contains": {"const": 1}}}, ["[]", "[2, 3]"], ["[1]", "[2, 1]"]),
    ({"not": {"anyOf": [{"type": "string"}, {"minimum": 3}]}}, ["2"], ['"a"', "4", "null"]),
    ({"not": {"allOf": [{"minimum": 1}, {"maximum": 3}]}}, ["0", "4"], ["2", '"a"']),
    ({"not": {"not": {"type": "string"}}}, ['"a"'], ["1"]),
    ({"not": {"oneOf": [{"minimum": 1}, {"maximum": 3}]}}, ["2", '"a"'], ["0", "4"]),
    ({"not": {"if": {"minimum": 1}, "then": {"maximum": 3}, "else": False}}, ["0", "4"],
     ["2", '"a"']),
    ({"type": "string", "not": {"format": "date"}}, ['"2020"', '"2020-02-30"'], ['"2020-02-20"']),
    ({"$ref": "#/$defs/t", "not": {"$ref": "#/$defs/t", "minItems": 1}, "$defs": {"t": {
      "type": "array", "items": {"type": "null"}}}}, ["[]"], ["[null]", "1"]),
    # if
    ({"if": {"type": "string"}, "then": {"maxLength": 1}, "else": {"type": "null"}},
     ['"a"', "null"], ['"ab"', "1"]),
    ({"type": "object", "properties": {"k": {"enum": ["x", "y"]}, "v": True}, "required": ["k"],
      "if": {"properties": {"k": {"const": "x"}}}, "then": {"required": ["v"]}},
     ['{"k": "y"}', '{"k": "x", "v": 1}'], ['{"k": "x"}', "{}"]),
    ({"if": {"minimum": 1}, "then": {"maximum": 3}}, ["0", "3", '"a"'], ["4"]),
    ({"then": {"type": "null"}, "type": "integer"}, ["1"], ["null"]),
    # oneOf
    ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, ["1", "2.5"], ["3", "1.5"]),
    ({"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
     ['{"a": 1}', '{"b": 1}'], ["{}", '{"a": 1, "b": 1}']),
    ({"oneOf": [{"multipleOf": 2}, {"multipleOf": 3}], "type": "integer"}, ["2", "9"], ["6", "5"]),
    ({"oneOf": [{"type": "string"}, {"pattern": "^a"}, {"maxLength": 1}]}, ['"bb"'],
     ['"a"', '"aa"', '"b"', "1"]),
    ({"oneOf": [{"enum": [[1], [2, 4]]}, {"enum": [[1], [1, 2]]}]}, ["[2, 4]", "[1, 2]"],
     ["[1]"]),
    # dependencies
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, ["{}", '{"b": 1}', '{"b": 2, "a": 1}'],
     ['{"a": 1}']),
    ({"dependentSchemas": {"a": {"minProperties": 2}}, "type": "object", "properties": {
      "a": True, "b": True}}, ['{"b": 1}', '{"a": 1, "b": 1}'], ['{"a": 1}']),
    ({"dependencies": {"a": ["b"], "c": {"required": ["a"]}}, "type": "object",
      "$schema": DRAFT_7}, ['{"b": 1, "a": 1}', '{"b": 1}'], ['{"a": 1}', '{"c": 1}']),
    # numbers
    ({"type": "integer", "multipleOf": 3, "minimum": 4}, ["6", "99"], ["3", "7"]),
    ({"type": "number", "multipleOf": 0.25}, ["0.75", "-1.50", "3", "0.2500"], ["0.3", "0.125"]),
    ({"type": "number", "multipleOf": 1e-8}, ["12391239123", "0.00000001"], ["0.000000001"]),
    ({"allOf": [{"multipleOf": 2}, {"multipleOf": 5}], "type": "integer"}, ["20", "-10"], ["4"]),
    # contains
    ({"type": "array", "contains": {"type": "integer"}}, ['["a", 1]', "[1, 2]"], ["[]", '["a"]']),
    ({"type": "array", "contains": {"const": 1}, "minContains": 2, "maxContains": 2},
     ["[1, 1]", "[1, 0, 1]"], ["[1]", "[1, 1, 1]"]),
    ({"type": "array", "contains": {"const": 1}, "maxItems": 2, "items": {"minimum": 0}},
     ["[0, 1]"], ["[0, 0]", "[-1, 1]", "[0, 0, 1]"]),
    ({"type": "array", "contains": {"const": 1}, "minContains": 0}, ["[]", "[2]"], ["1"]),
    ({"type": "array", "allOf": [{"contains": {"minimum": 5}}, {"contains": {"maximum": 1}}]},
     ["[0, 6]", "[6, 3, 0]"], ["[6]", "[0]", "[3]"]),
    # uniqueItems
    ({"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True},
     ["[]", '["a"]', '["b", "a"]'], ['["a", "a"]', '["a", "b", "a"]']),
    ({"type": "array", "items": {"type": ["boolean", "null"]}, "uniqueItems": True, "minItems": 2},
     ["[true, null]"], ["[true]", "[null, null]"]),
    ({"type": "array", "uniqueItems": True, "maxItems": 1}, ['["a"]'], ["[1, 2]"]),
    # names of members
    ({"type": "object", "propertyNames": {"pattern": "^a", "not": {"const": "ab"}}},
     ['{"a": 1, "ac": 2}', "{}"], ['{"b": 1}', '{"ab": 1}', r'{"\u0061b": 1}']),
    ({"type": "object", "properties": {"a": True, "b": True}, "propertyNames": {"enum": ["a"]}},
     ['{"a": 1}'], ['{"b": 1}', '{"c": 1}']),
    ({"type": "object", "properties": {"a1": {"minimum": 1}}, "patternProperties": {
      "^a": {"maximum": 5}, "1$": {"type": "integer"}}, "additionalProperties": False},
     ['{"a1": 3, "b1": 9, "ab": 1.5}'], ['{"a1": 0}', '{"a1": 1.5}', '{"a21": 1.5}', '{"c": 1}']),
    ({"allOf": [{"patternProperties": {"^a": True}, "additionalProperties": False},
      {"patternProperties": {"b$": {"type": "null"}}}], "type": "object"},
     ['{"a": 1, "ab": null}'], ['{"b": null}', '{"ab": 1}']),
    ({"type": "object", "required": ["ab"], "patternProperties": {"^a": {"type": "null"}}},
     ['{"ab": null}'], ['{"ab": 1}', "{}"]),
    # unevaluated
    ({"type": "object", "allOf": [{"properties": {"a": True}}], "unevaluatedProperties": False},
     ['{"a": 1}', "{}"], ['{"b": 1}']),
    ({"type": "object", "anyOf": [{"properties": {"a": {"const": 1}}, "required": ["a"]},
      {"properties": {"b": {"const": 2}}, "required": ["b"]}], "unevaluatedProperties": False},
     ['{"a": 1}', '{"b": 2}', '{"a": 1, "b": 2}'], ['{"a": 1, "b": 3}', "{}", '{"c": 1}']),
    ({"type": "object", "if": {"required": ["a"]}, "then": {"properties": {"a": True, "b": True}},
      "unevaluatedProperties": {"type": "null"}}, ['{"a": 1, "b": 1}', '{"c": null}'],
     ['{"b": 1}', '{"a": 1, "c": 1}']),
    ({"type": "object", "$ref": "#/$defs/o", "unevaluatedProperties": False, "$defs": {"o": {
      "patternProperties": {"^x": True}}}}, ['{"x1": 1}'], ['{"a": 1}']),
    ({"type": "array", "prefixItems": [True], "unevaluatedItems": False}, ["[1]"], ["[1, 2]"]),
    ({"type": "array", "contains": {"const": 1}, "unevaluatedItems": {"const": 2}}, ["[1, 2, 1]"],
     ["[2]", "[1, 3]"]),
    # references
    ({"$ref": "#here", "$defs": {"x": {"$anchor": "here", "type": "null"}}}, ["null"], ["1"]),
    ({"$id": "http://a.example/root.json", "$ref": "item.json", "$defs": {"x": {
      "$id": "item.json", "type": "null"}}}, ["null"], ["1"]),
    ({"$id": "http://a.example/", "type": "array", "items": {"$ref": "http://a.example/#/$defs/x"},
      "$defs": {"x": {"type": "null"}}}, ["[null]"], ["[1]"]),
    ({"$dynamicRef": "#n", "$defs": {"x": {"$dynamicAnchor": "n", "type": "null"}}}, ["null"],
     ["1"]),
    # branches and types that nothing is valid against are left out
    ({"anyOf": [False, {"allOf": [{"type": "string"}, {"type": "null"}]}, {"const": 1}]}, ["1"],
     ["null"]),
    ({"minLength": 2, "maxLength": 1}, ["1"], ['"a"']),
    ({"type": "object", "properties": {"a": {"minimum": 2, "maximum": 1, "type": "integer"}}},
     ["{}"], ['{"a": 1}']),
    ({"enum": ["a", "bb", 3], "minLength": 2}, ['"bb"', "3"], ['"a"']),
]  # fmt: skip


@pytest.mark.parametrize("schema, legal, illegal", EXAMPLES)
def test_examples(schema, legal, illegal):
    grammar = compile_schema(schema)
    assert [text for text in legal if not accepts(grammar, text)] == []
    assert [text for text in illegal if accepts(grammar, text)] == []


@pytest.mark.parametrize("schema, legal, illegal", EXAMPLES)
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
        ("email", ["a.b--c@d.example"], ["a@xn--b.example", "a..b@c"]),
    ],
)
def test_formats(form, legal, illegal):
    grammar = compile_schema({"type": "string", "format": form})
    assert [text for text in legal if not accepts(grammar, f'"{text}"')] == []
    assert [text for text in illegal if accepts(grammar, f'"{text}"')] == []
