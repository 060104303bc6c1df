"""What the primitives share: a coroutine that writes the prompt, as an expression.

Owns the way from a coroutine to an expression, and how what a primitive says and what the model
answers is written in a prompt with turns and in one without.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Generic, TypeAlias, TypeVar

from sgl_vllm.lang.api import assistant, gen, user
from sgl_vllm.lang.errors import ProgramError
from sgl_vllm.lang.group import ProgramGroup
from sgl_vllm.lang.ir import Block, Expr, ExprList, RoleEnd, Value, names_made, parts_of
from sgl_vllm.lang.operations import Continue
from sgl_vllm.lang.state import AsyncProgramState
from sgl_vllm.lang.stream import Stream
from sgl_vllm.lang.transcript import Report, Transcript, Variable, meta_info

T = TypeVar("T")

Body: TypeAlias = Callable[[AsyncProgramState], Awaitable[Mapping[str, Variable]]]
"""Writes the prompt, and returns the variables that it makes."""


def block(kind: str, names: tuple[str, ...], body: Body) -> Block:
    """An expression that lets `body` write the prompt."""

    async def function(stream: Stream) -> Mapping[str, Variable]:
        return await body(AsyncProgramState(stream))

    return Block(kind, names, function)


def answer_of(kind: str, answer: str | Expr) -> tuple[ExprList, tuple[str, ...]]:
    """The expression that writes an answer, and the variables that it makes; the last one is the
    answer. A name stands for a `gen`. ValueError for an expression that makes no variable."""
    expr = ExprList(parts_of(gen(answer) if isinstance(answer, str) else answer))
    names = names_made(expr)
    if not names:
        raise ValueError(f"{kind} needs an expression that makes a variable: give it a name")
    return expr, names


def at_least(least: int, **options: int | None) -> None:
    """ValueError for an option below `least`."""
    for name, value in options.items():
        if value is not None and value < least:
            raise ValueError(f"{name} must be at least {least}, not {value}")


def filled(template: str, **fields: str) -> str:
    """A template with its fields. ValueError for one that has others."""
    try:
        return template.format(**fields)
    except (LookupError, ValueError, AttributeError) as error:
        names = " and ".join(f"{{{name}}}" for name in fields)
        raise ValueError(
            f"{template!r} may have the field {names} only: write other braces twice"
        ) from error


def reported(variable: Variable, **details: Value) -> Variable:
    """`variable`, with `details` in its meta information."""
    return replace(variable, meta=Report({**meta_info(variable), **details}))


async def variables_of(
    s: AsyncProgramState, names: tuple[str, ...], **details: Value
) -> dict[str, Variable]:
    """Variables of a prompt, with what is known about them, and `details` in the meta information
    of the last."""
    made = {name: await s._variable(name) for name in names}
    if details:
        made[names[-1]] = reported(made[names[-1]], **details)
    return made


async def call(s: AsyncProgramState, function: Callable[..., object], *args: object) -> Value:
    """Call a function of the user's, plain or async, as a tool is called."""
    return await s._stream.call(function, *args)


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


class Conversation:
    """Writes what the model is told and what it answers: in turns of user and assistant, or in
    lines of text.

    It writes turns unless the prompt has text outside of turns, so also in an empty prompt. An
    open turn is closed first.
    """

    def __init__(self, s: AsyncProgramState, transcript: Transcript) -> None:
        self._s = s
        self._has_turns = bool(transcript.messages or transcript.role or not transcript.text)
        self._is_in_line = not self._has_turns and not transcript.text.endswith("\n")
        if transcript.role is not None:
            s += RoleEnd(transcript.role)

    def tell(self, content: str | Expr) -> None:
        """A user's turn, or a line."""
        if self._has_turns:
            self._s += user(content)
            return
        if self._is_in_line:
            self._s += "\n"
        self._s += content
        self._s += "\n"
        self._is_in_line = False

    def ask(self, label: str, answer: str | Expr) -> None:
        """The model's turn, or a line that begins with `label`."""
        if self._has_turns:
            self._s += assistant(answer)
            return
        self._s += label
        self._s += answer
        self._is_in_line = True

    @property
    def before_choice(self) -> str:
        """What a choice begins with after the label of a line."""
        return "" if self._has_turns else " "
