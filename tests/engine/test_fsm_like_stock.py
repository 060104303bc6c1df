"""Our automata say the same as stock's default backend, bit for bit, and where not, why.

Both backends are asked through vLLM's interface, over the demo's vocabulary. Only the tests at the
end need a model.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output.backend_types import StructuredOutputOptions as Options

from sgl_vllm.fsm.vllm.backend import SglBackend
from sgl_vllm.fsm.vllm.formats import COMPACT_HAS_NO_SPACES
from sgl_vllm.fsm.vllm.grammar import SglGrammar
from tests.effort import examples
from tests.engine.engine import Ask, Engine
from tests.engine.fsm_backends import OBJECT, backend, bits, walk_beside_stock
from tests.unit.fsm.user_grammars import GRAMMARS, LARK, NOT_OURS


@pytest.fixture(scope="module")
def ours() -> Iterator[SglBackend]:
    made = backend()
    yield made
    made.destroy()


@pytest.fixture(scope="module")
def compact_ours() -> Iterator[SglBackend]:
    if not COMPACT_HAS_NO_SPACES:
        pytest.skip("left to vLLM's backends")
    made = backend(compact=True)
    yield made
    made.destroy()


UNTYPED = [{"type": "object"}, {"type": "array", "items": {}}, {"properties": {"any": {}}}]
SCHEMAS = [
    *UNTYPED,
    OBJECT,
    {"type": "array", "items": OBJECT},
    {"type": "array", "items": {"type": "integer"}, "minItems": 2},
    {"anyOf": [{"type": "null"}, {"const": "x"}, OBJECT]},
    {"properties": {"a": {"type": "string"}, "b": {"type": "null"}}},
    {"type": "string", "enum": ["a", None]},
    {"type": "object", "required": ["a"]},
    {"type": "object", "required": []},
    {"type": "array", "items": {"type": "object", "required": ["a"]}},
    {"type": "object", "required": ["a"], "additionalProperties": {"type": "integer"}},
    {"const": "\x7f"},
    {"properties": {"\x7f": {"enum": ["\x7f", 1]}}},
    {"type": "string", "pattern": r"^a\s[^\s]$"},
    {"type": ["integer", "string"], "enum": ["a", 1, True, [1], {"a": 2.0}]},
    {"type": "integer", "const": "a"},
    {"const": 2.0},
    {"enum": [0.1, 1e3, -0.0, 10**20, 2**53 + 1]},
    {"enum": ["a", "b"], "const": "b"},
    {"enum": ["a", 5], "minLength": 3},
    {"$ref": "#/$defs/x", "enum": ["a", 1], "$defs": {"x": {"type": "boolean"}}},
    {
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {"left": {"$ref": "#/$defs/tree"}, "right": {"$ref": "#/$defs/tree"}},
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/tree",
    },
]


NUMBER = {"type": "number", "minimum": -1.5, "exclusiveMaximum": 20}
MORE: list[dict[str, Any]] = [
    {"type": "string", "pattern": "^[a-z]{2}-[^0-9]+x$"},
    {"type": "string", "pattern": 'say "(a|é)+"'},
    *({"type": "string", "format": name} for name in ("date", "date-time", "uuid", "ipv4", "uri")),
    {"type": "integer", "minimum": 7, "maximum": 1203},
    NUMBER,
    {"type": ["string", "integer", "null"], "minimum": 3},
    {"type": ["string", "integer"], "minLength": 1, "maxLength": 6},
    {"type": ["array", "string"], "items": NUMBER, "maxItems": 40, "minItems": 1},
    {"oneOf": [{"const": 1}, {"type": "string", "pattern": "a+"}, {"type": "boolean"}]},
    {"type": "object", "additionalProperties": {"type": "integer", "minimum": 0}},
    {"type": "object", "properties": {"a": {}, "ab": {}}, "additionalProperties": True},
    {"type": "object", "patternProperties": {"^x-[a-z]+$": {"type": "null"}}},
    {"type": "object", "properties": {"a": {"type": "null"}}, "minProperties": 1},
    {"type": "string", "maxLength": 5},
    {"type": "string", "minLength": 2},
    {"type": "array", "items": {"type": ["null", "string"]}, "maxItems": 20000},
    {"type": "array", "prefixItems": [{"const": "x"}, NUMBER], "items": {"type": "boolean"}},
    {"allOf": [{"type": "object", "properties": {"n": NUMBER}, "required": ["n"]}]},
    {
        "$defs": {"node": {"properties": {"next": {"$ref": "#/$defs/node"}, "n": NUMBER}}},
        "$ref": "#/$defs/node",
    },
]
ODD_PATTERNS = r"""
(ab*)? (a|a{1,2}) (ca{1,2})? x(a*b)? ((ab)+){0,2} (a|b$)c a^b (^a|b)+ a$b? \Aa\Z [\^a] [\1] \01
\x41b [\u00e9a] é[à-ü]{2,3}\s?\d
"""
"""As xgrammar reads them in a schema, bugs included."""

JSON = [
    *[json.dumps(schema) for schema in (*SCHEMAS, *MORE)],
    *[json.dumps({"type": "string", "pattern": one}) for one in ODD_PATTERNS.split()],
]
COMPACT = [json.dumps(schema) for schema in (*UNTYPED, OBJECT, NUMBER, *MORE[-4:])]
PATTERNS = [
    r"[a-z]+@[a-z]{2,5}\.com",
    r"\d{4}-\d\d-\d\d",
    r"a|ab|abc",
    r"\s*\w+ \S\s*",
    r".{3,9}",
    r'[^"\\]*',
    r"[\u4e00-\u9fff]{2}é?[à-ü]+",
    r"^x.*y$",
    r'\{"a": (true|false), "b": \[(\d(, \d){0,3})?\]\}',
]
SPECS = [
    (Options.JSON_OBJECT, ""),
    *((Options.JSON, schema) for schema in JSON),
    *((Options.REGEX, pattern) for pattern in PATTERNS),
]


def name_of(value: Any) -> str:
    return str(getattr(value, "name", value))[:60]


@pytest.mark.parametrize(("kind", "spec"), SPECS, ids=name_of)
def test_the_masks_are_those_of_stock(kind: Options, spec: str, ours: SglBackend) -> None:
    walk_beside_stock(ours, kind, spec)


@pytest.mark.parametrize("spec", ["", *COMPACT], ids=name_of)
def test_so_are_those_without_whitespace(spec: str, compact_ours: SglBackend) -> None:
    """In compact objects, xgrammar writes a space after a comma (its issue 945)."""
    walk_beside_stock(compact_ours, Options.JSON if spec else Options.JSON_OBJECT, spec)


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """With keywords that xgrammar observes, and that our own compiler of schemas may not know."""
    kind = rng.choice(("string", "number", "object", "array", "several") if depth else ("string",))
    low, length = rng.randint(-20, 20), rng.randint(0, 3)
    bound = rng.choice(({}, {"minimum": low}, {"minimum": low, "maximum": low + 700}))
    if kind == "string":
        patterns = ("^[a-c]+[0-9]{2}$", "(x|yy)*z", r"\w+", "a[^b]")
        return {"type": "string", **rng.choice(({}, {"pattern": rng.choice(patterns)}))}
    if kind == "number":
        return {"type": rng.choice(("number", "integer")), **bound}
    if kind == "array":
        items = random_schema(rng, depth - 1)
        return {"type": "array", "items": items, "minItems": length, "maxItems": length + 2}
    if kind == "several":
        branches = [random_schema(rng, depth - 1) for _ in range(2)]
        types = {"type": ["string", "integer"], **bound}
        return rng.choice(({"anyOf": branches}, {"oneOf": branches}, types))
    names = rng.sample(("a", "ab", "b c", "é"), rng.randint(0, 3))
    others = rng.choice((False, True, random_schema(rng, depth - 1)))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth - 1) for name in names},
        "required": names[:1],
        **rng.choice(({}, {"additionalProperties": others})),
    }


def test_random_schemas(ours: SglBackend) -> None:
    for seed in range(examples(12)):
        walk_beside_stock(ours, Options.JSON, json.dumps(random_schema(random.Random(seed))))


def test_a_long_repetition_allows_no_token_that_stock_refuses(ours: SglBackend) -> None:
    """From 129 times on, stock's masks may allow tokens that stock then refuses. Nothing else
    differs."""
    spec = "root ::= [a-z ]{3,129}"
    grammar = ours.compile_grammar(Options.GRAMMAR, spec)
    stock = ours.xgrammar.compile_grammar(Options.GRAMMAR, spec)
    assert isinstance(grammar, SglGrammar)
    assert bits(ours, grammar) <= bits(ours, stock)
    for token in bits(ours, stock) - bits(ours, grammar):
        assert not ours.xgrammar.compile_grammar(Options.GRAMMAR, spec).accept_tokens("", [token])


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        (Options.GRAMMAR, r'root ::= "\q"'),
        (Options.GRAMMAR, r'root ::= "\u12"'),
        (Options.CHOICE, json.dumps(["\ud83d", "no"])),
    ],
)
def test_what_no_text_can_contain_is_stock_s_to_refuse(
    kind: Options, spec: str, ours: SglBackend
) -> None:
    with pytest.raises(ValueError):
        ours.compile_grammar(kind, spec)
    assert not ours.num_errors


@pytest.mark.parametrize(
    ("kind", "spec", "handed_to"),
    [
        *((Options.GRAMMAR, grammar, "xgrammar") for grammar in NOT_OURS.values()),
        (Options.JSON, '{"type": "integer", "multipleOf": 3}', "guidance"),
    ],
    ids=name_of,
)
def test_what_is_not_read_alike_is_stock_s(
    kind: Options, spec: str, handed_to: str, ours: SglBackend
) -> None:
    before = getattr(ours.counters, handed_to)
    assert not isinstance(ours.compile_grammar(kind, spec), SglGrammar)
    assert getattr(ours.counters, handed_to) == before + 1


def test_the_specification_s_reading_refuses_rather_than_leaves_out() -> None:
    by_spec = backend(by_spec=True)
    bounds = json.dumps({"type": "integer", "minimum": 3, "maximum": 12})
    assert isinstance(by_spec.compile_grammar(Options.JSON, bounds), SglGrammar)
    anything_else = json.dumps({"not": {"type": "string"}})
    assert isinstance(by_spec.compile_grammar(Options.JSON, anything_else), SglGrammar)
    different = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    with pytest.raises(ValueError, match="uniqueItems"):
        by_spec.compile_grammar(Options.JSON, json.dumps(different))


# -- one grammar of one request


def test_validate_leaves_a_grammar_where_it_is_and_rollback_goes_back(ours: SglBackend) -> None:
    grammar = ours.compile_grammar(Options.REGEX, "[0-9]+x")
    tokens = ours.tokenizer.encode("12x", add_special_tokens=False)
    end = ours.resources.end_token
    before = bits(ours, grammar)
    assert grammar.validate_tokens([*tokens, end, 5]) == [*tokens, end]
    assert grammar.validate_tokens([*tokens, -1, -1]) == tokens
    assert bits(ours, grammar) == before and not grammar.is_terminated()
    assert grammar.accept_tokens("", [*tokens, end]) and grammar.is_terminated()
    assert grammar.accept_tokens("", [7]), "what comes after the end is ignored, as in stock"
    grammar.rollback(1)
    assert not grammar.is_terminated() and bits(ours, grammar) == {end}
    grammar.rollback(len(tokens))
    assert bits(ours, grammar) == before
    grammar.accept_tokens("", tokens)
    grammar.reset()
    assert bits(ours, grammar) == before


def test_stop_tokens_end_a_text_only_where_it_may_end(ours: SglBackend) -> None:
    (digit,) = ours.tokenizer.encode("7", add_special_tokens=False)
    stops = {ours.resources.end_token, digit}
    grammar = ours.compile_grammar(Options.REGEX, "x[0-9]*", stops)
    stock = ours.xgrammar.compile_grammar(Options.REGEX, "x[0-9]*", stops)
    assert bits(ours, grammar) == bits(ours, stock) and not bits(ours, grammar) & stops
    assert not grammar.accept_tokens("", [digit])
    (x,) = ours.tokenizer.encode("x", add_special_tokens=False)
    assert grammar.accept_tokens("", [x]) and stock.accept_tokens("", [x])
    assert bits(ours, grammar) == bits(ours, stock) >= stops


def test_the_same_format_is_compiled_once_and_requests_do_not_meet(ours: SglBackend) -> None:
    compiled, cached = ours.counters.ours, ours.counters.ours_cached
    first = ours.compile_grammar(Options.REGEX, "once|only")
    second = ours.compile_grammar(Options.REGEX, "once|only")
    assert (ours.counters.ours, ours.counters.ours_cached) == (compiled + 1, cached + 1)
    untouched = bits(ours, second)
    first.accept_tokens("", ours.tokenizer.encode("on", add_special_tokens=False)[:1])
    assert bits(ours, second) == untouched


def test_a_forecast_beyond_the_allowance_is_that_nothing_is_forced(ours: SglBackend) -> None:
    spec = json.dumps({"anyOf": [{"type": "string", "maxLength": n} for n in range(40, 60)]})
    grammar = ours.compile_grammar(Options.JSON, spec)
    assert isinstance(grammar, SglGrammar)
    grammar._allowance = 1
    assert grammar.likelihood_of_forced() < 0.5 and not grammar.refusal


# -- grammars in an engine

USERS_GRAMMARS = {**GRAMMARS, **{f"Lark, {name}": grammar for name, grammar in LARK.items()}}


def ask_for(engine: Engine, name: str) -> Ask:
    grammar = StructuredOutputsParams(grammar=USERS_GRAMMARS[name])
    params = SamplingParams(temperature=0, max_tokens=60, structured_outputs=grammar)
    return Ask(engine.encode("An example: "), params)


def test_an_engine_answers_grammars_as_stock_does(start: Any) -> None:
    stock: Engine = start()
    want = stock.tokens([ask_for(stock, name) for name in USERS_GRAMMARS])
    engine: Engine = start(plugin={"jump_mode": "exact"})
    assert engine.tokens([ask_for(engine, name) for name in USERS_GRAMMARS]) == want
    engine.check_nothing_is_left()
    stats = engine.scheduler.sgl_vllm.stats()
    assert stats.fsm.ours == len(USERS_GRAMMARS) and stats.fsm.xgrammar == 0
    assert stats.jump_forward.forced_tokens > 0 and stats.jump_forward.errors == 0
