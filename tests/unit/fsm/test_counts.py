"""Counts that are refused before any compiler sees the format."""

from __future__ import annotations

import time

import pytest

from sgl_vllm.fsm.counts import CountLimitError, check_pattern, check_schema

TEN = {"type": "array", "maxItems": 10_000}


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "array", "minItems": 60_000_000}, "minItems is 60,000,000; at most 100,000"),
        ({"minItems": 10**400}, "minItems is a number of 401 digits"),
        ({"maxItems": 1e30}, r"maxItems is 1e\+30; .*leave it out"),
        ({"minLength": 1_000_001}, "minLength is 1,000,001; at most 1,000,000"),
        ({"properties": {"a": {"items": [{"minProperties": 100_001}]}}}, "minProperties"),
        ({"pattern": "^a{1000001}$"}, r"\{1000001\} in the pattern"),
        ({"patternProperties": {"(a{2000}){2000}": {}}}, "4,000,000 repetitions"),
    ],
)
def test_a_count_above_its_bound_is_named(schema, message):
    with pytest.raises(CountLimitError, match=message):
        check_schema(schema)


def test_a_reference_counts_where_it_is_merged_and_only_there():
    plain = {"$ref": "#/$defs/ten"}
    merged = {"allOf": [plain, {"minItems": 1}]}
    check_schema({"$defs": {"ten": TEN}, "properties": {f"p{n}": plain for n in range(100)}})
    with pytest.raises(CountLimitError, match="add up to"):
        check_schema({"$defs": {"ten": TEN}, "properties": {f"p{n}": merged for n in range(100)}})


@pytest.mark.parametrize(
    "schema",
    [
        True,
        None,
        {"type": "string", "maxLength": 2_147_483_647},
        {"properties": {"minItems": {"type": "integer"}}},
        {"enum": [{"minItems": 10**9}], "default": {"minItems": 10**9}},
        {"minItems": "many", "maxItems": True, "minLength": -5, "maxLength": float("nan")},
        {"$ref": "#/nothing/here", "minItems": 1},
    ],
)
def test_what_is_no_count_above_a_bound_is_left_to_others(schema):
    check_schema(schema)


@pytest.mark.parametrize(
    ("pattern", "is_allowed"),
    [
        ("a{1000000}", True),
        ("a{1000001}", False),
        ("((a{100}){100}){100}", True),
        ("((a{100}){100}){101}", False),
        ("(?:x|y{0,2000}z){,1000}(b{3000}){500}", False),
        (r"\{9999999}", True),
        ("[{9999999}]", True),
        ("[^]{9999999}]", True),
        ("a{99999999999999999999999999999999}", False),
    ],
)
def test_repetitions_inside_others_multiply(pattern, is_allowed):
    if is_allowed:
        check_pattern(pattern)
        return
    with pytest.raises(CountLimitError):
        check_pattern(pattern)


@pytest.mark.parametrize("unit", ["[", "(", "{1", "[\\", "(?<", "\\", "[^]", "(a?){2}"])
def test_a_malformed_pattern_takes_no_longer_than_others(unit):
    begun = time.process_time()
    check_pattern(unit * (200_000 // len(unit)) + "{")
    assert time.process_time() - begun < 5
