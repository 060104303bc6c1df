"""What requests cost, and how that adds up."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any  # Any: counts


@dataclass(frozen=True)
class Usage:
    """What a run or a request has cost, as the server reports it. Usages add up with ``+``.

    - `prompt_tokens`, and `cached_prompt_tokens`, the part of them found in the prefix cache.
    - `cached_block_size`: the cached tokens of each request are counted in whole blocks of this
      many tokens, so that clients of one server cannot guess each other's prompts token by token.
      1 if every token is counted.
    - `completion_tokens`, and `forced_tokens`, the part of them that a constraint determined and
      that needed no decoding step.
    - `calls`: requests that ran the model, including prefix hints and selects.
    - `saved_calls` and `saved_prompt_tokens`: what API speculative execution avoided, and the calls
      of branches that a `vote` did not start.
    - `audio_seconds`: the audio of transcriptions that the server counts by its length.
    - `reused_tokens`: the part of `prompt_tokens` whose KV was reused from another place, so that
      the answer is not exact (`any_order` with `reuse`).

    A number that the server does not report is 0, except `cached_prompt_tokens`, which is None: not
    known. A sum is not known if one of its parts is not. ``str(usage)`` has all that is known in
    words.
    """

    prompt_tokens: int = 0
    cached_prompt_tokens: int | None = 0
    completion_tokens: int = 0
    calls: int = 0
    forced_tokens: int = 0
    saved_calls: int = 0
    saved_prompt_tokens: int = 0
    audio_seconds: float = 0.0
    reused_tokens: int = 0
    cached_block_size: int = 1

    def __add__(self, other: Usage) -> Usage:
        pairs = {n: (getattr(self, n), getattr(other, n)) for n in _COUNTS}
        sums: dict[str, Any] = {n: None if None in p else sum(p) for n, p in pairs.items()}
        return Usage(**sums, cached_block_size=max(self.cached_block_size, other.cached_block_size))

    def __str__(self) -> str:
        return " · ".join(f"{number:,} {name}" for name, number in usage_facts(self))

    def cost(
        self, *, prompt: float, completion: float, cached_prompt: float | None = None
    ) -> float:
        """The price, given prices per million tokens, in their currency.

        `cached_prompt` is the price of prompt tokens found in the cache, by default `prompt`. Where
        their number is not known, all prompt tokens count as computed.
        """
        cached = prompt if cached_prompt is None else cached_prompt
        cached_tokens = self.cached_prompt_tokens or 0
        millionths = (
            (self.prompt_tokens - cached_tokens) * prompt
            + cached_tokens * cached
            + self.completion_tokens * completion
        )
        return millionths / 1_000_000


_COUNTS = tuple(f.name for f in fields(Usage) if f.name != "cached_block_size")


def usage_facts(usage: Usage) -> list[tuple[str, int]]:
    """The names and numbers of a usage in words, without those that are not known or rare ones that
    are 0."""
    cached = usage.cached_prompt_tokens
    always = [
        ("call" if usage.calls == 1 else "calls", usage.calls),
        ("prompt tokens", usage.prompt_tokens),
        *([] if cached is None else [(cached_in_words(usage), cached)]),
        ("generated tokens", usage.completion_tokens),
    ]
    sometimes = [
        ("forced", usage.forced_tokens),
        ("calls saved", usage.saved_calls),
        ("prompt tokens saved", usage.saved_prompt_tokens),
        ("seconds of audio", round(usage.audio_seconds)),
        ("prompt tokens reused, not exactly", usage.reused_tokens),
    ]
    return always + [(name, number) for name, number in sometimes if number]


def cached_in_words(usage: Usage) -> str:
    """What its number of cached tokens counts."""
    size = usage.cached_block_size
    return f"cached in whole blocks of {size:,} tokens" if size > 1 else "cached"
