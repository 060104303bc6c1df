"""What the primitives share: a coroutine that writes the prompt, as an expression.

Owns the way from a coroutine to an expression, and how what a primitive says and what the model
answers is written in a prompt with turns and in one without.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import TypeAlias

from sgl_vllm.lang.api import assistant, gen, user
from sgl_vllm.lang.ir import Block, Expr, ExprList, RoleEnd, Value, names_made, parts_of
from sgl_vllm.lang.state import AsyncProgramState
from sgl_vllm.lang.stream import Stream
from sgl_vllm.lang.transcript import Report, Transcript, Variable, meta_info

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
