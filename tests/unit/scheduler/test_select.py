"""Requests that ask for scores of the end of their prompt."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from sgl_vllm.scheduler import select


def cache(*, keeps_logprobs: bool = True) -> Any:
    """The part of a cache that counts here."""
    return SimpleNamespace(first_scored={}, wanted_rows={}, keeps_logprobs=keeps_logprobs)


def request(name: str, score_from: Any) -> Request:
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    params.extra_args = {"sgl_score_from": score_from}
    return Request(name, [1, 2, 3, 4], params, None)


@pytest.fixture
def log() -> Iterator[list[str]]:
    """The lines of the part's logger, which belongs to vLLM's."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    select.logger.addHandler(handler)
    yield lines
    select.logger.removeHandler(handler)


@pytest.mark.parametrize(
    "value", [0, 5, -1, True, 2.5, None, "x" * 1_000_000, [7] * 100_000, {"x": "x" * 1000}]
)
def test_a_value_that_is_no_index_is_one_short_line_in_the_log(value, log) -> None:
    radix = cache(keeps_logprobs=False)
    asked = request("\n\x1b" * 1_000_000, value)
    select.ScoredRequests(radix).expect(asked)
    assert not radix.first_scored
    assert asked.skip_reading_prefix_cache
    assert len(log) == (value is not None)
    assert not any(len(line) > 700 or "xxx" in line or not line.isprintable() for line in log)


def test_a_valid_index_lets_the_request_read_the_cache() -> None:
    radix = cache()
    asked = request("a", 4)
    select.ScoredRequests(radix).expect(asked)
    assert radix.first_scored == {asked: 4}
    assert not asked.skip_reading_prefix_cache
