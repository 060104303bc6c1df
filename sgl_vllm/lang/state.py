"""What a program function sees: the prompt `s`, its turns, and the branches of a fork.

Owns the surface that programs write and read by. Writing submits to the stream and returns;
reading waits, in `ProgramState` by blocking the thread, in `AsyncProgramState` by `await`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from sgl_vllm.lang.backends.base import TokenLogprob, Usage
from sgl_vllm.lang.errors import ProgramError
from sgl_vllm.lang.interpreter import AppendTexts, Gather, Read, Stream, new_future, result_of
from sgl_vllm.lang.ir import Expr, Role, RoleBegin, RoleEnd, VarScopeBegin, VarScopeEnd
from sgl_vllm.lang.transcript import GenMeta, SelectMeta, Transcript, Variable

JoinMode: TypeAlias = Literal["gather_variable", "concate_and_append"]

StateT = TypeVar("StateT", bound="State")


class State:
    """A prompt being written: what `ProgramState` and `AsyncProgramState` have in common.

    ``s += expr`` submits and returns at once; everything that reads waits until the value is
    there, and raises the ProgramError of the operation that failed instead of giving it.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._copied_from: ProgramGroup[Any] | None = None
        self.ret_value: Any = None

    # --- writing -------------------------------------------------------------------------------

    def __iadd__(self: StateT, value: Expr | str) -> StateT:
        """Append text or an expression. Submits and returns at once; TypeError for other values,
        which are to be given as ``str(value)``."""
        self._stream.append(value)
        return self

    def set_var(self, name: str, value: object) -> None:
        """Give the variable `name` a value of the program's own."""
        future = new_future()
        future.set_result(Variable.of(value))
        self._stream.bind(name, future)

    def __setitem__(self, name: str, value: object) -> None:
        """The same as `set_var`."""
        self.set_var(name, value)

    def __contains__(self, name: str) -> bool:
        """Whether the program makes a variable `name`; does not wait for its value."""
        return name in self._stream.variables

    @contextmanager
    def var_scope(self: StateT, name: str) -> Iterator[StateT]:
        """Store the text appended inside the ``with`` under `name`."""
        self._stream.append(VarScopeBegin(name))
        yield self
        self._stream.append(VarScopeEnd(name))

    def _turn(self, role: Role, expr: Expr | str | None) -> Turn:
        self._stream.append(RoleBegin(role))
        if expr is None:
            return Turn(self, role)
        self._stream.append(expr)
        self._stream.append(RoleEnd(role))
        return Turn(self, None)

    def system(self, expr: Expr | str | None = None) -> Turn:
        """Append a whole system turn; without `expr` the turn is what the ``with`` appends."""
        return self._turn("system", expr)

    def user(self, expr: Expr | str | None = None) -> Turn:
        """Append a whole user turn; without `expr` the turn is what the ``with`` appends."""
        return self._turn("user", expr)

    def assistant(self, expr: Expr | str | None = None) -> Turn:
        """Append a whole assistant turn; without `expr` what the ``with`` appends."""
        return self._turn("assistant", expr)

    def system_begin(self) -> None:
        """Open a system turn."""
        self._stream.append(RoleBegin("system"))

    def system_end(self) -> None:
        """Close the system turn."""
        self._stream.append(RoleEnd("system"))

    def user_begin(self) -> None:
        """Open a user turn."""
        self._stream.append(RoleBegin("user"))

    def user_end(self) -> None:
        """Close the user turn."""
        self._stream.append(RoleEnd("user"))

    def assistant_begin(self) -> None:
        """Open an assistant turn."""
        self._stream.append(RoleBegin("assistant"))

    def assistant_end(self) -> None:
        """Close the assistant turn."""
        self._stream.append(RoleEnd("assistant"))

    # --- fork and join -------------------------------------------------------------------------

    def fork(
        self: StateT, size: int = 1, position_ids_offset: object = None
    ) -> ProgramGroup[StateT]:
        """`size` copies of this prompt, which then go their own ways in parallel.

        With more than one, what they share is sent to the server first, so that every branch
        finds it cached: one request without output, left out when the server has (nearly) all
        of it anyway because this stream just generated there or hinted before.
        ValueError for a `size` below 1. `position_ids_offset` is there for SGLang's programs and
        means nothing.
        """
        if size < 1:
            raise ValueError(f"fork needs at least one branch, not {size}")
        prefix = f"{self._stream.where}." if self._stream.where else ""
        streams = self._stream.fork(size, lambda i: f"{prefix}fork[{i}]")
        return ProgramGroup(self, [type(self)(stream) for stream in streams])

    def copy(self: StateT, position_ids_offset: object = None) -> StateT:
        """A copy to try something on. As ``with s.copy() as c:`` it is joined at the end."""
        group = self.fork(1)
        group[0]._copied_from = group
        return group[0]

    def __enter__(self: StateT) -> StateT:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None and self._copied_from is not None:
            self._copied_from.join()

    # --- reading -------------------------------------------------------------------------------

    @property
    def usage(self) -> Usage:
        """What the whole run has cost so far, all branches included."""
        return self._stream.run.usage

    async def text_async_iter(self, var_name: str | None = None) -> AsyncIterator[str]:
        """The text, or that of one variable, piece by piece as it comes, to its end.

        Pieces are small in a run with ``stream=True``; otherwise each is what one operation
        appended, as is that of a `gen` whose end may still be taken back (with `stop_regex`, with
        `retries`). Together they are always the text. Raises the ProgramError when an operation
        has failed. Read in the program itself, the text ends with what has been appended so far.
        """
        loop, event = asyncio.get_running_loop(), asyncio.Event()
        follower = _Follower(self._stream, var_name, self._awaited_body())
        stop = self._stream.on_change(lambda: loop.call_soon_threadsafe(event.set))
        try:
            while True:
                event.clear()
                piece, is_end = follower.look()
                if piece:
                    yield piece
                elif is_end:
                    return
                else:
                    await event.wait()
        finally:
            stop()

    def _awaited_body(self) -> Future[Any] | None:
        """What a reader of the whole text waits for beside the operations: in a streamed run the
        end of the program's function, unless it is the function that reads."""
        return None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} with variables {list(self._stream.variables)}>"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from sgl_vllm.lang.view import to_html

        return to_html(self)

    def __rich__(self) -> Any:
        """What rich prints."""
        from sgl_vllm.lang.view import to_rich

        return to_rich(self)


