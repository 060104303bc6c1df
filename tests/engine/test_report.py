"""A request that asks is told which bytes of its text were forced, and where its prompt left the
cache."""

from __future__ import annotations

import re
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from sgl_vllm.protocol.request_keys import REPORT
from tests.engine.engine import Ask, Engine, greedy, words
from tests.engine.one_by_one import DROPS_AFTER_STOP

CARD = r'\{"name": "([A-Z][a-z]{2,8})", "age": ([1-9][0-9])\}'
ASKING = {REPORT: 1}


@pytest.fixture(scope="module")
def engine(start) -> Engine:
    started: Engine = start({"tree_text": True})
    return started


def card(engine: Engine, regex: str = CARD, **more: Any) -> Ask:
    options = {"temperature": 0, "max_tokens": 80, "extra_args": ASKING, **more}
    grammar = StructuredOutputsParams(regex=regex)
    prompt = engine.encode("A card: ")
    return Ask(prompt, SamplingParams(structured_outputs=grammar, **options))


def told(engine: Engine, ask: Ask) -> tuple[str, dict[str, Any]]:
    """The text, and what was reported of it."""
    counters = engine.scheduler.parts.jump.counters
    before = counters.forced_tokens
    (output,) = engine.run([ask])
    engine.check_nothing_is_left()
    report = output.kv_transfer_params[REPORT]
    assert report["forced_tokens"] == counters.forced_tokens - before
    return output.outputs[0].text, report


def pieces(text: str, report: dict[str, Any]) -> list[str]:
    return [text.encode()[start:end].decode() for start, end in report["forced_bytes"]]


def constants(text: str, pattern: str) -> list[str]:
    """What of the text stands literally in the pattern: what is outside of its groups."""
    match = re.fullmatch(pattern, text)
    assert match is not None
    edges = [0, *(edge for group in range(1, match.re.groups + 1) for edge in match.span(group))]
    return [text[a:b] for a, b in zip(edges[::2], [*edges[1::2], len(text)], strict=True)]


@pytest.mark.parametrize(
    "pattern",
    [CARD, "Größe — 日本語: ([0-9]), größer als ([0-9])", r"There is only this one answer to it\."],
    ids=["card", "bytes of UTF-8", "all forced"],
)
def test_what_is_reported_as_forced_stands_in_the_pattern(engine, pattern):
    text, report = told(engine, card(engine, pattern))
    forced, fixed = pieces(text, report), constants(text, pattern)
    assert report["forced_bytes"][0][0] == 0, "text that is forced before the first pass counts"
    at = 0
    for piece in forced:
        while piece not in fixed[at]:
            at += 1
    # The model decides only what the pattern leaves open, and where two spellings meet.
    assert sum(map(len, forced)) > 0.8 * sum(map(len, fixed))


def test_a_report_ends_with_the_text(engine):
    if DROPS_AFTER_STOP:  # vLLM 0.31 does not jump beside a stop string
        text, report = told(engine, card(engine, stop=["age"]))
        assert text.endswith('", "')
        start, end = report["forced_bytes"][-1]
        clipped = text.encode()[start:end].decode()
        assert clipped and text.endswith(clipped)
    text, report = told(engine, card(engine, max_tokens=3))
    assert 0 < report["forced_tokens"] <= 3
    assert "".join(pieces(text, report)) in text
    assert report["forced_bytes"][-1][1] <= len(text.encode())


def test_an_aborted_request_leaves_no_record(engine):
    ask = card(engine, "([a-z]{200})")
    engine.begin("aborted", ask.prompt, ask.params, num_steps=3)
    records = engine.scheduler.parts.reports._records
    assert len(records) == 1
    engine.llm.llm_engine.abort_request(["aborted"])
    for _ in range(2):
        engine.run([card(engine)])
    assert not records


def test_a_report_says_where_its_prompt_left_the_cache(engine):
    """That includes a request with text forced at its start, which enters before its prompt is
    computed."""
    first = words(100)
    engine.run([Ask(first, greedy(1))])
    grammar = StructuredOutputsParams(regex=CARD)
    params = greedy(20, structured_outputs=grammar, extra_args=ASKING)
    prompt = [*first[:60], *words(30, seed=2)]
    (result,) = engine.run([Ask(prompt, params)])
    report = result.kv_transfer_params[REPORT]
    assert report["forced_tokens"] > 0
    assert report["cache"]["causes"] == [{"cause": "differs", "start": 60, "end": 90}]
    (answer,) = engine.scheduler.sgl_vllm.why(result.request_id)
    assert answer["prompt"]["tokens"] == prompt[60:76]
    assert answer["cached"]["tokens"] == first[60:76]
    engine.check_nothing_is_left()
