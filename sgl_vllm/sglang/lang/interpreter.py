"""SGLang's `ProgramState`: the prompt of a program, with SGLang's names and meanings.

Owns where SGLang's meaning differs from that of `sgl_vllm.lang.state`: text outside of turns is
kept, `join` gathers only names that are new to the parent, and `get_meta_info` has SGLang's form.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any  # Any: values of the user's types

from sgl_vllm.lang.backends.base import Usage
from sgl_vllm.lang.errors import ProgramError
from sgl_vllm.lang.group import ProgramGroup
from sgl_vllm.lang.ir import Expr, Role, VariableExpr, name_of
from sgl_vllm.lang.media import Media
from sgl_vllm.lang.state import ProgramState as CoreState
from sgl_vllm.lang.transcript import SpanKind, Transcript
from sgl_vllm.sglang.lang.meta_info import sglang_meta_info


@dataclass(frozen=True)
class FreeTranscript(Transcript):
    """A transcript in which text may be outside of turns.

    Text after a turn belongs to that turn, and text before the first turn to the first: the model
    reads it there, and `messages` shows it there.
    """

    def appended(
        self,
        text: str,
        kind: SpanKind = "text",
        name: str | None = None,
        *,
        forced: tuple[tuple[int, int], ...] = (),
        usage: Usage | None = None,
        media: Media | None = None,
    ) -> Transcript:
        if self.role is not None or not self.messages:
            return super().appended(text, kind, name, forced=forced, usage=usage, media=media)
        *before, last = self.messages
        inside = replace(self, role=last.role)
        after = super(FreeTranscript, inside).appended(
            text, kind, name, forced=forced, usage=usage, media=media
        )
        return replace(after, role=None, messages=(*before, last.extended(text)))

    def turn_begun(self, role: Role) -> Transcript:
        if self.role is None and not self.messages:
            return replace(self, role=role, turn_start=0)
        return super().turn_begun(role)


class ProgramStateGroup(ProgramGroup["ProgramState"]):
    """The branches of a fork."""

    gathers_known_names = False

    @property
    def states(self) -> list[ProgramState]:
        """The branches."""
        return self._states

    @property
    def src_state(self) -> ProgramState:
        """The prompt they were forked from."""
        return self._parent


class ProgramState(CoreState):
    """The prompt that a program writes."""

    transcript_class = FreeTranscript
    group_class = ProgramStateGroup

    @property
    def stream_executor(self) -> StreamExecutor:
        """The prompt under the attributes of SGLang's executor."""
        return StreamExecutor(self)

    def get_meta_info(self, name: str | VariableExpr) -> dict[str, Any]:
        """How variable `name` was made, with SGLang's names: `id`, `finish_reason`,
        `prompt_tokens`, `completion_tokens`, `cached_tokens`, and `output_token_logprobs`,
        `output_top_logprobs`, `input_token_logprobs` and `input_top_logprobs`, which are empty
        unless they were asked for."""
        return sglang_meta_info(self._variable(name_of(name)))

    async def text_async_iter(
        self, var_name: str | None = None, return_meta_data: bool = False
    ) -> AsyncIterator[Any]:
        """Iterate over the text, or that of one variable, in pieces as it arrives.

        With `return_meta_data` and `var_name`, each item is a pair of a piece and the meta
        information, which is empty until the last piece.
        """
        pieces = super().text_async_iter(var_name)
        if var_name is None or not return_meta_data:
            async for piece in pieces:
                yield piece
            return
        held: str | None = None
        async for piece in pieces:
            if held is not None:
                yield held, {}
            held = piece
        if held is not None:
            yield held, self.get_meta_info(var_name)

    def __repr__(self) -> str:
        return f"ProgramState({self.text()})"


class StreamExecutor:
    """What programs read of SGLang's executor. Each attribute is what has run so far."""

    def __init__(self, state: ProgramState) -> None:
        self._state = state
        self.sid = state._stream.run.id

    @property
    def text_(self) -> str:
        """The text so far; does not wait."""
        return self._state._stream.snapshot().text

    @property
    def messages_(self) -> list[dict[str, Any]]:
        """The turns so far; does not wait."""
        transcript = self._state._stream.snapshot().transcript
        return [message.as_dict() for message in transcript.all_messages()]

    @property
    def variables(self) -> dict[str, Any]:
        """The variables whose values exist; does not wait."""
        variables = self._state._stream.variables.items()
        done = {name: future for name, future in variables if future.done()}
        return {
            name: future.result().value
            for name, future in done.items()
            if future.exception() is None
        }

    @property
    def variable_event(self) -> dict[str, threading.Event]:
        """An event for each variable, which is set when its value exists or its `gen` has
        failed."""
        variables = dict(self._state._stream.variables)
        return {name: _event_of(future) for name, future in variables.items()}

    @property
    def meta_info(self) -> dict[str, dict[str, Any]]:
        """How each of `variables` was made."""
        return {name: self._state.get_meta_info(name) for name in self.variables}

    @property
    def cur_role(self) -> Role | None:
        """Whose turn is open."""
        return self._state._stream.snapshot().transcript.role

    @property
    def is_finished(self) -> bool:
        """Whether nothing is running or queued."""
        return self._state._stream.is_idle

    @property
    def error_(self) -> ProgramError | None:
        """What ended the program; does not wait."""
        return self._state._stream.snapshot().error

    def submit(self, expr: Expr | str) -> None:
        """Append to the prompt."""
        self._state._stream.append(expr)

    def text(self) -> str:
        """As `ProgramState.text`."""
        return self._state.text()

    def messages(self) -> list[dict[str, Any]]:
        """As `ProgramState.messages`."""
        return self._state.messages()

    def error(self) -> ProgramError | None:
        """As `ProgramState.error`."""
        return self._state.error()

    def sync(self) -> None:
        """As `ProgramState.sync`."""
        self._state.sync()

    def get_var(self, name: str) -> Any:
        """As `ProgramState.get_var`."""
        return self._state[name]

    def set_var(self, name: str, value: object) -> None:
        """As `ProgramState.set_var`."""
        self._state.set_var(name, value)

    def get_meta_info(self, name: str | VariableExpr) -> dict[str, Any]:
        """As `ProgramState.get_meta_info`."""
        return self._state.get_meta_info(name)

    def end(self) -> None:
        """Does nothing: a prompt holds no thread."""


def _event_of(future: Future[Any]) -> threading.Event:
    """An event that is set when `future` is done."""
    event = threading.Event()
    future.add_done_callback(lambda _: event.set())
    return event
