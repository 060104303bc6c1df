"""How long tools take: known after four calls, of the last 16, of the 512 latest tools."""

from __future__ import annotations

from sgl_vllm.lang.prefill_ahead import ToolTimes


def times_of(*seconds: float) -> ToolTimes:
    times = ToolTimes()
    for one in seconds:
        times.took("search", one)
    return times


def test_three_calls_tell_nothing():
    assert times_of(1, 1, 1).soonest_s("search") is None
    assert times_of(1, 1, 1, 1).soonest_s("search") == 1
    assert times_of(1, 1, 1, 1).soonest_s("another") is None


def test_three_in_four_calls_take_at_least_as_long():
    assert times_of(4, 1, 3, 2).soonest_s("search") == 2
    assert times_of(*range(1, 17)).soonest_s("search") == 5


def test_only_the_last_calls_count():
    assert times_of(*[100] * 50, *[1] * 16).soonest_s("search") == 1


def test_the_tool_that_was_not_called_for_longest_is_forgotten():
    times = times_of(1, 1, 1, 1)
    for number in range(511):
        times.took(f"tool {number}", 1)
    assert times.soonest_s("search") == 1
    times.took("one more", 1)
    assert times.soonest_s("search") is None
