"""What a program's function sees: the prompt `s`, its turns, and its variables.

Owns the interface that programs write and read through. Writing submits to the stream and returns;
reading waits: `ProgramState` blocks the thread, `AsyncProgramState` is awaited. Branches of a fork
are in `group.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

# Any: values of the user's types
from typing import TYPE_CHECKING, Any, Generic, NoReturn, overload

from typing_extensions import TypeVar

from sgl_vllm.lang.errors import ProgramError, cause_of, reading
from sgl_vllm.lang.follower import FileFollower, TextFollower
from sgl_vllm.lang.group import ProgramGroup
from sgl_vllm.lang.ir import (
    Expr,
    Role,
    RoleBegin,
    RoleEnd,
    Value,
    VariableExpr,
    VarScopeBegin,
    VarScopeEnd,
    name_of,
    refuse_joined,
)
from sgl_vllm.lang.loop import new_future, result_of
from sgl_vllm.lang.stream import Stream
from sgl_vllm.lang.transcript import Order, Transcript, Variable, meta_info
from sgl_vllm.lang.usage import Usage
from sgl_vllm.lang.views.capture import picture_of
from sgl_vllm.lang.views.shown import Shown
from sgl_vllm.lang.waiting import waiting

if TYPE_CHECKING:
    from sgl_vllm.lang.views.picture import Picture

T = TypeVar("T")
StateT = TypeVar("StateT", bound="State")
R = TypeVar("R", default=Any)
"""What a program's function returns."""


class State(Shown):
    """A prompt being written: what `ProgramState` and `AsyncProgramState` have in common.

    ``s += expr`` submits and returns immediately. Everything that reads waits for the value, and
    raises the ProgramError of the operation that failed if there is none.
    """

    transcript_class: type[Transcript] = Transcript
    """What a program may append, and where. `sgl_vllm.sglang` has its own."""

    group_class: type[ProgramGroup[Any]] = ProgramGroup
    """The branches that `fork` gives. `sgl_vllm.sglang` has its own."""

    _is_async = False

    _waits_for_function = False
    """Whether readers wait for the program's function: those of the state that ``run(stream=True)``
    has returned, and of its branches. Readers of the function's own prompts do not, in whatever
    thread they are: the function may wait for them."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._copied_from: ProgramGroup[Any] | None = None
        self.ret_value: Any = None  # whatever the program's function returns

    # --- writing -------------------------------------------------------------------------------

    def __iadd__(self: StateT, value: Expr | str) -> StateT:
        """Append text or an expression. Returns immediately. TypeError for other values, which
        must be converted with ``str(value)``."""
        self._stream.append(value)
        return self

    def set_var(self, name: str, value: object) -> None:
        """Set the variable `name` to a value of the program's own."""
        future: Future[Variable] = new_future()
        future.set_result(Variable.of(value))
        self._stream.bind(name, future)

    def __setitem__(self, name: str, value: object) -> None:
        """The same as `set_var`."""
        self.set_var(name, value)

    def __contains__(self, name: str) -> bool:
        """Whether the program makes a variable `name`. Does not wait for its value."""
        return name in self._stream.variables

    @contextmanager
    def var_scope(self: StateT, name: str) -> Iterator[StateT]:
        """Store the text appended inside the ``with`` block in the variable `name`."""
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
        """Append a system turn with `expr`. Without `expr`, use ``with s.system():`` and append
        inside the block."""
        return self._turn("system", expr)

    def user(self, expr: Expr | str | None = None) -> Turn:
        """Append a user turn with `expr`. Without `expr`, use ``with s.user():`` and append inside
        the block."""
        return self._turn("user", expr)

    def assistant(self, expr: Expr | str | None = None) -> Turn:
        """Append an assistant turn with `expr`. Without `expr`, use ``with s.assistant():`` and
        append inside the block."""
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
        """`size` copies of this prompt, which continue in parallel.

        With more than one, the shared prompt is first sent to the server, so that every branch
        finds it cached. That is one request, whose answer is dropped; it is skipped if the server
        already has (nearly) all of the prompt, because it was just generated from or sent before.
        A fork of 0 branches does nothing, and neither does its join. Raises ValueError for a
        `size` below 0. `position_ids_offset` is accepted for SGLang's programs and ignored.
        """
        if size < 0:
            raise ValueError(f"fork needs a number of branches, not {size}")
        streams = self._stream.fork(size) if size else []
        states = [type(self)(stream) for stream in streams]
        for state in states:
            state._waits_for_function = self._waits_for_function
        return self.group_class(self, states)

    def copy(self: StateT, position_ids_offset: object = None) -> StateT:
        """A copy of this prompt, to continue on trial. ``with s.copy() as c:`` joins it at the end
        of the block."""
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

    def text_async_iter(self, var_name: str | None = None) -> AsyncIterator[str]:
        """Iterate over the text, or that of one variable, in pieces as it arrives.

        The pieces are small in a run with ``stream=True``. Otherwise each piece is what one
        operation appended. A `gen` with `stop_regex` or `retries` is always one piece, because its
        text may still change. Together the pieces are exactly the text. Raises the ProgramError
        when an operation has failed. If the program itself iterates, or another thread over one of
        its function's prompts, the text ends with what has been appended so far.
        """
        return TextFollower(self._stream, var_name, self._awaited_function()).pieces_async()

    def audio_async_iter(self, var_name: str) -> AsyncIterator[bytes]:
        """Iterate over the audio of a `speech` in pieces as it arrives.

        In a run with ``stream=True`` the pieces are as the service sends them. Otherwise the whole
        file is one piece. Together the pieces are the file, but for the header of a WAV file, which
        may have no length yet. Raises the ProgramError when an operation has failed, and TypeError
        for a variable without a file.
        """
        return FileFollower(self._stream, var_name, self._awaited_function()).pieces_async()

    def _awaited_function(self) -> Future[None] | None:
        """What a reader of the whole text waits for besides the operations: in a streamed run, the
        end of the program's function, unless that may wait for the reader."""
        run = self._stream.run
        waits = self._waits_for_function and not run.is_called_from_inside
        return run.function_done if waits else None

    def _picture(self) -> Picture:
        return picture_of(self._stream)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} with variables {list(self._stream.variables)}>"


