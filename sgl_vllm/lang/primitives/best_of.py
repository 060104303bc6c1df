"""`best_of`: the answer with the highest score."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any  # Any: values of the user's types

from sgl_vllm.lang.errors import ProgramError
from sgl_vllm.lang.ir import Block, Expr, ExprList
from sgl_vllm.lang.keywords import suggests
from sgl_vllm.lang.primitives.block import (
    answer_of,
    at_least,
    block,
    call,
    continue_as,
    reported,
    variables_of,
)
from sgl_vllm.lang.primitives.jobs import run_jobs
from sgl_vllm.lang.state import AsyncProgramState
from sgl_vllm.lang.transcript import Variable


@suggests
def best_of(
    answer: str | Expr,
    n: int = 4,
    *,
    score: Callable[[Any], Any] | Expr,
    enough: float | None = None,
    at_once: int | None = None,
) -> Block:
    """Write an answer in `n` branches, and go on with the one that has the highest score.

    The prompt continues as that branch, with all the variables that `answer` makes. Of equal
    scores, the earlier branch wins. A branch that fails is left out. Needs a temperature above 0.

    - `answer`: the expression that each branch writes. Its last variable is the answer. A name
      stands for ``gen(name)``.
    - `score`: a function, plain or async, from the answer to a number; or an expression whose last
      variable is a number, such as a `judge`. An expression is written on a copy of the branch and
      leaves no trace in the prompt.
    - `enough`: the first branch with at least this score wins, and the others are canceled with
      their requests.
    - `at_once`: how many branches run at the same time (None: all).

    `get_meta_info` has also `scores`, a dict from the number of a branch to its score,
    `num_started` and, of these, `num_canceled`. Cost: `n` times the calls of `answer` and of
    `score` at most, and once at least where `enough` is reached; and a prefix hint.

    Raises ValueError for an `answer` or a `score` that makes no variable. If all branches fail, the
    error is that of the first.
    """
    at_least(1, n=n, at_once=at_once)
    expr, names = answer_of("best_of", answer)
    if isinstance(score, Expr):
        scoring, scores = answer_of("the score of best_of", score)
        rate = functools.partial(_rate_by_model, scoring, scores[-1])
    else:
        rate = functools.partial(_rate_by_function, score, names[-1])
    return block(
        "best_of", names, functools.partial(_best_of, expr, names, n, rate, enough, at_once)
    )


async def _rate_by_model(scoring: ExprList, name: str, branch: AsyncProgramState) -> float:
    rating = branch.copy()
    rating += scoring
    return float(await rating[name])


async def _rate_by_function(
    score: Callable[[Any], Any], name: str, branch: AsyncProgramState
) -> float:
    return float(await call(branch, score, await branch[name]))


async def _best_of(
    expr: ExprList,
    names: tuple[str, ...],
    n: int,
    rate: Callable[[AsyncProgramState], Any],
    enough: float | None,
    at_once: int | None,
    s: AsyncProgramState,
) -> Mapping[str, Variable]:
    forks = s.fork(n)
    scores: dict[int, float] = {}
    errors: dict[int, Exception] = {}

    async def rated(branch: AsyncProgramState) -> float:
        branch += expr
        await branch.sync()
        score: float = await rate(branch)
        return score

    def ended(index: int, result: float | Exception) -> bool:
        if isinstance(result, ProgramError):
            errors[index] = result
        elif isinstance(result, Exception):
            raise result
        else:
            scores[index] = result
        return enough is not None and scores.get(index, enough - 1) >= enough

    jobs = [functools.partial(rated, branch) for branch in forks]
    num_started = await run_jobs(jobs, at_once, ended)
    if not scores:
        raise errors[min(errors)]
    best = max(sorted(scores), key=lambda index: scores[index])
    await continue_as(s, forks, forks[best])
    made = await variables_of(forks[0], names)
    made[names[-1]] = reported(
        made[names[-1]],
        scores=dict(sorted(scores.items())),
        num_started=num_started,
        num_canceled=num_started - len(scores) - len(errors),
    )
    return made
