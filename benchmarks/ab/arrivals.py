"""When the tokens of an answer arrived, and how long both servers take for equally many of them.

A first message that has forced tokens in it comes later than one without, but brings more. So the
time to the first token alone says that jumps make answers slower to begin. Here the time to a
message with ten tokens is held against stock's time to its tenth. Pure: no server, no clock.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.medians import percentile


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


@dataclass(frozen=True)
class Percentiles:
    """Of seconds, or of their ratios."""

    p50: float
    p99: float


@dataclass(frozen=True)
class FirstTokens:
    """Seconds to the first `tokens` tokens, by arm, and how many times as long stock's take: by
    medians, and of each two neighboring rounds."""

    tokens: int
    arms: Mapping[str, Percentiles]
    ratio: Percentiles
    ratio_of_rounds: tuple[Percentiles, ...]


def first_tokens(
    stock: Sequence[Sequence[Arrival]], sgl: Sequence[Sequence[Arrival]]
) -> FirstTokens | None:
    """The comparison at as many tokens as the plugin's first messages have, half of them at least.

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
    of_stock, of_sgl = ([_percentiles(one, tokens) for one in arm] for arm in (stock, sgl))
    arms = {"stock": _medians(of_stock), "sgl": _medians(of_sgl)}
    return FirstTokens(
        tokens,
        arms,
        _ratio(arms["stock"], arms["sgl"]),
        tuple(map(_ratio, of_stock, of_sgl)),
    )


def _percentiles(arrivals: Sequence[Arrival], tokens: int) -> Percentiles:
    seconds = [one.seconds_to(tokens) for one in arrivals]
    return Percentiles(percentile(seconds, 50), percentile(seconds, 99))


def _medians(rounds: Sequence[Percentiles]) -> Percentiles:
    return Percentiles(
        statistics.median(one.p50 for one in rounds), statistics.median(one.p99 for one in rounds)
    )


def _ratio(stock: Percentiles, sgl: Percentiles) -> Percentiles:
    return Percentiles(stock.p50 / sgl.p50, stock.p99 / sgl.p99)
