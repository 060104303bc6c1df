"""`vote` and `best_of`: branches that write an answer, and the one that the prompt goes on as."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar  # Any: values of the user's types

from sgl_vllm.lang.errors import ProgramError
from sgl_vllm.lang.group import ProgramGroup
from sgl_vllm.lang.ir import Block, Expr, ExprList, Gen, Select, Value
from sgl_vllm.lang.keywords import suggests
from sgl_vllm.lang.operations import Continue
from sgl_vllm.lang.primitives.block import answer_of, at_least, block, variables_of
from sgl_vllm.lang.state import AsyncProgramState
from sgl_vllm.lang.tracing.standin import deferrable
from sgl_vllm.lang.transcript import Variable
from sgl_vllm.lang.usage import Usage

T = TypeVar("T")


@dataclass
class Contest(Generic[T]):
    """An answer that `n` branches write, of which one wins.

    Args:
        rate: gives what is known of a branch that has written its answer.
        is_decided: whether no more branches are needed, asked whenever one has ended.
        at_once: how many branches run at the same time (None: all).
    """

    answer: ExprList
    names: tuple[str, ...]
    n: int
    rate: Callable[[AsyncProgramState], Awaitable[T]]
    is_decided: Callable[[Contest[T]], bool]
    at_once: int | None
    ratings: dict[int, T] = field(default_factory=dict)
    errors: dict[int, Exception] = field(default_factory=dict)
    num_started: int = 0

    @property
    def num_left(self) -> int:
        """The branches that have not ended."""
        return self.n - len(self.ratings) - len(self.errors)

    async def run(self, s: AsyncProgramState) -> ProgramGroup[AsyncProgramState]:
        """Let the branches write until all have, or it is decided; those that still write then are
        canceled. Raises the first branch's error if all fail."""
        forks = s.fork(self.n)
        running: dict[asyncio.Task[T], int] = {}
        try:
            while self.num_left and not self.is_decided(self):
                while self.num_started < self.n and len(running) < (self.at_once or self.n):
                    writing = asyncio.create_task(self._write(forks[self.num_started]))
                    running[writing] = self.num_started
                    self.num_started += 1
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                ended = next(task for task in running if task.done())
                index = running.pop(ended)
                try:
                    self.ratings[index] = ended.result()
                except ProgramError as error:
                    self.errors[index] = error
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        if not self.ratings:
            raise self.errors[min(self.errors)]
        self.ratings = dict(sorted(self.ratings.items()))
        return forks

    async def _write(self, branch: AsyncProgramState) -> T:
        branch += self.answer
        await branch.sync()
        return await self.rate(branch)

    async def won(
        self,
        s: AsyncProgramState,
        forks: ProgramGroup[AsyncProgramState],
        index: int,
        **details: Value,
    ) -> dict[str, Variable]:
        """Discard all branches but one, and let the prompt go on as it. Returns its variables."""
        winner = forks[index]
        await forks.first(lambda branch: branch is winner)
        stream = winner._stream
        s._stream.submit(Continue(stream, stream.read()), has_effect=True)
        num_canceled = self.num_started - len(self.ratings) - len(self.errors)
        return await variables_of(
            winner, self.names, **details, num_started=self.num_started, num_canceled=num_canceled
        )


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
        return value if key is None else await branch._stream.call_as_tool(key, value)

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
            return float(await branch._stream.call_as_tool(score, await branch[names[-1]]))
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
