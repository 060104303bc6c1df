"""The longest run that a format can force: never less than what xgrammar says of it."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import xgrammar
from vllm.v1.structured_output.backend_types import StructuredOutputOptions

from sgl_vllm.fsm import run_bound
from sgl_vllm.fsm.vllm.forced_tokens import has_short_runs

NO_TOKENS = xgrammar.TokenizerInfo([bytes([byte]) for byte in range(256)] + [b"<eos>"])
COMPILER = xgrammar.GrammarCompiler(NO_TOKENS, max_threads=1)
ATOMS: list[dict[str, Any]] = [
    {"const": "always the same"},
    {"const": None},
    {"enum": ["Paris in France", "Paris in Texas"]},
    {"type": "integer", "minimum": 100, "maximum": 101},
    {"type": "string", "pattern": "^(ab{4}){3}$"},
    {"type": "boolean"},
]


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """Arrays of a fixed length, and objects, of what is mostly forced."""
    kind = rng.random()
    if depth == 0 or kind < 0.3:
        return rng.choice(ATOMS)
    if kind < 0.65:
        number = rng.randrange(1, 6)
        items = random_schema(rng, depth - 1)
        return {"type": "array", "items": items, "minItems": number, "maxItems": number}
    names = rng.sample(["name", "a longer name", "n"], rng.randrange(1, 4))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth - 1) for name in names},
        "required": names,
        "additionalProperties": False,
    }


def test_no_run_of_a_schema_is_longer() -> None:
    rng, longest = random.Random(0), 0
    for _ in range(200):
        spec = json.dumps(random_schema(rng))
        grammar = COMPILER.compile_json_schema(spec, any_whitespace=False)
        run = xgrammar.GrammarMatcher(grammar).find_jump_forward_string()
        bound = run_bound.of_json(spec)
        assert bound is not None and len(run.encode()) <= bound, spec
        longest = max(longest, len(run))
    assert longest > 500


JSON, REGEX = StructuredOutputOptions.JSON, StructuredOutputOptions.REGEX
TAG = StructuredOutputOptions.STRUCTURAL_TAG


@pytest.mark.parametrize(
    ("kind", "spec", "is_short"),
    [
        (JSON, {"type": "object", "properties": {"age": {"minimum": 3}}}, True),
        (JSON, {"items": {"items": {"const": 1}, "minItems": 30}, "minItems": 30}, True),
        (JSON, {"items": {"items": {"const": 1}, "minItems": 300}, "minItems": 300}, False),
        (JSON, {"minItems": 3.0}, False),
        (JSON, {"properties": {"next": {"$ref": "#"}}, "required": ["next"]}, False),
        (JSON, {"patternProperties": {"^x{900}y{900}$": True}}, False),
        (JSON, {"const": "x" * 70_000}, False),
        (StructuredOutputOptions.JSON_OBJECT, "", True),
        (REGEX, "(a{1000}){1000}", False),
        (REGEX, "[ab]{3,1000000}", True),
        (REGEX, f"a{{{'9' * 5000}}}", False),
        (StructuredOutputOptions.GRAMMAR, 'root ::= "a" root', False),
        (
            StructuredOutputOptions.STRUCTURAL_TAG,
            {"format": {"type": "grammar", "grammar": ""}},
            False,
        ),
        (TAG, {"format": {"type": "any_text"}}, True),
        (JSON, "no JSON", False),
        (JSON, "[" * 60_000, False),
    ],
)
def test_which_formats_have_short_runs(
    kind: StructuredOutputOptions, spec: Any, is_short: bool
) -> None:
    assert has_short_runs(kind, spec if isinstance(spec, str) else json.dumps(spec)) is is_short
