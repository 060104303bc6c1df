"""A session of chats, forks and siblings, and how its replies on two engines differ."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.engine.engine import Ask, Engine, greedy, tokens_of, words
from tests.engine.play import LOGPROB_TOLERANCE, NEAR_TIE


@dataclass(frozen=True)
class Reply:
    """What a request of a session got, with the likeliest tokens of each step."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[dict[int, float]]
    num_cached: int

    @property
    def computed(self) -> list[int]:
        """The tokens whose latent vectors exist afterwards: all but the last one sampled."""
        return self.prompt + self.tokens[:-1]


def run(engine: Engine, prompts: Sequence[list[int]]) -> list[Reply]:
    """Prompts that run at once."""
    outputs = engine.run([Ask(prompt, greedy(12, logprobs=5)) for prompt in prompts])
    return [
        Reply(
            prompt,
            tokens_of(output),
            [
                {token: row.logprob for token, row in rows.items()}
                for rows in output.outputs[0].logprobs
            ],
            output.num_cached_tokens or 0,
        )
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


class _Enough(Exception):
    """So many batches were asked for."""


def session(engine: Engine, num_batches: int | None = None) -> list[list[Reply]]:
    """A chat, forks of its history at and around the ends of blocks, and siblings that run at once:
    28 requests, in the batches in which they ran, or the first `num_batches`."""
    batches: list[list[Reply]] = []

    def ask(*prompts: list[int]) -> list[int]:
        if len(batches) == num_batches:
            raise _Enough
        batches.append(run(engine, prompts))
        return batches[-1][0].tokens

    with contextlib.suppress(_Enough):
        _ask_all(ask)
    return batches


def _ask_all(ask: Callable[..., list[int]]) -> None:
    history, rng = words(333), random.Random(7)
    for turn in range(5):
        history = history + ask(history) + words(37 + 13 * turn, seed=10 + turn)
    for cut in (50, 63, 64, 65, 127, 128, 129, 255, 256, 257, 401, 450):
        ask(history[:cut] + words(40, seed=rng.randrange(1000, 2000)))
    trunk = words(500, seed=100)
    ask(trunk + words(9, seed=101))
    ask(*(trunk[:cut] + words(20, seed=200 + cut) for cut in (100, 250, 400, 499)))
    ask(*([*trunk, first, *words(4, seed=300)] for first in range(20, 24)))
    long = words(700, seed=400)
    ask(long + ask(long) + words(30, seed=401))


def again(engine: Engine, batches: Sequence[Sequence[Reply]]) -> list[list[Reply]]:
    """The same prompts on another engine, or on the same one with its cache in another state."""
    return [run(engine, [reply.prompt for reply in batch]) for batch in batches]


def in_order(batches: Sequence[Sequence[Reply]]) -> list[Reply]:
    return [reply for batch in batches for reply in batch]


def num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """The length of the longest common prefix."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def wrong(
    want: Sequence[Reply],
    got: Sequence[Reply],
    tolerance: float = LOGPROB_TOLERANCE,
    near_tie: float = NEAR_TIE,
) -> list[str]:
    """What differs by more than rounding: another token where there was no near tie, or another
    log-probability."""
    found = []
    for number, (one, other) in enumerate(zip(want, got, strict=True)):
        for step, (row, other_row) in enumerate(zip(one.logprobs, other.logprobs, strict=True)):
            token, other_token = one.tokens[step], other.tokens[step]
            gaps = [abs(row[each] - other_row[each]) for each in row.keys() & other_row]
            distance = max(gaps, default=float("inf"))
            if distance > tolerance:
                found.append(f"request {number}, step {step}: logprobs differ by {distance:.4f}")
                break
            if token != other_token:
                if row[token] - row.get(other_token, float("-inf")) > near_tie:
                    found.append(f"request {number}, step {step}: {other_token} for {token}")
                break
    return found
