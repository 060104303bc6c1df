"""What is remembered of formats is bounded in bytes, however long their texts are."""

import gc
import json
import random
import tracemalloc
from collections.abc import Callable

import pytest

from sgl_vllm.fsm import regex, terminal_walks
from sgl_vllm.fsm.automaton import Automaton
from sgl_vllm.fsm.cache import AutomatonCache
from sgl_vllm.fsm.expressions import Expression
from sgl_vllm.fsm.masks import Bitmasks
from sgl_vllm.fsm.schema import compile_schema
from sgl_vllm.fsm.vocabulary import Vocabulary
from tests.effort import some_nightly
from tests.unit.fsm.parsed import compile_by
from tests.unit.fsm.test_json_whitespace import in_style
from tests.unit.fsm.texts import after

LENGTH = 15_000
NUM_FORMATS = 60
MAX_KEPT_BYTES = 400_000
"""Together, the texts of the formats are more than twice as long."""


def text(number: int) -> str:
    return f"{number:06}" + "x" * LENGTH


def every_second(number: int) -> str:
    """Characters of which no two are one range."""
    return "".join(map(chr, range(0x4E00 + number, 0x5400 + number, 2)))


def tag(form: dict) -> Expression:
    tag = {"type": "structural_tag", "format": form}
    return compile_by("compile_structural_tag", json.dumps(tag))


def triggered(triggers: list[str]) -> dict:
    content = {"type": "const_string", "value": "x"}
    tags = [{"type": "tag", "begin": one, "content": content, "end": "y"} for one in triggers]
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


FORMATS: dict[str, Callable[[int], Expression]] = {
    "a constant": lambda i: compile_schema({"const": text(i)}),
    "a name": lambda i: compile_schema(
        {"properties": {text(i): {"type": "null"}}, "additionalProperties": True}
    ),
    "names below not": lambda i: compile_schema({"type": "string", "not": {"enum": [text(i)]}}),
    "a string of a tag": lambda i: tag({"type": "const_string", "value": text(i)}),
    "triggers of a tag": lambda i: tag(triggered([f"<{i:02}{n:02}>" for n in range(20)])),
    "a class of a grammar": lambda i: compile_by(
        "compile_grammar", f"root ::= [a{every_second(i)}]*"
    ),
    "a pattern": lambda i: regex.full_match(text(i)[:1500] + "|[a-z]+").expression,
}


def nested(number: int) -> dict:
    value = {"type": "object", "properties": {f"name {number}": {"$ref": "#"}}}
    return {"type": "array", "items": {"anyOf": [value, {"type": "string", "maxLength": number}]}}


@pytest.mark.parametrize(
    "compiled",
    [
        compile_schema,
        lambda schema: compile_by("compile_json_schema", json.dumps(schema)),
        in_style,
    ],
    ids=["spec", "stock", "in one style"],
)
def test_formats_are_freed_without_a_garbage_collection(compiled):
    """One for many formats at once would stop the engine."""

    def use(numbers: range) -> None:
        cache = AutomatonCache()
        for number in numbers:
            automaton = Automaton(compiled(nested(number)))
            cache.insert(number, automaton)
            state = after(automaton.start, f'[{{"name {number}": [{{}}, "ab')
            assert state is not None and state.forced()
        cache.clear()

    use(range(10, 13))
    gc.collect()
    gc.disable()
    try:
        before = len(gc.get_objects())
        use(range(13, 63))
        assert len(gc.get_objects()) < before + 500
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "name",
    some_nightly(FORMATS, ["a constant", "a string of a tag"]),
)
def test_a_format_is_forgotten_with_its_automaton(name, monkeypatch):
    monkeypatch.setattr(terminal_walks, "_MAX_BYTES", MAX_KEPT_BYTES // 4)
    monkeypatch.setattr("sgl_vllm.fsm.nfa.MAX_CACHED_BYTES", MAX_KEPT_BYTES // 4)
    pieces = [bytes([byte]) for byte in range(256)] + [b"xx", b'"0', b"000", b'{"']
    masks = Bitmasks(Vocabulary(pieces, len(pieces)))

    def use(number: int) -> None:
        state = Automaton(FORMATS[name](number)).start
        rng = random.Random(number)
        for _ in range(20):
            masks.of(state)
            legal = [byte for byte in range(256) if state.first >> byte & 1]
            following = state.step(rng.choice([byte for byte in legal if byte != 0x22] or legal))
            if following is None or not following.first:
                break
            state = following

    for number in range(3):
        use(number)
    gc.collect()
    tracemalloc.start()
    for number in range(3, NUM_FORMATS):
        use(number)
    gc.collect()
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < MAX_KEPT_BYTES