class ProgramState(State):
    """The prompt of a program that is a plain function: reading blocks its thread."""

    def _wait(self, future: Future[Any]) -> Any:
        if not future.done():
            self._stream.refuse_to_wait_for_itself()
        return self._stream.run.background.wait_for(future)

    def _awaited_body(self) -> Future[Any] | None:
        run = self._stream.run
        return None if run.body_thread == threading.get_ident() else run.body

    def _wait_for_body(self) -> None:
        """In a streamed run: wait until the program's function, in its thread, has returned."""
        body = self._awaited_body()
        if body is not None:
            self._wait(body)

    def _variable(self, name: str) -> Variable:
        if name not in self._stream.variables:
            self._wait_for_body()
        variable: Variable = self._wait(self._stream.variable(name))
        return variable

    def __getitem__(self, name: str) -> Any:
        """The value of variable `name`. KeyError if the program does not make it."""
        return self._variable(name).value

    def get_var(self, name: str) -> Any:
        """The value of variable `name`. KeyError if the program does not make it."""
        return self[name]

    def get_meta_info(self, name: str) -> dict[str, Any]:
        """How variable `name` came about; empty for values that the program set itself.

        For a gen: `finish_reason` and, if asked for, `output_token_logprobs`, a list of
        ``{text, logprob, top}`` (lists of these for `n` > 1), and `prompt_token_logprobs`. For a
        select: `choices`, `scores` (SGLang's name `normalized_prompt_logprobs` works too) and
        `token_logprobs`. Both have `prompt_tokens`, `cached_prompt_tokens`, `completion_tokens`
        and `forced_tokens`.
        """
        return meta_info(self._variable(name))

    def _read(self) -> Transcript:
        self._wait_for_body()
        transcript: Transcript = self._wait(self._stream.submit(Read()))
        return transcript

    def text(self) -> str:
        """All text so far. In a program with roles: the turns' texts, without any template."""
        return self._read().text

    def messages(self) -> list[dict[str, Any]]:
        """The turns so far as ``{"role", "content"}``, an open one that holds anything included;
        the content of a turn with images or videos is a list of parts."""
        return [message.as_dict() for message in self._read().all_messages()]

    def sync(self) -> None:
        """Wait until everything submitted has run; raises the ProgramError if something failed."""
        self._read()

    def error(self) -> ProgramError | None:
        """Wait until everything submitted has run; the error that stopped it, or None. What the
        function of a streamed run has raised is its cause."""
        try:
            self.sync()
        except ProgramError as error:
            return error
        except Exception as error:
            if self._stream.run.body is None:
                raise
            return ProgramError("the program's function", "", error)
        return None

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """The same as `text_async_iter`, for a plain loop."""
        self._stream.run.background.refuse_to_wait()
        event = threading.Event()
        follower = _Follower(self._stream, var_name, self._awaited_body())
        stop = self._stream.on_change(event.set)
        try:
            while True:
                event.clear()
                piece, is_end = follower.look()
                if piece:
                    yield piece
                elif is_end:
                    return
                else:
                    event.wait()
        finally:
            stop()


