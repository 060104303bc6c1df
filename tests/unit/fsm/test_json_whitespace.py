"""JSON in one style, of a schema as xgrammar reads it. `test_schema.py` has the other reading."""

import json
import random
from typing import Any

import pytest

from sgl_vllm.fsm.automaton import Automaton
from sgl_vllm.fsm.expressions import Expression
from sgl_vllm.fsm.grammar_compiler import compile_parsed
from sgl_vllm.fsm.json_whitespace import PLACES, styled, with_places
from tests.effort import examples
from tests.unit.fsm.parsed import compile_by, parsed
from tests.unit.fsm.texts import accepts, random_text

STYLES: list[dict[str, Any]] = [{"separators": (",", ":")}, {}]
STYLES += [{"indent": unit} for unit in (1, 2, 3, 4, "\t")]
VALUE = {"a": {"b": {"at": "1999-01-31T10:11:12Z"}, "c": {}}, "d": {"e": 1}}
CHAIN = {"type": "object", "properties": {"a": {"$ref": "#"}, "b": {"enum": [1, "x:, {"]}}}
ANYTHING = {"type": "object"}


def in_style(schema: dict[str, Any], whitespace: str = "follow") -> Expression:
    grammar = parsed("compile_json_schema", json.dumps(schema))
    return styled(compile_parsed(with_places(grammar), PLACES), whitespace)


@pytest.mark.parametrize("style", STYLES, ids=str)
def test_each_style_can_be_followed(style: dict[str, Any]) -> None:
    assert accepts(Automaton(in_style(ANYTHING)), json.dumps(VALUE, **style))


@pytest.mark.parametrize("whitespace", ["compact", "spaced", "follow"])
def test_every_way_through_a_schema_is_in_one_style(whitespace: str) -> None:
    any_whitespace = Automaton(compile_by("compile_json_schema", json.dumps(CHAIN)))
    one_style, rng = Automaton(in_style(CHAIN, whitespace)), random.Random(whitespace)
    styles = {"compact": STYLES[:1], "spaced": STYLES[1:2], "follow": STYLES}[whitespace]
    for _ in range(examples(20)):
        text = (random_text(one_style.start, rng, 5000) or b"{}").decode()
        assert accepts(any_whitespace, text)
        assert text in [json.dumps(json.loads(text), **style) for style in styles]


def test_an_array_in_an_indented_text_may_be_in_one_line() -> None:
    follows = Automaton(in_style(ANYTHING))
    for array in ("[1, [2, {}]]", "[]", "[\n    1,\n    [2, 3]\n  ]"):
        assert accepts(follows, f'{{\n  "a": {array},\n  "b": 1\n}}'), array
    for array in ("[1,2]", "[1,\n    2]", "[\n    1, 2\n  ]", "[ ]"):
        assert not accepts(follows, f'{{\n  "a": {array},\n  "b": 1\n}}'), array
