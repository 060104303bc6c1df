"""`best_of`: the answer with the highest score."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any  # Any: values of the user's types

from sgl_vllm.lang.ir import Block, Expr
from sgl_vllm.lang.keywords import suggests
from sgl_vllm.lang.primitives.block import Contest, answer_of, at_least, block, call
from sgl_vllm.lang.state import AsyncProgramState
from sgl_vllm.lang.tracing.standin import deferrable
from sgl_vllm.lang.transcript import Variable


@deferrable
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
    scores = answer_of("the score of best_of", score)[1] if isinstance(score, Expr) else ()

    async def rate(branch: AsyncProgramState) -> float:
        if not isinstance(score, Expr):
            return float(await call(branch, score, await branch[names[-1]]))
        rating = branch.copy()
        rating += score
        return float(await rating[scores[-1]])

    def is_enough(contest: Contest[float]) -> bool:
        return enough is not None and any(one >= enough for one in contest.ratings.values())

    async def body(s: AsyncProgramState) -> Mapping[str, Variable]:
        contest = Contest(expr, names, n, rate, is_enough, at_once)
        forks = await contest.run(s)
        best = max(contest.ratings, key=contest.ratings.__getitem__)
        return await contest.won(s, forks, best, scores=contest.ratings)

    return block("best_of", names, body)