class AsyncProgramState(State):
    """The prompt of a program that is an ``async def``: what reads is awaited.

    What writes, forks and follows is as in `ProgramState`.
    """

    async def _variable(self, name: str) -> Variable:
        variable: Variable = await self._result(self._stream.variable(name))
        return variable

    async def _result(self, future: Future[Any]) -> Any:
        if not future.done():
            self._stream.refuse_to_wait_for_itself()
        return await result_of(future)

    def __getitem__(self, name: str) -> Awaitable[Any]:
        """To be awaited: the value of variable `name`. KeyError if the program does not make
        it."""
        future = self._stream.variable(name)

        async def value() -> Any:
            return (await self._result(future)).value

        return _Awaitable(value)

    def get_var(self, name: str) -> Awaitable[Any]:
        """To be awaited: the value of variable `name`. KeyError if the program does not make
        it."""
        return self[name]

    async def get_meta_info(self, name: str) -> dict[str, Any]:
        """As `ProgramState.get_meta_info`."""
        return meta_info(await self._variable(name))

    async def _read(self) -> Transcript:
        transcript: Transcript = await self._result(self._stream.submit(Read()))
        return transcript

    async def text(self) -> str:
        """All text so far. In a program with roles: the turns' texts, without any template."""
        return (await self._read()).text

    async def messages(self) -> list[dict[str, Any]]:
        """As `ProgramState.messages`."""
        return [message.as_dict() for message in (await self._read()).all_messages()]

    async def sync(self) -> None:
        """Wait until everything submitted has run; raises the ProgramError if something failed."""
        await self._read()

    async def error(self) -> ProgramError | None:
        """Wait until everything submitted has run; the error that stopped it, or None."""
        try:
            await self._read()
        except ProgramError as error:
            return error
        return None


class _Awaitable(Awaitable[Any]):
    """Can be awaited more than once, or never."""

    def __init__(self, start: Callable[[], Awaitable[Any]]) -> None:
        self._start = start

    def __await__(self) -> Generator[Any, None, Any]:
        return self._start().__await__()


