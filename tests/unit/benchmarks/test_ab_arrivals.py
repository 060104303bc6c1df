"""The time to equally many tokens: what it is of one answer, and how two servers compare."""

from __future__ import annotations

import pytest

from benchmarks.ab.arrivals import Arrival, first_tokens

ONE_BY_ONE = Arrival(first_s=1.0, first_tokens=1, last_s=3.0, num_tokens=11)
AT_ONCE = Arrival(first_s=2.0, first_tokens=6, last_s=3.0, num_tokens=11)


@pytest.mark.parametrize(
    ("arrival", "num_tokens", "seconds"),
    [
        (ONE_BY_ONE, 1, 1.0),
        (ONE_BY_ONE, 6, 2.0),
        (ONE_BY_ONE, 11, 3.0),
        (ONE_BY_ONE, 50, 3.0),  # it has no more
        (AT_ONCE, 1, 2.0),
        (AT_ONCE, 6, 2.0),
        (AT_ONCE, 7, 2.2),
        (Arrival(2.0, 6, 2.0, 6), 9, 2.0),
    ],
)
def test_tokens_after_the_first_message_arrive_evenly(
    arrival: Arrival, num_tokens: int, seconds: float
) -> None:
    assert arrival.seconds_to(num_tokens) == pytest.approx(seconds)


def test_both_servers_are_timed_to_as_many_tokens_as_the_plugin_sends_first() -> None:
    slower = Arrival(first_s=4.0, first_tokens=6, last_s=5.0, num_tokens=11)
    short = Arrival(first_s=0.5, first_tokens=1, last_s=0.6, num_tokens=2)
    usual = [AT_ONCE, AT_ONCE, short]
    found = first_tokens([[ONE_BY_ONE] * 3] * 3, [usual, [slower] * 3, usual])
    assert found is not None
    assert found["tokens"] == 6
    assert found["arms"] == {key: {"p50": 2.0, "p99": 2.0} for key in ("stock", "sgl")}
    assert found["ratio"] == {"p50": 1.0, "p99": 1.0}
    assert [one["p50"] for one in found["ratio_of_rounds"]] == [1.0, 0.5, 1.0]


def test_where_nothing_is_forced_at_first_there_is_nothing_to_compare() -> None:
    assert first_tokens([[ONE_BY_ONE]], [[ONE_BY_ONE]]) is None
    assert first_tokens([[ONE_BY_ONE]], [[]]) is first_tokens([[]], [[AT_ONCE]]) is None
