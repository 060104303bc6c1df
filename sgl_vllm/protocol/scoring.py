"""How likely each of some continuations of a prompt is: what to ask a model for.

Owns where the scored tokens begin, and the requests that it takes. Pure: what runs the model
(`Model`) takes tokens and returns log-probabilities. The language asks over HTTP, and the
server, next to the engine, for the language.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar  # Any: what a coroutine sends is not used

from sgl_vllm.protocol.request_keys import SCORE_FROM

Row = TypeVar("Row")
Answer = TypeVar("Answer")
Cost = TypeVar("Cost")
Cost_co = TypeVar("Cost_co", covariant=True)

MAX_CONTINUATIONS = 1024
"""Of one request to `/v1/sgl/score`. Programs score more choices through vLLM's own routes."""

MAX_TOKENS_OF_A_REQUEST = 128
"""vLLM's limit on `logprob_token_ids`, in all supported versions."""


@dataclass(frozen=True)
class ChoiceTokens:
    """One choice as the model read it after the prefix.

    `token_ids`, `logprobs` and (if asked for) `unconditional_logprobs` are parallel: the last is
    the log-probability of the same token without the prefix, None where it cannot be known.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    unconditional_logprobs: tuple[float | None, ...] | None = None


@dataclass(frozen=True)
class Scored(Generic[Cost]):
    """The choices in their order, and what each request that it took has cost."""

    choices: tuple[ChoiceTokens, ...]
    costs: tuple[Cost, ...]


class Model(Protocol[Cost_co]):
    """Whoever runs the model."""

    async def begin_ids(self) -> list[int]:
        """What the tokenizer puts before any text: one token, or nothing."""
        ...

    async def warm_ids(self, ids: list[int]) -> Cost_co:
        """Compute and cache these tokens."""
        ...

    async def prompt_logprobs(
        self, sequences: list[list[int]], start: int
    ) -> tuple[list[tuple[float, ...]], Cost_co]:
        """The log-probabilities of the tokens from `start` on in each sequence, as one call."""
        ...

    async def next_token_logprobs(
        self, ids: list[int], tokens: list[int]
    ) -> tuple[list[float], Sequence[Cost_co]] | None:
        """The log-probability of each of `tokens` right after `ids`, with what each request for
        them has cost; None where that takes as much as `prompt_logprobs`."""
        ...


def check_score_from(value: object, num_prompt_tokens: int, *, has_logprobs: bool) -> None:
    """Raises ValueError if `value` cannot be the `SCORE_FROM` of a request, which has
    `prompt_logprobs` or not. The message does not quote it."""
    if not (has_logprobs and type(value) is int and 1 <= value <= num_prompt_tokens):
        raise ValueError(
            f"{SCORE_FROM} must be an index from 1 to the length of the prompt "
            f"({num_prompt_tokens}), in a request with prompt_logprobs"
        )


class NothingToScoreError(ValueError):
    """A choice has no token with a log-probability."""

    def __init__(self, *, after_nothing: bool) -> None:
        why = "it adds no token to the prompt"
        if after_nothing:
            why = (
                "the prompt is empty, and the tokenizer adds no BOS token, so the first token has "
                "no log-probability: send a prompt"
            )
        super().__init__(f"a choice has no token that can be scored: {why}")


async def score(
    model: Model[Cost],
    prefix_ids: Sequence[int],
    full_ids: Sequence[list[int]],
    *,
    unconditional: bool,
    warm: bool,
) -> Scored[Cost]:
    """Scores the prompt's continuations.

    Those of one token each are asked for as next tokens, if the model can. Others are one request,
    and one more to send the prefix ahead (`warm`), which is worth it where a cache would have it
    for all of them then. (One of them instead of the prefix would be a request less and take
    longer: of a request that asks for log-probabilities, vLLM computes the logits of every prompt
    token.) `unconditional` log-probabilities are one more.

    `prefix_ids` is the tokenized prompt, `full_ids` the tokenizations of it with each choice.
    Raises NothingToScoreError.
    """
    start = first_scored_position(prefix_ids, full_ids)
    # The first token of a sequence has no log-probability: nothing comes before it.
    scored_from = max(start, 1)
    rows, costs = await _after(model, list(prefix_ids[:start]), full_ids, warm=warm)
    if any(not logprobs for logprobs in rows):
        raise NothingToScoreError(after_nothing=not prefix_ids)
    alone: list[tuple[float | None, ...] | None] = [None] * len(full_ids)
    if unconditional:
        begin_ids = await model.begin_ids()
        ids = [begin_ids + full[scored_from:] for full in full_ids]
        from_choice = max(len(begin_ids), 1)
        alone_rows, cost = await model.prompt_logprobs(ids, from_choice)
        costs.append(cost)
        unknown = (None,) * (from_choice - len(begin_ids))
        alone = [(*unknown, *logprobs) for logprobs in alone_rows]
    choices = tuple(
        ChoiceTokens(tuple(full[scored_from:]), logprobs, unconditional_logprobs)
        for full, logprobs, unconditional_logprobs in zip(full_ids, rows, alone, strict=True)
    )
    return Scored(choices, tuple(costs))


async def _after(
    model: Model[Cost], prefix: list[int], full_ids: Sequence[list[int]], *, warm: bool
) -> tuple[list[tuple[float, ...]], list[Cost]]:
    """The log-probabilities of what each of `full_ids` has after the prefix, and the costs."""
    if prefix and all(len(full) == len(prefix) + 1 for full in full_ids):
        asked_as_next = await model.next_token_logprobs(prefix, [full[-1] for full in full_ids])
        if asked_as_next is not None:
            logprobs, asked_costs = asked_as_next
            return [(logprob,) for logprob in logprobs], list(asked_costs)
    costs: list[Cost] = []
    if warm and len(full_ids) > 1 and prefix:
        costs.append(await model.warm_ids(prefix))
    rows, cost = await model.prompt_logprobs(list(full_ids), max(len(prefix), 1))
    return rows, [*costs, cost]


def in_requests(tokens: Iterable[int]) -> list[list[int]]:
    """Different tokens, as many at a time as one request may ask log-probabilities of."""
    different = list(dict.fromkeys(tokens))
    places = range(0, len(different), MAX_TOKENS_OF_A_REQUEST)
    return [different[place : place + MAX_TOKENS_OF_A_REQUEST] for place in places]


async def all_answers(requests: Sequence[Coroutine[Any, Any, Answer]]) -> list[Answer]:
    """The answers to requests that run at once; the first that fails ends the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(request) for request in requests]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


def scored_rows(rows: Sequence[Row], ending: Sequence[int]) -> Iterator[tuple[Row, int]]:
    """The rows of a prompt's log-probabilities for its last tokens, `ending`, each with its token:
    all tokens have a row on stock vLLM, those that were asked for with the plugin."""
    return zip(rows[len(rows) - len(ending) :], ending, strict=True)


def first_scored_position(prefix_ids: Sequence[int], full_ids: Sequence[Sequence[int]]) -> int:
    """Where scoring starts: the first position at which some choice differs from the prefix.

    `prefix_ids` is the tokenized prefix, `full_ids` the tokenizations of prefix + choice, one per
    choice. A tokenizer may merge the end of the prefix with the start of a choice; such tokens
    are scored too, for every choice alike (token healing at the seam)::

        prefix    [The][ capital][ is][ ]
        choice A  [The][ capital][ is][ Paris]
        choice B  [The][ capital][ is][ ][42]
                                      ^ 3

    The result is at most ``len(prefix_ids)``. Cost: O(tokens of the prefix x choices).
    """
    position = len(prefix_ids)
    for ids in full_ids:
        shared = min(position, len(ids))
        position = next((i for i in range(shared) if ids[i] != prefix_ids[i]), shared)
    return position
