"""Counters: what a declaration says, and how the numbers of several engines become one."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_vllm.counters import counter, gauge, highest, merge, timer_count, timer_sum


@dataclass(slots=True)
class Example:
    served: int = counter("Requests served.", unit="requests")
    errors: int = counter("Errors.", unit="errors", metric="serve_errors")
    waiting: int = gauge("Requests that wait.", unit="requests")
    num_timed: int = timer_count("Serving a request.", metric="serve_seconds")
    timed_s: float = timer_sum("Total.", metric="serve_seconds")
    by_disk: int = counter("From disk.", unit="tokens", metric="read", labels={"tier": "disk"})
    internal: int = counter("Not exported.", unit="times", metric=None)
    waited_s: float = highest("For how long.", unit="s")
    block_size: int = 16


def test_engines_are_added_up_but_for_times_and_constants() -> None:
    engines = [Example(served=1, waiting=2, timed_s=0.5, waited_s=1.0), Example(10, waited_s=3.0)]
    merged = merge([*engines, Example(waited_s=2.0, block_size=32)])
    assert (merged.served, merged.waiting, merged.timed_s, merged.waited_s) == (11, 2, 0.5, 3.0)
    assert merged.block_size == 16