class _Follower:
    """Reads a growing text from where it read last."""

    def __init__(self, stream: Stream, var_name: str | None, body: Future[Any] | None) -> None:
        self._stream = stream
        self._var_name = var_name
        self._body = body
        self._future: Future[Variable] | None = None
        self._num_chars = 0

    def look(self) -> tuple[str, bool]:
        """What is new, and whether that was the end. Raises what has failed."""
        text, is_end = self._text() if self._var_name is None else self._variable(self._var_name)
        piece = text[self._num_chars :]
        self._num_chars = max(self._num_chars, len(text))
        return piece, is_end and not piece

    def _text(self) -> tuple[str, bool]:
        body = self._body
        was_written = body is None or body.done()
        is_end = was_written and self._stream.is_idle
        snapshot = self._stream.snapshot()
        if len(snapshot.text) <= self._num_chars and is_end:
            if snapshot.error is not None:
                raise snapshot.error
            if body is not None:
                body.result()
        return snapshot.text, is_end

    def _variable(self, name: str) -> tuple[str, bool]:
        body = self._body
        was_written = body is None or body.done()
        if name not in self._stream.variables:
            if was_written:
                if body is not None:
                    body.result()
                self._stream.variable(name)  # which raises
            return "", False
        if self._future is None:  # this one to its end, even if the name gets another one
            self._future = self._stream.variables[name]
        if not self._future.done():
            return self._stream.partial_of(self._future), False
        return self._future.result().text, True


def meta_info(variable: Variable) -> dict[str, Any]:
    """What `get_meta_info` tells of a variable."""

    def entries(tokens: Sequence[TokenLogprob], with_text: bool) -> list[dict[str, Any]]:
        if with_text:
            return [asdict(token) for token in tokens]
        return [
            {"text": None, "logprob": t.logprob, "top": tuple((None, p) for _, p in t.top)}
            for t in tokens
        ]

    match variable.meta:
        case None:
            return {}
        case GenMeta(finish_reasons, logprobs, usage, prompt_logprobs, with_text):
            tokens = [entries(text, with_text) for text in logprobs]
            several = len(finish_reasons) > 1
            return {
                "finish_reason": list(finish_reasons) if several else finish_reasons[0],
                "output_token_logprobs": tokens if several else tokens[0],
                "prompt_token_logprobs": entries(prompt_logprobs, with_text),
                **asdict(usage),
            }
        case SelectMeta(choices, scores, token_logprobs, usage):
            return {
                "choices": list(choices),
                "scores": list(scores),
                "normalized_prompt_logprobs": list(scores),
                "token_logprobs": [list(logprobs) for logprobs in token_logprobs],
                **asdict(usage),
            }


class Turn:
    """What ``with s.user():`` works on: closes the turn at the end of the block."""

    def __init__(self, state: State, role: Role | None) -> None:
        self._state = state
        self._role = role

    def __enter__(self) -> State:
        if self._role is None:
            raise ValueError("a turn that was given its content takes no with block")
        return self._state

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None and self._role is not None:
            self._state._stream.append(RoleEnd(self._role))


