"""Errors are contained: those that a request can cause switch nothing off."""

from __future__ import annotations

import logging

import pytest

from sgl_vllm.degrade import CircuitBreaker, Guard

logger = logging.getLogger("tests.degrade")


def test_steps_run_after_a_flood_of_errors_which_is_logged_ever_more_seldom(
    caplog: pytest.LogCaptureFixture,
):
    subject = Guard("the cache", "the request runs without it", logger)
    assert [subject.run(divmod, 1, 0) for _ in range(1000)] == [None] * 1000
    assert subject.run(divmod, 7, 3) == (2, 1)
    assert subject.num_errors == 1000
    said = [record.getMessage() for record in caplog.records]
    assert said[0].startswith("sgl-vllm: the cache failed: the request runs without it. Please")
    assert ["(error 512 of this kind)" in line for line in said] == [False] * 9 + [True]
    assert all(record.exc_info for record in caplog.records)


def trip(subject: CircuitBreaker) -> None:
    try:
        raise ValueError("damaged")
    except ValueError:
        subject.trip()


def test_a_breaker_switches_its_part_off_once(caplog: pytest.LogCaptureFixture):
    switched_off: list[bool] = []
    subject = CircuitBreaker("the tree", "none is used", logger, lambda: switched_off.append(True))
    assert not subject.tripped
    for _ in range(3):
        trip(subject)
    assert subject.tripped and switched_off == [True]
    [record] = caplog.records
    assert record.getMessage().startswith(
        "sgl-vllm: the tree failed and is switched off: none is used"
    )
    assert record.exc_info is not None


def test_an_error_while_switching_off_does_not_escape(caplog: pytest.LogCaptureFixture):
    def fail() -> None:
        raise RuntimeError

    trip(CircuitBreaker("the tree", "none is used", logger, fail))
    assert "the tree failed to switch off" in caplog.records[-1].getMessage()