class ProgramState(State, Generic[R]):
    """The prompt of a plain function, which returns an `R`. Reading blocks the thread."""

    ret_value: R

    def _wait(self, future: Future[T]) -> T:
        with reading(), waiting(future):
            return self._stream.run.background.wait_for(future)

    def cancel(self) -> None:
        """Cancel the run, all branches included: the requests in flight, what is queued, and what a
        function that is still running appends. Does not wait, and does nothing if the run is over.

        Reading what is then missing raises a ProgramError, also in iterators that are waiting. An
        ``async def`` function is interrupted; a plain one goes on to where it reads its prompt.
        Leaving the ``with`` block of a state that ``run(stream=True)`` has returned does the same.
        """
        run = self._stream.run
        if not run.is_over:
            run.cancel()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        super().__exit__(kind, error, trace)
        if self._waits_for_function and self._stream.parent is None:
            self.cancel()

    def _wait_for_function(self) -> None:
        """In a streamed run: wait until the program's function has returned."""
        done = self._awaited_function()
        if done is not None:
            self._wait(done)

    def _variable(self, name: str) -> Variable:
        if name not in self._stream.variables:
            self._wait_for_function()
        future = self._stream.variable(name)
        try:
            return self._wait(future)
        except ProgramError as error:
            if not self._waits_for_function:
                raise
            failed = error
        raise cause_of(failed)  # not above: this would become the context of its own cause

    @overload
    def __getitem__(self, name: VariableExpr[T]) -> T: ...
    @overload
    def __getitem__(self, name: str) -> Any: ...
    def __getitem__(self, name: str | VariableExpr[T]) -> Any:
        """The value of variable `name`. KeyError if the program does not make it.

        Instead of its name, the expression that makes it can be given. Type checkers then know the
        type of the value. TypeError if the variable is a list that a join made.
        """
        variable = self._variable(name_of(name))
        refuse_joined(name, variable.is_joined)
        return variable.value

    def get_var(self, name: str) -> Any:
        """The same as ``s[name]``."""
        return self[name]

    def get_meta_info(self, name: str | VariableExpr) -> dict[str, Any]:
        """How variable `name` was made. Empty for values that the program set itself.

        For a gen: `finish_reason` and, if requested, `prompt_token_logprobs` and
        `output_token_logprobs`, lists of ``{text, logprob, top}`` (with `n` > 1, the latter is a
        list of such lists). For a select: `choices`, `scores` (also under SGLang's name
        `normalized_prompt_logprobs`) and `token_logprobs`. Both have `prompt_tokens`,
        `cached_prompt_tokens`, `completion_tokens` and `forced_tokens`.
        """
        return meta_info(self._variable(name_of(name)))

    def _read(self) -> Transcript:
        self._wait_for_function()
        return self._wait(self._stream.read())

    def text(self) -> str:
        """All text so far. In a program with roles: the turns' texts, without the chat template."""
        return self._read().text

    def messages(self) -> list[dict[str, Any]]:
        """The turns so far as ``{"role", "content"}``, including an open turn that is not empty.
        The content of a turn with images, videos or audio is a list of parts."""
        return [message.as_dict() for message in self._read().all_messages()]

    def orders(self) -> list[Order]:
        """The orders of the `any_order`s of this prompt so far, those before a fork included, and
        what each saved."""
        return [*self._read().orders]

    def sync(self) -> None:
        """Wait until everything submitted has run. Raises the ProgramError if something failed."""
        self._read()

    def error(self) -> ProgramError | None:
        """Wait until everything submitted has run; the error that stopped it, or None. The error is
        then handled: `run` does not raise it. In a streamed run, an exception of the program's
        function is the cause of the error."""
        try:
            self.sync()
        except ProgramError as error:
            return error
        except Exception as error:
            if not self._waits_for_function:
                raise
            return ProgramError("the program's function", "", error)
        return None

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """`text_async_iter` as a plain iterator."""
        return TextFollower(self._stream, var_name, self._awaited_function()).pieces()

    def audio_iter(self, var_name: str) -> Iterator[bytes]:
        """`audio_async_iter` as a plain iterator."""
        return FileFollower(self._stream, var_name, self._awaited_function()).pieces()


