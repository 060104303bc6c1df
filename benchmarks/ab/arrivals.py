"""When the tokens of an answer arrived, and how long both servers take for equally many of them.

A first message that has forced tokens in it comes later than one without, but brings more. So the
time to the first token alone says that jumps make answers slower to begin. Here the time to a
message with ten tokens is held against stock's time to its tenth. Pure: no server, no clock.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.arms import percentile


@dataclass(frozen=True)
class Arrival:
    """One answer that was streamed in two parts. Times are in seconds from its request."""

    first_s: float
    first_tokens: int
    last_s: float
    num_tokens: int

    def seconds_to(self, num_tokens: int) -> float:
        """When it had `num_tokens` tokens, or all of its tokens, if it has fewer. Those after its
        first part are taken to have arrived evenly."""
        missing = min(num_tokens, self.num_tokens) - self.first_tokens
        if missing <= 0:
            return self.first_s
        share = missing / (self.num_tokens - self.first_tokens)
        return self.first_s + share * (self.last_s - self.first_s)


Percentiles = dict[str, float]
"""Of seconds, or of their ratios, by "p50" and "p99"."""


def first_tokens(
    stock: Sequence[Sequence[Arrival]], sgl: Sequence[Sequence[Arrival]]
) -> dict[str, Any] | None:
    """Seconds to as many `tokens` as the plugin's first messages have, half of them at least: of
    each arm, and how many times as long stock takes, by medians and of each two neighboring rounds.

    Args:
        stock, sgl: of each round, all answers. `stock[i]` ran just before `sgl[i]`.

    Returns: None if that is one token, or if nothing was streamed.
    """
    counts = [one.first_tokens for arrivals in sgl for one in arrivals]
    if not counts or not all(stock) or not all(sgl):
        return None
    tokens = statistics.median_low(counts)
    if tokens <= 1:
        return None
    rounds = {
        arm: [_percentiles([one.seconds_to(tokens) for one in arrivals]) for arrivals in of_arm]
        for arm, of_arm in (("stock", stock), ("sgl", sgl))
    }
    arms = {
        arm: {key: statistics.median(one[key] for one in found) for key in ("p50", "p99")}
        for arm, found in rounds.items()
    }
    return {
        "tokens": tokens,
        "arms": arms,
        "ratio": _ratio(arms["stock"], arms["sgl"]),
        "ratio_of_rounds": list(map(_ratio, rounds["stock"], rounds["sgl"])),
    }


def _percentiles(seconds: Sequence[float]) -> Percentiles:
    return {"p50": percentile(seconds, 50), "p99": percentile(seconds, 99)}


def _ratio(stock: Percentiles, sgl: Percentiles) -> Percentiles:
    return {key: stock[key] / sgl[key] for key in stock}
