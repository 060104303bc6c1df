"""Thousands of formats in a row: memory stays bounded, and a format that fails, fails alone."""

from __future__ import annotations

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output.backend_types import StructuredOutputOptions as Options

from sgl_vllm.fsm import automaton
from sgl_vllm.fsm.vllm.backend import SglBackend
from sgl_vllm.fsm.warm_up import compile_loops
from tests.effort import examples
from tests.engine.engine import Ask
from tests.engine.fsm_backends import backend, bits

NUM_FORMATS = examples(600)
NUM_WARM = 250
STEPS = 8
MAX_GROWTH_BYTES = 200 << 20
PAGE_BYTES = 4096


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    kind = rng.choice(["object", "array", "enum", "string", "integer", "anyOf"][2 * (depth > 2) :])
    if kind == "object":
        names = [f"p{rng.randrange(1000)}" for _ in range(rng.randint(1, 5))]
        required = [name for name in dict.fromkeys(names) if rng.random() < 0.5]
        properties = {name: schema(rng, depth + 1) for name in names}
        return {"type": kind, "properties": properties, "required": required}
    if kind == "array":
        return {"type": kind, "items": schema(rng, depth + 1), "minItems": rng.randint(0, 4)}
    if kind == "enum":
        return {"enum": [rng.randrange(10**6) for _ in range(rng.randint(1, 20))]}
    if kind == "string":
        return {"type": kind, "maxLength": rng.randint(1, 1000)}
    if kind == "integer":
        return {"type": kind, "minimum": rng.randint(-999, 0), "maximum": rng.randint(1, 10**6)}
    return {"anyOf": [schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]}


def pattern(rng: random.Random, depth: int = 0) -> str:
    kind = rng.randrange(2 if depth > 1 else 5)
    if kind == 0:
        return "".join(rng.choices("abcdefé日 0123", k=rng.randint(1, 8)))
    if kind == 1:
        return rng.choice([r"\d", r"\w", "[^x]", "[a-f]", "."])
    if kind == 2:
        return "".join(pattern(rng, depth + 1) for _ in range(rng.randint(2, 4)))
    if kind == 3:
        return "(" + "|".join(pattern(rng, depth + 1) for _ in range(rng.randint(2, 4))) + ")"
    bounds = rng.choice(["*", "+", "?", f"{{{rng.randint(0, 3)},{rng.randint(3, 9)}}}"])
    return f"({pattern(rng, depth + 1)}){bounds}"


def walk(ours: SglBackend, kind: Options, spec: str, rng: random.Random) -> None:
    grammar = ours.compile_grammar(kind, spec)
    for _ in range(STEPS):
        legal = sorted(bits(ours, grammar))
        assert legal, f"nothing may come next in {spec}"
        assert grammar.accept_tokens("", [rng.choice(legal)])
        if grammar.is_terminated():
            break


@pytest.mark.parametrize(
    ("kind", "spec"),
    [(Options.JSON, lambda rng: json.dumps(schema(rng))), (Options.REGEX, pattern)],
    ids=["schemas", "patterns"],
)
def test_memory_is_bounded_over_many_formats(kind, spec):
    ours = backend(by_spec=True)
    rng = random.Random(0)
    before = 0
    for number in range(NUM_FORMATS):
        if number == NUM_WARM:
            before = resident_bytes()
        walk(ours, kind, spec(rng), rng)
    assert resident_bytes() - before < MAX_GROWTH_BYTES
    assert ours.counters.errors == 0
    assert ours.counters.ours + ours.counters.ours_cached > 0.8 * NUM_FORMATS


def wide_schema(number: int) -> str:
    """226 kB: a state of 3,900 alternatives after each character. Another one for each number."""
    longest = 5_000 + 10_000 * number
    strings = [
        {"type": "string", "minLength": 4_000, "maxLength": longest + n} for n in range(3_900)
    ]
    return json.dumps({"anyOf": strings})


@pytest.mark.parametrize(
    "schema", [{"type": "integer"}, {"type": "string", "pattern": "(?=a)"}, {"format": "regex"}]
)
def test_requests_with_one_format_count_one_compilation(schema: dict[str, Any]) -> None:
    compile_loops()  # they must not count for the limits
    spec = json.dumps(schema)
    asked = backend(by_spec=True)

    def compile_it(number: int) -> bool:
        try:
            asked.compile_grammar(Options.JSON, spec)
        except ValueError:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        compiled = list(threads.map(compile_it, range(24)))
    assert len(set(compiled)) == 1
    assert asked.counters.compilations == 1
    asked.forget()
    compile_it(0)
    assert asked.counters.compilations == 1
    asked.destroy()


def test_a_schema_of_thousands_of_alternatives_costs_little_before_it_fails() -> None:
    ours = backend(by_spec=True)
    ours.compile_grammar(Options.JSON, '{"type": "string"}')
    other = ours.compile_grammar(Options.JSON, '{"type": "integer"}')
    row = ours.allocate_token_bitmask(1)
    for number in range(4):
        grammar = ours.compile_grammar(Options.JSON, wide_schema(number))
        before, began = resident_bytes(), time.thread_time()
        num_accepted = 0
        for token in ours.resources.forced_tokenizer.run([], '"' + "a b c d e f g " * 10).tokens:
            grammar.fill_bitmask(row, 0)
            if not grammar.accept_tokens("", [token]):
                break
            num_accepted += 1
        assert 0 < num_accepted < 20
        assert not bits(ours, grammar) - grammar.stops  # only the end is offered, and refused
        assert time.thread_time() - began < 2.0
        assert resident_bytes() - before < 40 << 20
    assert bits(ours, other)
    assert ours.counters.errors == 0


# -- too complex only when it runs

PATTERNS = [{"type": "string", "pattern": f"^[a-z]*{n}$"} for n in range(30)]
WIDE = {"type": "array", "items": {"anyOf": PATTERNS}}


def test_a_format_that_grows_too_complex_fails_alone(start, monkeypatch):
    """More requests than errors are allowed for: none of our parts is switched off by them."""
    engine = start({})
    monkeypatch.setattr(automaton, "MAX_THREADS", 20)

    def ask(structured: dict[str, Any] | None) -> Ask:
        params = SamplingParams(max_tokens=12, temperature=0)
        if structured is not None:
            params.structured_outputs = StructuredOutputsParams(**structured)
        return Ask(engine.encode("A list: "), params)

    wide = [ask({"json": {**WIDE, "minItems": n}}) for n in range(1, 12)]
    answers = engine.tokens([ask(None), *wide, ask({"choice": ["yes"]})])
    assert [reason for _, reason in answers] == ["length", *["error"] * len(wide), "stop"]
    assert engine.scheduler.sgl_vllm.stats().jump_forward.errors == 0
    assert engine.scheduler.sgl_vllm.stats().fsm.errors == 0
    engine.check_nothing_is_left()
