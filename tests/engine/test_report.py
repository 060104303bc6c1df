"""A request that asks is told which bytes of its text were forced."""

from __future__ import annotations

import re
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from sgl_vllm.protocol.request_keys import REPORT
from tests.engine.engine import Ask, Engine
from tests.engine.one_by_one import DROPS_AFTER_STOP

CARD = r'\{"name": "([A-Z][a-z]{2,8})", "age": ([1-9][0-9])\}'
ASKING = {REPORT: 1}


@pytest.fixture(scope="module")
def engine(start) -> Engine:
    return start(plugin={})


def card(engine: Engine, regex: str = CARD, **more: Any) -> Ask:
    options = {"temperature": 0, "max_tokens": 80, "extra_args": ASKING, **more}
    grammar = StructuredOutputsParams(regex=regex)
    prompt = engine.encode("A card: ")
    return Ask(prompt, SamplingParams(structured_outputs=grammar, **options))


def told(engine: Engine, ask: Ask) -> tuple[str, dict[str, Any]]:
    """The text, and what was reported of it."""
    (output,) = engine.run([ask])
    engine.check_nothing_is_left()
    return output.outputs[0].text, output.kv_transfer_params[REPORT]


def pieces(text: str, report: dict[str, Any]) -> list[str]:
    return [text.encode()[start:end].decode() for start, end in report["forced_bytes"]]


def constants(text: str, pattern: str = CARD) -> list[str]:
    """What of the text stands literally in the pattern: what is outside of its groups."""
    match = re.fullmatch(pattern, text)
    assert match is not None
    edges = [0, *(edge for group in range(1, match.re.groups + 1) for edge in match.span(group))]
    return [text[a:b] for a, b in zip(edges[::2], [*edges[1::2], len(text)], strict=True)]


def assert_within_constants(text: str, report: dict[str, Any], pattern: str = CARD) -> None:
    forced = pieces(text, report)
    fixed = constants(text, pattern)
    assert forced
    at = 0
    for piece in forced:
        while piece not in fixed[at]:
            at += 1


def test_what_is_reported_as_forced_stands_in_the_pattern(engine):
    counters = engine.scheduler.parts.jump.counters
    forced_before = counters.forced_tokens
    text, report = told(engine, card(engine))
    assert_within_constants(text, report)
    assert report["forced_tokens"] == counters.forced_tokens - forced_before
    # The model decides only what the pattern leaves open, and where two spellings meet.
    assert sum(map(len, pieces(text, report))) > 0.8 * sum(map(len, constants(text)))


def test_text_that_is_forced_before_the_first_pass_counts(engine):
    text, report = told(engine, card(engine))
    assert pieces(text, report)[0].startswith('{"name":')
    assert report["forced_bytes"][0][0] == 0


def test_bytes_are_those_of_utf_8(engine):
    pattern = "Größe — 日本語: ([0-9]), größer als ([0-9])"
    text, report = told(engine, card(engine, pattern))
    assert_within_constants(text, report, pattern)
    assert any(not piece.isascii() for piece in pieces(text, report))


def test_a_request_that_is_all_forced_is_reported_to_its_end(engine):
    text, report = told(engine, card(engine, r"There is only this one answer to it\."))
    assert "".join(pieces(text, report)) == text


@pytest.mark.skipif(not DROPS_AFTER_STOP, reason="vLLM 0.31: no jumps beside a stop string")
def test_a_stop_string_keeps_the_report(engine):
    text, report = told(engine, card(engine, stop=["age"]))
    assert text.endswith('", "')
    start, end = report["forced_bytes"][-1]
    clipped = text.encode()[start:end].decode()
    assert clipped and text.endswith(clipped)


def test_max_tokens_cuts_the_report(engine):
    text, report = told(engine, card(engine, max_tokens=3))
    assert 0 < report["forced_tokens"] <= 3
    assert "".join(pieces(text, report)) in text
    assert report["forced_bytes"][-1][1] <= len(text.encode())


def test_an_aborted_request_leaves_no_record(engine):
    llm = engine.llm.llm_engine
    ask = card(engine, "([a-z]{200})")
    llm.add_request("aborted", ask.as_prompt, ask.params)
    for _ in range(3):
        llm.step()
    records = engine.scheduler.parts.reports._records
    assert len(records) == 1
    llm.abort_request(["aborted"])
    told(engine, card(engine))
    told(engine, card(engine))
    assert not records


def test_exact_jumps_over_grammars_of_stock_are_reported_too(start):
    engine = start(plugin={"fsm": False, "jump_mode": "exact"})
    before = engine.scheduler.parts.jump.counters.forced_tokens
    pattern = "(é|è): ([0-9])"
    text, report = told(engine, card(engine, pattern))
    assert re.fullmatch(pattern, text)
    assert report["forced_tokens"] == engine.scheduler.parts.jump.counters.forced_tokens - before
    assert all(0 <= start < end <= len(text.encode()) for start, end in report["forced_bytes"])


def test_without_jumps_nothing_is_reported(start):
    engine = start(plugin={"jump_forward": False})
    (output,) = engine.run([card(engine)])
    assert output.kv_transfer_params is None
