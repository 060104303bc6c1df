"""What the engines of a test run did, for the line at its end.

Owns the sum over the engines of this process. Does not own the counters, which are the plugin's.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

ROWS = ("engines", "requests", "jumps", "stale tokens", "select scores")
COUNTS: Counter[str] = Counter()


def add(scheduler: Any) -> None:
    """Add what an engine with the plugin has done; one without it adds nothing."""
    if not hasattr(scheduler, "sgl_vllm"):
        return
    stats = scheduler.sgl_vllm.stats()
    COUNTS["engines"] += 1
    if stats.radix is not None:
        COUNTS["requests"] += stats.radix.lookups
    if stats.jump_forward is not None:
        COUNTS["jumps"] += stats.jump_forward.jumps
        COUNTS["stale tokens"] += stats.jump_forward.stale_tokens
    if stats.select is not None:
        COUNTS["select scores"] += stats.select.scored_requests


def line() -> str:
    return ", ".join(f"{COUNTS[row]:,} {row}" for row in ROWS)
