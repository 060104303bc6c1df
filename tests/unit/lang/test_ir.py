"""Building expressions."""

from __future__ import annotations

import json
import re

import pytest

import sgl_vllm as sgl
from sgl_vllm.lang.ir import Gen, Select, Text, parts_of
from sgl_vllm.lang.sampling import DEFAULT_SAMPLING, Sampling


def test_strings_and_expressions_concatenate_in_order():
    expr = "a" + sgl.gen("x") + "b" + sgl.select("y", ["c"])
    kinds = [type(part) for part in parts_of(expr)]
    assert kinds == [Text, Gen, Text, Select]


def test_a_turn_wraps_its_content():
    assert [str(part) for part in parts_of(sgl.user("hi"))] == [
        "user_begin",
        "text 'hi'",
        "user_end",
    ]


def test_only_strings_and_expressions_can_be_appended():
    with pytest.raises(TypeError, match="not int"):
        parts_of(7)


def test_choices_make_a_gen_a_select():
    assert isinstance(sgl.gen("x", choices=["a", "b"]), Select)


def test_a_gen_has_at_most_one_constraint():
    with pytest.raises(ValueError, match="only one of dtype and regex"):
        sgl.gen("x", dtype=int, regex="a")


@pytest.mark.parametrize("choices", [None, [], "yes", ["a", ""], ["a", 1]])
def test_a_select_needs_choices_that_are_non_empty_strings(choices):
    with pytest.raises(ValueError):
        sgl.select("x", choices)


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match="int, float, str or bool"):
        sgl.gen("x", dtype=dict)


@pytest.mark.parametrize(
    ("dtype", "text", "value"),
    [
        (int, "-17", -17),
        ("int", "0", 0),
        (float, "2.50", 2.5),
        (bool, "False", False),
        (str, '"say \\"hi\\""', 'say "hi"'),
    ],
)
def test_a_dtype_is_a_regex_and_a_reader_that_fit_each_other(dtype, text, value):
    expr = sgl.gen("x", dtype=dtype)
    assert isinstance(expr, Gen) and expr.constraint is not None and expr.parse is not None
    assert re.fullmatch(expr.constraint.text, text)
    assert expr.parse(text) == value


@pytest.mark.parametrize("text", ["007", "+1", "1.5", "", "--1", "1" * 30])
def test_the_int_regex_holds_to_one_bounded_form(text):
    constraint = sgl.gen_int("x").constraint
    assert constraint is not None and not re.fullmatch(constraint.text, text)


def test_a_json_schema_may_be_a_dict_or_its_json():
    schema = {"type": "object"}
    for form in (schema, json.dumps(schema)):
        expr = sgl.gen("x", json_schema=form)
        assert isinstance(expr, Gen) and expr.constraint is not None
        assert expr.constraint.value == schema


def test_none_inherits_and_anything_else_overrides():
    merged = Sampling(temperature=0.0, stop=("a",)).over(DEFAULT_SAMPLING)
    assert merged.temperature == 0.0
    assert merged.stop == ("a",)
    assert merged.max_new_tokens == 128
    assert merged.top_k == -1
