"""`vote`: the answer that most branches give."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any  # Any: values of the user's types

from sgl_vllm.lang.ir import Block, Expr, Gen, Select
from sgl_vllm.lang.keywords import suggests
from sgl_vllm.lang.primitives.block import Contest, answer_of, at_least, block, call
from sgl_vllm.lang.state import AsyncProgramState
from sgl_vllm.lang.tracing.standin import deferrable
from sgl_vllm.lang.transcript import Variable
from sgl_vllm.lang.usage import Usage


@deferrable
@suggests
def vote(
    answer: str | Expr,
    n: int = 5,
    *,
    key: Callable[[Any], object] | None = None,
    at_once: int | None = None,
) -> Block:
    """Write an answer in `n` branches, and go on with the answer that most of them give.

    The prompt continues as the first branch that gives it, with all the variables that `answer`
    makes. As soon as the branches that are left cannot change the result, they are canceled with
    their requests. A tie is won by the answer of the earlier branch. A branch that fails does not
    vote. Needs a temperature above 0.

    - `answer`: the expression that each branch writes, such as a chain of thought and its answer.
      Its last variable is what is voted on. A name stands for ``gen(name)``.
    - `key`: answers with the same ``key(answer)`` are votes for the same. By default, answers that
      are equal.
    - `at_once`: how many branches run at the same time (None: all). With fewer, those that are not
      needed never start, and their calls are saved, but a close vote takes longer.

    `get_meta_info` has also `votes` (a list of pairs, an answer's key and its votes, most first),
    `num_started` and, of these, `num_canceled`. Cost: `n` times the calls of `answer`, or with
    `at_once` as few as ``n // 2 + 1`` times; and a prefix hint, so that the branches share the
    prompt in the cache.

    Raises ValueError for an `answer` that makes no variable. If all branches fail, the error is
    that of the first.
    """
    at_least(1, n=n, at_once=at_once)
    expr, names = answer_of("vote", answer)

    async def ballot(branch: AsyncProgramState) -> object:
        value = await branch[names[-1]]
        return value if key is None else await call(branch, key, value)

    async def body(s: AsyncProgramState) -> Mapping[str, Variable]:
        contest = Contest(expr, names, n, ballot, _is_decided, at_once)
        forks = await contest.run(s)
        votes = _counted([*contest.ratings.values()])
        first = next(i for i, given in contest.ratings.items() if given == votes[0][0])
        num_calls = sum(isinstance(part, Gen | Select) for part in expr.items)
        s._stream.run.usage += Usage(saved_calls=(n - contest.num_started) * num_calls)
        return await contest.won(s, forks, first, votes=votes)

    return block("vote", names, body)


def _is_decided(contest: Contest[object]) -> bool:
    """Whether no result of the branches that are left can change the winner."""
    counts = [count for _, count in _counted([*contest.ratings.values()])]
    first, second = (*counts, 0, 0)[:2]
    return first > second + contest.num_left


def _counted(ballots: Sequence[object]) -> list[tuple[object, int]]:
    """The different ballots and how many there are of each, most first; of equal counts, the one
    that comes first. Ballots need not be hashable: instances of a class may not be."""
    different: list[object] = []
    counts: list[int] = []
    for ballot in ballots:
        if ballot in different:
            counts[different.index(ballot)] += 1
        else:
            different.append(ballot)
            counts.append(1)
    return sorted(zip(different, counts, strict=True), key=lambda pair: -pair[1])