class ValueToAwait(Awaitable[Any]):
    """What reading a variable gives in an async program; can be awaited any number of times.

    Using it as the value that it stands for is a TypeError: an `await` was forgotten, and the
    prompt would have its address.
    """

    def __init__(self, what: str, start: Callable[[], Awaitable[Any]]) -> None:
        self._what = what
        self._start = start

    def __await__(self) -> Generator[Any, None, Any]:
        return self._start().__await__()

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError(f"{self._what} must be awaited in an async program: await {self._what}")

    __bool__ = __eq__ = __ne__ = __str__ = __format__ = __iter__ = __len__ = __contains__ = _refuse
    __hash__ = object.__hash__


class AsyncProgramState(State):
    """The prompt of an ``async def`` function. Methods that read are awaited.

    The methods that write, fork and iterate are those of `ProgramState`.
    """

    _is_async = True

    async def _variable(self, name: str) -> Variable:
        return await self._result(self._stream.variable(name))

    async def _result(self, future: Future[T]) -> T:
        with reading(), waiting(future):
            return await result_of(future)

    @overload
    def __getitem__(self, name: VariableExpr[T]) -> Awaitable[T]: ...
    @overload
    def __getitem__(self, name: str) -> Awaitable[Any]: ...
    def __getitem__(self, name: str | VariableExpr[T]) -> Awaitable[Any]:
        """An awaitable of the value of variable `name`, which can be the expression that makes it,
        as for `ProgramState`. KeyError if the program does not make it."""
        future = self._stream.variable(name_of(name))

        async def value() -> Value:
            variable = await self._result(future)
            refuse_joined(name, variable.is_joined)
            return variable.value

        return ValueToAwait(f"s[{name_of(name)!r}]", value)

    def get_var(self, name: str) -> Awaitable[Any]:
        """The same as ``s[name]``."""
        return self[name]

    async def get_meta_info(self, name: str | VariableExpr) -> dict[str, Any]:
        """As `ProgramState.get_meta_info`."""
        return meta_info(await self._variable(name_of(name)))

    async def _read(self) -> Transcript:
        return await self._result(self._stream.read())

    async def text(self) -> str:
        """All text so far. In a program with roles: the turns' texts, without the chat template."""
        return (await self._read()).text

    async def messages(self) -> list[dict[str, Any]]:
        """As `ProgramState.messages`."""
        return [message.as_dict() for message in (await self._read()).all_messages()]

    async def orders(self) -> list[Order]:
        """As `ProgramState.orders`."""
        return [*(await self._read()).orders]

    async def sync(self) -> None:
        """Wait until everything submitted has run. Raises the ProgramError if something failed."""
        await self._read()

    async def error(self) -> ProgramError | None:
        """Wait until everything submitted has run; the error that stopped it, or None."""
        try:
            await self._read()
        except ProgramError as error:
            return error
        return None


class Turn:
    """What ``with s.user():`` works on: closes the turn at the end of the block."""

    def __init__(self, state: State, role: Role | None) -> None:
        self._state = state
        self._role = role

    def __enter__(self) -> State:
        if self._role is None:
            raise ValueError("a turn that was given its content cannot be used in a with statement")
        return self._state

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None and self._role is not None:
            self._state._stream.append(RoleEnd(self._role))