class ProgramGroup(Generic[StateT]):
    """The branches of a fork: iterable, indexable, and joined back with `join`."""

    def __init__(self, parent: StateT, states: list[StateT]) -> None:
        self._parent = parent
        self._states = states

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from sgl_vllm.lang.view import to_html

        return to_html(self)

    def __rich__(self) -> Any:
        """What rich prints."""
        from sgl_vllm.lang.view import to_rich

        return to_rich(self)

    def __len__(self) -> int:
        return len(self._states)

    def __getitem__(self, index: int) -> StateT:
        return self._states[index]

    def __setitem__(self, index: int, state: StateT) -> None:
        """Only what ``forks[i] += ...`` assigns: the branch itself."""
        if state is not self._states[index]:
            raise TypeError("a branch cannot be replaced: append to it with +=")

    def __iter__(self) -> Iterator[StateT]:
        return iter(self._states)

    def __iadd__(
        self, value: Callable[[int], Expr | str] | Sequence[Expr | str] | Expr | str
    ) -> ProgramGroup[StateT]:
        """Append to every branch: the same, its item of a list, or ``function(index)``."""
        if callable(value):
            values: Sequence[Expr | str] = [value(i) for i in range(len(self))]
        elif isinstance(value, (Expr, str)):
            values = [value] * len(self)
        else:
            values = value
            if len(values) != len(self):
                raise ValueError(f"{len(values)} values for {len(self)} branches")
        for state, item in zip(self._states, values, strict=True):
            state._stream.append(item)
        return self

    def join(self, mode: JoinMode = "gather_variable") -> None:
        """Bring the branches' results back to the parent; does not wait for them.

        "gather_variable": each variable that branches wrote since the fork becomes the parent's,
        as the list of its values in branch order. "concate_and_append": the text that each branch
        wrote since the fork is appended to the parent's, in branch order, as plain text. ValueError
        for other modes. A branch that has failed raises when what was joined is read.
        """
        parent = self._parent._stream
        streams = [state._stream for state in self._states]
        if mode == "gather_variable":
            names = dict.fromkeys(name for stream in streams for name in stream.written)
            for name in names:
                writers = tuple(s for s in streams if name in s.written)
                futures = tuple(s.variables[name] for s in writers)
                parent.bind(name, parent.submit(Gather(name, futures, writers)))
        elif mode == "concate_and_append":
            parent.submit(AppendTexts(tuple((s, s.submit(Read())) for s in streams)))
        else:
            raise ValueError(f"join mode must be gather_variable or concate_and_append, not {mode}")

    # --- the first that will do ----------------------------------------------------------------

    def first(self, predicate: Callable[[StateT], Any]) -> Any:
        """The branch that is done first of those which `predicate` accepts; the others are
        cancelled, their requests included.

        The group is then that branch alone, also for `join`; what the others made can no longer
        be read. None if it accepts none; the first branch's error if all have failed. In an
        ``async def`` program it is awaited, and `predicate` may be a coroutine function.
        """
        if isinstance(self._parent, AsyncProgramState):
            return self._first_async(predicate)
        return self._first(predicate)

    def _reads(self) -> dict[Future[Transcript], StateT]:
        return {state._stream.submit(Read()): state for state in self._states}

    def _first(self, predicate: Callable[[StateT], Any]) -> StateT | None:
        reads = self._reads()
        waiting = list(reads)
        self._parent._stream.run.background.refuse_to_wait()
        while waiting:
            ended, _ = concurrent.futures.wait(
                waiting, return_when=concurrent.futures.FIRST_COMPLETED
            )
            for read in [read for read in waiting if read in ended]:
                waiting.remove(read)
                if read.exception() is None and predicate(reads[read]):
                    return self._chosen(reads[read])
        _raise_if_all_failed(list(reads))
        return None

    async def _first_async(self, predicate: Callable[[StateT], Any]) -> StateT | None:
        reads = self._reads()
        waiting = {asyncio.wrap_future(read): read for read in reads}
        for wrapped in waiting:  # asyncio would log the losers' errors, which nobody will read
            wrapped.add_done_callback(lambda done: done.cancelled() or done.exception())
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for wrapped in sorted(done, key=list(waiting).index):
                read = waiting.pop(wrapped)
                if wrapped.exception() is None:
                    accepted = predicate(reads[read])
                    if isinstance(accepted, Awaitable):
                        accepted = await accepted
                    if accepted:
                        return self._chosen(reads[read])
        _raise_if_all_failed(list(reads))
        return None

    def _chosen(self, winner: StateT) -> StateT:
        for state in self._states:
            if state is not winner:
                state._stream.run.discard(state._stream)
        self._states = [winner]
        return winner


def _raise_if_all_failed(reads: Sequence[Future[Transcript]]) -> None:
    errors = [error for read in reads if (error := read.exception()) is not None]
    if len(errors) == len(reads):
        raise errors[0]
