"""A part that fails is switched off once, with one clear message."""

from __future__ import annotations

import logging

import pytest

from sgl_vllm.degrade import CircuitBreaker

logger = logging.getLogger("tests.degrade")


def breaker(**changes) -> CircuitBreaker:
    return CircuitBreaker("the cache", "requests run without it", logger, **changes)


def test_a_step_that_works_returns_its_result():
    assert breaker().run(divmod, 7, 3) == (2, 1)


def test_an_error_switches_the_part_off_for_good(caplog: pytest.LogCaptureFixture):
    subject = breaker()
    assert subject.run(divmod, 1, 0) is None
    assert subject.tripped
    assert subject.run(divmod, 7, 3) is None
    [record] = caplog.records
    said = record.getMessage()
    assert said.startswith(
        "sgl-vllm: the cache failed and is switched off: requests run without it"
    )
    assert record.exc_info is not None


def test_a_part_may_fail_a_few_times_before_it_is_switched_off(caplog: pytest.LogCaptureFixture):
    tripped = []
    subject = breaker(max_errors=2, on_trip=lambda: tripped.append(True))
    subject.run(divmod, 1, 0)
    assert not subject.tripped and not tripped
    assert subject.run(divmod, 7, 3) == (2, 1)
    subject.run(divmod, 1, 0)
    assert subject.tripped and tripped == [True]
    assert "2 times" in caplog.records[-1].getMessage()


def test_an_error_while_switching_off_does_not_escape(caplog: pytest.LogCaptureFixture):
    assert breaker(on_trip=lambda: 1 // 0).run(divmod, 1, 0) is None
    assert "the cache failed to switch off" in caplog.records[-1].getMessage()


def test_an_error_that_the_caller_caught_counts_with_its_scope(caplog: pytest.LogCaptureFixture):
    subject = breaker(max_errors=2)
    try:
        raise ValueError("bad")
    except ValueError:
        subject.record("request 7")
    assert subject.num_errors == 1
    assert "the cache failed for request 7" in caplog.records[0].getMessage()


def test_what_is_not_an_error_passes_through():
    with pytest.raises(KeyboardInterrupt):
        breaker().run(_interrupt)


def _interrupt() -> None:
    raise KeyboardInterrupt
