"""`retry_until`: answer again, told what is wrong, until a check accepts the answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any  # Any: values of the user's types

from sgl_vllm.lang.ir import Block, Expr, RoleBegin
from sgl_vllm.lang.keywords import suggests
from sgl_vllm.lang.primitives.block import Conversation, answer_of, at_least, block, variables_of
from sgl_vllm.lang.state import AsyncProgramState
from sgl_vllm.lang.text import filled
from sgl_vllm.lang.tracing.standin import deferrable
from sgl_vllm.lang.transcript import Variable

FEEDBACK = "That is not right: {error}\nTry again."


@deferrable
@suggests
def retry_until(
    answer: str | Expr,
    check: Callable[[Any], object],
    *,
    attempts: int = 3,
    feedback: str = FEEDBACK,
) -> Block:
    """Write an answer, and write it again until `check` accepts it.

    The model is told what is wrong, in a user's turn or, in a prompt without roles, in a line. All
    attempts stay in the prompt. In a chat this belongs into an assistant turn, as `gen` does.

    - `answer`: the expression that is written for each attempt. Its last variable is what is
      checked. A name stands for ``gen(name)``.
    - `check`: a function, plain or async. It rejects the answer if it raises an exception or
      returns a text, which the model is told, or returns False. It accepts it if it returns None
      or anything else.
    - `attempts`: how often the answer is written at most.
    - `feedback`: a template for what the model is told, with the field ``{error}``.

    `get_meta_info` has also `attempts`, how many were made, and `errors`, what was wrong with each
    but the last. Cost: the calls of `answer` for each attempt. Only the feedback is new to the
    cache.

    Raises ValueError for an `answer` that makes no variable and a template with other fields, and
    fails with one if the last attempt is rejected. An exception of `answer` itself, such as JSON
    that was cut off, is not retried: use the `retries` of `gen`.
    """
    at_least(1, attempts=attempts)
    filled(feedback, error="")
    expr, names = answer_of("retry_until", answer)

    async def body(s: AsyncProgramState) -> Mapping[str, Variable]:
        errors: list[str] = []
        while True:
            s += expr
            error = await _error_in(s, check, await s[names[-1]])
            if error is None:
                return await variables_of(s, names, attempts=len(errors) + 1, errors=errors)
            errors.append(error)
            if len(errors) == attempts:
                raise ValueError(f"{attempts} attempts were rejected, the last one with: {error}")
            transcript = await s._read()
            Conversation(s, transcript).tell(filled(feedback, error=error))
            if transcript.role is not None:
                s += RoleBegin(transcript.role)

    return block("retry_until", names, body)


async def _error_in(
    s: AsyncProgramState, check: Callable[[Any], object], value: object
) -> str | None:
    """What is wrong with an answer; None if it is accepted."""
    try:
        verdict = await s._stream.call_as_tool(check, value)
    except Exception as error:
        return str(error) or type(error).__name__
    if isinstance(verdict, str):
        return verdict
    return "it was rejected" if verdict is False else None
