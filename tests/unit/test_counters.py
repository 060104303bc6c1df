"""Counters: what a declaration says, and how the numbers of several engines become one."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_vllm.counters import counter, gauge, merge, timer_count, timer_sum


@dataclass(slots=True)
class Example:
    served: int = counter("Requests served.", unit="requests")
    errors: int = counter("Errors.", unit="errors", metric="serve_errors")
    waiting: int = gauge("Requests that wait.", unit="requests")
    num_timed: int = timer_count("Serving a request.", metric="serve_seconds")
    timed_s: float = timer_sum("Total.", metric="serve_seconds")
    by_disk: int = counter("From disk.", unit="tokens", metric="read", labels={"tier": "disk"})
    internal: int = counter("Not exported.", unit="times", metric=None)
    block_size: int = 16


def test_engines_are_added_up_but_for_constants() -> None:
    merged = merge([Example(served=1, waiting=2, timed_s=0.5), Example(served=10, block_size=32)])
    assert (merged.served, merged.waiting, merged.timed_s) == (11, 2, 0.5)
    assert merged.block_size == 16
