"""Random JSON schemas -> expressions, compared with the `jsonschema` package."""

import json
import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_vllm.fsm.automaton import Automaton
from sgl_vllm.fsm.schema import (
    compile_schema,
)
from tests.effort import examples
from tests.unit.fsm.texts import accepts, random_walk

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


# -- random schemas, each with random instances ------------------------------------------------


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
        order = draw(st.permutations(taken)) if len(taken) < len(names) else names
        value = {name: draw(members[name][1]) for name in order}
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


@settings(max_examples=examples(20), deadline=None)
@given(st.data())
def test_valid_values_are_accepted_however_they_are_spaced(data):
    schema, instances = data.draw(schemas)
    loose, tight = automaton(schema), automaton(schema, whitespace="compact")
    spaced, follows = automaton(schema, whitespace="spaced"), automaton(schema, whitespace="follow")
    for _ in range(3):
        instance = data.draw(instances)
        assert is_valid(instance, schema)
        if "e" in re.sub(r'"(\\.|[^"])*"|true|false', "", dumps(instance)):
            continue  # a number with an exponent is not within bounds
        *named, _ = texts = [dumps(instance, **style) for style in STYLES]
        for text in texts:
            assert accepts(loose, text), text
            assert accepts(tight, text) == (text == texts[1]), text
            assert accepts(spaced, text) == (text == texts[2]), text
            assert accepts(follows, text) == (text in named), text


@settings(max_examples=examples(15), deadline=None)
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


# -- references to itself, and the two readings ------------------------------------------------


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
