"""Runs expressions: a stream of operations per prompt, all streams on one event loop.

Owns the meaning of expressions, the order of operations, fork and join, errors and waiting.
Knows no protocol (backends do) and no program function (`program.py` does).

Operations are submitted from any thread and run one after the other on the background loop. A
stream has a task only while it has something to do. Every submitted operation has a future: of
its variable if it has a name. Whatever happens to a stream, the futures of its operations are
resolved: that is why nothing can wait for ever.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias

from sgl_vllm.lang.backends.base import (
    Backend,
    ChatPrompt,
    GenRequest,
    Message,
    Prompt,
    TextPrompt,
    TokenLogprob,
    Usage,
)
from sgl_vllm.lang.errors import ProgramCancelled, ProgramError, UnsupportedError
from sgl_vllm.lang.ir import (
    Expr,
    Gen,
    Role,
    RoleBegin,
    RoleEnd,
    Sampling,
    Select,
    Text,
    VarScopeBegin,
    VarScopeEnd,
    parts_of,
)
from sgl_vllm.lang.loop import BackgroundLoop

# A prefix is worth a request of its own when the server has not seen at least this much of it.
# Below that (about 16 tokens) the round trip costs more than the branches save.
HINT_MIN_CHARS = 64

JoinMode: TypeAlias = Literal["gather_variable", "concate_and_append"]


@dataclass(frozen=True)
class GenMeta:
    """What is known of a generation beside its text; one entry per text for `n` > 1."""

    finish_reason: tuple[str, ...]
    output_token_logprobs: tuple[tuple[TokenLogprob, ...], ...]
    usage: Usage


@dataclass(frozen=True)
class SelectMeta:
    """How a select was decided: per choice its score and the logprobs of its tokens."""

    choices: tuple[str, ...]
    scores: tuple[float, ...]
    token_logprobs: tuple[tuple[float, ...], ...]
    usage: Usage


@dataclass(frozen=True)
class Variable:
    """A value a program produced, and how it came about."""

    value: Any
    meta: GenMeta | SelectMeta | None = None


@dataclass(frozen=True)
class Transcript:
    """What a stream has written so far; a fork copies it.

    `text` is everything in order. In a program with roles, `messages` are the closed turns and
    ``text[turn_start:]`` is the content of the open turn of `role`. The server has seen
    ``text[:seen_chars]`` of this prompt.
    """

    text: str = ""
    messages: tuple[Message, ...] = ()
    role: Role | None = None
    turn_start: int = 0
    seen_chars: int = 0

    def all_messages(self) -> tuple[Message, ...]:
        """The turns, the open one included if it has any text."""
        if self.role is None or self.turn_start == len(self.text):
            return self.messages
        return (*self.messages, Message(self.role, self.text[self.turn_start :]))

    def prompt(self) -> Prompt:
        """This prompt as it stands."""
        if self.role is None and not self.messages:
            return TextPrompt(self.text)
        if self.role is not None and self.turn_start < len(self.text):
            return ChatPrompt(self.all_messages(), "continue")
        if self.role == "assistant":
            return ChatPrompt(self.messages, "generate")
        return ChatPrompt(self.messages, "closed")

    def appended(self, text: str) -> Transcript:
        if self.role is None and self.messages:
            raise ValueError("text outside of a turn: a program with roles has text only in turns")
        return replace(self, text=self.text + text)

    def turn_begun(self, role: Role) -> Transcript:
        if self.role is not None:
            raise ValueError(f"the {self.role} turn is still open")
        if self.text and not self.messages:
            raise ValueError("text before the first turn: a program with roles has text in turns")
        return replace(self, role=role, turn_start=len(self.text))

    def turn_ended(self, role: Role) -> Transcript:
        if self.role != role:
            raise ValueError(f"no {role} turn is open" + (f", {self.role}'s is" * bool(self.role)))
        message = Message(role, self.text[self.turn_start :])
        return replace(self, messages=(*self.messages, message), role=None)

    def seen(self) -> Transcript:
        return replace(self, seen_chars=len(self.text))

    @property
    def is_worth_a_hint(self) -> bool:
        return len(self.text) - self.seen_chars >= HINT_MIN_CHARS


# --- operations that are not expressions of the language ---------------------------------------


@dataclass(frozen=True)
class _Read:
    """Reads the transcript once everything before it has run."""

    def __str__(self) -> str:
        return "read"


@dataclass(frozen=True)
class _Fork:
    children: tuple[Stream, ...]

    def __str__(self) -> str:
        return f"fork({len(self.children)})"


@dataclass(frozen=True)
class _Gather:
    """Waits for one variable of several branches; its own variable is their list."""

    name: str
    futures: tuple[Future[Variable], ...]

    def __str__(self) -> str:
        return f"join of {self.name!r}"


@dataclass(frozen=True)
class _AppendTexts:
    """Waits for branches and appends what each wrote after the fork."""

    branches: tuple[tuple[Stream, Future[Transcript]], ...]

    def __str__(self) -> str:
        return "join"


_Operation: TypeAlias = Expr | _Read | _Fork | _Gather | _AppendTexts


def _new_future() -> Future[Any]:
    """A future that cannot be cancelled by those who wait for it."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


class Run:
    """One run of a program: what its streams have in common.

    Holds every stream of the run, forks included, the sampling defaults and the usage.
    """

    def __init__(self, backend: Backend, defaults: Sampling, background: BackgroundLoop) -> None:
        self.backend = backend
        self.defaults = defaults
        self.background = background
        self.usage = Usage()
        self.streams: list[Stream] = []
        self.cancelled = False

    def check(self) -> Future[None]:
        """Done when all operations submitted so far are; raises the first stream's error."""
        return self.background.start(self._check())

    async def _check(self) -> None:
        for future in [stream.submit(_Read()) for stream in list(self.streams)]:
            await _result(future)

    def cancel(self) -> None:
        """Give up: cancel requests under way; fail what still waits and what is yet submitted."""
        self.cancelled = True
        for stream in list(self.streams):
            self.background.soon(stream.cancel)


class Stream:
    """The operations of one prompt, run in order.

    Invariant: every future ever returned by `submit` is resolved once the stream is idle, by a
    result, or from the first failed operation on by that operation's ProgramError. The head of
    the queue is the operation that runs.
    """

    def __init__(
        self,
        run: Run,
        where: str = "",
        variables: dict[str, Future[Variable]] | None = None,
        *,
        waits_for_fork: bool = False,
    ) -> None:
        self.run = run
        self.where = where
        self.variables: dict[str, Future[Variable]] = dict(variables or {})
        self.written: dict[str, None] = {}  # names this stream wrote itself, in order
        self._transcript = Transcript()
        self._forked_at = 0  # where in the text this branch's own part begins
        self._scopes: dict[str, int] = {}
        self._lock = threading.Lock()
        self._queue: deque[tuple[_Operation, Future[Any]]] = deque()
        self._busy = waits_for_fork
        self._task: asyncio.Task[None] | None = None
        self._error: ProgramError | None = None
        run.streams.append(self)

    # --- the submitting side: any thread -----------------------------------------------------

    def submit(self, operation: _Operation) -> Future[Any]:
        """Queue an operation; its future is resolved in bounded time."""
        future = _new_future()
        with self._lock:
            if self._error is None and self.run.cancelled:
                self._error = ProgramError(str(operation), self.where, _given_up())
            if self._error is not None:
                future.set_exception(self._error)
                if isinstance(operation, _Fork):
                    for child in operation.children:
                        child.fail(self._error)
                return future
            self._queue.append((operation, future))
            was_idle, self._busy = not self._busy, True
        if was_idle:
            self.run.background.soon(self._start_task)
        return future

    def append(self, value: Expr | str) -> None:
        for expr in parts_of(value):
            future = self.submit(expr)
            name = getattr(expr, "name", None)
            if name is not None and not isinstance(expr, VarScopeBegin):
                self.bind(name, future)

    def bind(self, name: str, future: Future[Variable]) -> None:
        """From here on, `name` means what `future` gives."""
        self.variables[name] = future
        self.written[name] = None

    def fork(self, size: int, label: Callable[[int], str]) -> list[Stream]:
        children = [
            Stream(self.run, label(i), self.variables, waits_for_fork=True) for i in range(size)
        ]
        self.submit(_Fork(tuple(children)))
        return children

    # --- the running side: the background loop -----------------------------------------------

    def _start_task(self) -> None:
        self._task = self.run.background.loop.create_task(self._drain())

    async def _drain(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._busy = False
                    self._task = None
                    return
                operation, future = self._queue[0]  # stays there, for `fail` to find
            try:
                result = await self._execute(operation)
            except ProgramError as error:  # a joined branch's, which says where it was
                self.fail(error)
                return
            except asyncio.CancelledError:
                self.cancel()
                return
            except Exception as cause:
                self.fail(ProgramError(str(operation), self.where, cause))
                return
            with self._lock:
                if self._error is not None:
                    return
                self._queue.popleft()
            future.set_result(result)

    def fail(self, error: ProgramError) -> None:
        """End the stream: everything queued, and everything submitted later, gets `error`."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error
            abandoned = list(self._queue)
            self._queue.clear()
        for operation, future in abandoned:
            if isinstance(operation, _Fork):
                for child in operation.children:
                    child.fail(error)
            future.set_exception(error)

    def cancel(self) -> None:
        """Give up what is under way and queued. Does nothing on an idle stream."""
        with self._lock:
            if not self._busy:
                return
            operation = str(self._queue[0][0]) if self._queue else "fork"
        self.fail(ProgramError(operation, self.where, _given_up()))
        if self._task is not None:
            self._task.cancel()

    def _start_from(self, transcript: Transcript) -> None:
        """Begin a forked stream."""
        self._transcript = transcript
        self._forked_at = len(transcript.text)
        self._start_task()

    async def _execute(self, operation: _Operation) -> Any:
        transcript = self._transcript
        match operation:
            case Text(value):
                self._transcript = transcript.appended(value)
            case RoleBegin(role):
                self._transcript = transcript.turn_begun(role)
            case RoleEnd(role):
                self._transcript = transcript.turn_ended(role)
            case Gen():
                return await self._generate(operation)
            case Select():
                return await self._select(operation)
            case VarScopeBegin(name):
                self._scopes[name] = len(transcript.text)
            case VarScopeEnd(name):
                return Variable(transcript.text[self._scopes.pop(name) :])
            case _Read():
                return transcript
            case _Fork(children):
                await self._branch(children)
            case _Gather(_, futures):
                return Variable([(await _result(future)).value for future in futures])
            case _AppendTexts(branches):
                for branch, future in branches:
                    text = (await _result(future)).text[branch._forked_at :]
                    self._transcript = self._transcript.appended(text)
            case _:
                raise TypeError(f"{type(operation).__name__} cannot be run")
        return None

    def _open_prompt(self, feature: str) -> Prompt:
        """The prompt, which must end where text can be written."""
        prompt = self._transcript.prompt()
        if isinstance(prompt, ChatPrompt) and prompt.ending == "closed":
            if self._transcript.role is None:
                raise ValueError(f"{feature} outside of a turn: put it in assistant(...)")
            raise UnsupportedError(
                self.run.backend.name,
                f"{feature} at the start of a {self._transcript.role} turn",
                "begin the turn with some text",
            )
        return prompt

    async def _generate(self, expr: Gen) -> Variable:
        sampling = expr.sampling.over(self.run.defaults)
        prompt = self._open_prompt("gen")
        request = GenRequest(prompt, sampling, expr.regex, expr.json_schema)
        answer = await self.run.backend.generate(request)
        self.run.usage += answer.usage
        values = [_parsed(expr, text.text, text.finish_reason) for text in answer.texts]
        self._transcript = self._transcript.appended(answer.texts[0].text).seen()
        meta = GenMeta(
            finish_reason=tuple(text.finish_reason for text in answer.texts),
            output_token_logprobs=tuple(text.logprobs for text in answer.texts),
            usage=answer.usage,
        )
        return Variable(values if (sampling.n or 1) > 1 else values[0], meta)

    async def _select(self, expr: Select) -> Variable:
        answer = await self.run.backend.score(
            self._open_prompt("select"),
            expr.choices,
            unconditional=expr.method.needs_unconditional,
            warm=self._transcript.is_worth_a_hint,
        )
        self.run.usage += answer.usage
        decision = expr.method(answer.choices)
        chosen = expr.choices[decision.index]
        self._transcript = self._transcript.appended(chosen).seen()
        token_logprobs = tuple(choice.logprobs for choice in answer.choices)
        meta = SelectMeta(expr.choices, decision.scores, token_logprobs, answer.usage)
        return Variable(chosen, meta)

    async def _branch(self, children: Sequence[Stream]) -> None:
        """Start the branches, after sending what they share ahead (the frontend hint)."""
        if len(children) > 1 and self._transcript.is_worth_a_hint:
            self.run.usage += await self.run.backend.warm(self._transcript.prompt())
            self._transcript = self._transcript.seen()
        for child in children:
            child._start_from(self._transcript)


def _given_up() -> ProgramCancelled:
    return ProgramCancelled("the program was given up before this was done")


async def _result(future: Future[Any]) -> Any:
    return future.result() if future.done() else await asyncio.wrap_future(future)


def _parsed(expr: Gen, text: str, finish_reason: str) -> object:
    if expr.parse is None:
        return text
    try:
        return expr.parse(text)
    except (ValueError, KeyError) as error:
        why = ": it was cut off, raise max_tokens" if finish_reason == "length" else ""
        shown = text if len(text) <= 200 else text[:200] + "..."
        raise ValueError(f"the generated text {shown!r} has not the wanted form{why}") from error


class ProgramState:
    """A prompt being written: what a program function gets as `s`.

    ``s += expr`` submits and returns at once; everything that reads waits until the value is
    there, and raises the ProgramError of the operation that failed instead of giving it.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._copied_from: ProgramGroup | None = None
        self.ret_value: Any = None

    # --- writing -----------------------------------------------------------------------------

    def __iadd__(self, value: Expr | str) -> ProgramState:
        self._stream.append(value)
        return self

    def set_var(self, name: str, value: object) -> None:
        """Give the variable `name` a value of the program's own."""
        future = _new_future()
        future.set_result(Variable(value))
        self._stream.bind(name, future)

    @contextmanager
    def var_scope(self, name: str) -> Iterator[ProgramState]:
        """Store the text appended inside the ``with`` under `name`."""
        self._stream.append(VarScopeBegin(name))
        yield self
        self._stream.append(VarScopeEnd(name))

    def _turn(self, role: Role, expr: Expr | str | None) -> _Turn:
        self._stream.append(RoleBegin(role))
        if expr is None:
            return _Turn(self, role)
        self._stream.append(expr)
        self._stream.append(RoleEnd(role))
        return _Turn(self, None)

    def system(self, expr: Expr | str | None = None) -> _Turn:
        """Append a whole system turn; without `expr` the turn is what the ``with`` appends."""
        return self._turn("system", expr)

    def user(self, expr: Expr | str | None = None) -> _Turn:
        """Append a whole user turn; without `expr` the turn is what the ``with`` appends."""
        return self._turn("user", expr)

    def assistant(self, expr: Expr | str | None = None) -> _Turn:
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

    # --- fork and join -----------------------------------------------------------------------

    def fork(self, size: int = 1) -> ProgramGroup:
        """`size` copies of this prompt, which then go their own ways in parallel.

        With more than one, what they share is sent to the server first, so that every branch
        finds it cached: one request without output, left out when the server has (nearly) all
        of it anyway because this stream just generated there or hinted before.
        """
        if size < 1:
            raise ValueError(f"fork needs at least one branch, not {size}")
        prefix = f"{self._stream.where}." if self._stream.where else ""
        streams = self._stream.fork(size, lambda i: f"{prefix}fork[{i}]")
        return ProgramGroup(self, [ProgramState(stream) for stream in streams])

    def copy(self) -> ProgramState:
        """A copy to try something on. As ``with s.copy() as c:`` it is joined at the end."""
        group = self.fork(1)
        group[0]._copied_from = group
        return group[0]

    def __enter__(self) -> ProgramState:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None and self._copied_from is not None:
            self._copied_from.join()

    # --- reading -----------------------------------------------------------------------------

    def _wait(self, future: Future[Any]) -> Any:
        return self._stream.run.background.wait_for(future)

    def _variable(self, name: str) -> Variable:
        future = self._stream.variables.get(name)
        if future is None:
            known = ", ".join(map(repr, self._stream.variables)) or "none"
            raise KeyError(f"the program has no variable {name!r} (it has: {known})")
        variable: Variable = self._wait(future)
        return variable

    def __getitem__(self, name: str) -> Any:
        """The value of variable `name`. KeyError if the program does not make it."""
        return self._variable(name).value

    def __setitem__(self, name: str, value: object) -> None:
        self.set_var(name, value)

    def __contains__(self, name: str) -> bool:
        """Whether the program makes a variable `name`; does not wait for its value."""
        return name in self._stream.variables

    def get_var(self, name: str) -> Any:
        """The value of variable `name`. KeyError if the program does not make it."""
        return self[name]

    def get_meta_info(self, name: str) -> dict[str, Any]:
        """How variable `name` came about; empty for values that the program set itself.

        For a gen: `finish_reason` and, if asked for, `output_token_logprobs`, a list of
        ``{text, logprob, top}`` (lists of these for `n` > 1). For a select: `choices`, `scores`
        (SGLang's name `normalized_prompt_logprobs` works too) and `token_logprobs`. Both have
        `prompt_tokens`, `cached_prompt_tokens` and `completion_tokens`.
        """
        variable = self._variable(name)
        match variable.meta:
            case None:
                return {}
            case GenMeta(finish_reasons, logprobs, usage):
                tokens = [[asdict(token) for token in text] for text in logprobs]
                several = len(finish_reasons) > 1
                return {
                    "finish_reason": list(finish_reasons) if several else finish_reasons[0],
                    "output_token_logprobs": tokens if several else tokens[0],
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

    def _read(self) -> Transcript:
        transcript: Transcript = self._wait(self._stream.submit(_Read()))
        return transcript

    def text(self) -> str:
        """All text so far. In a program with roles: the turns' texts, without any template."""
        return self._read().text

    def messages(self) -> list[dict[str, str]]:
        """The turns so far as ``{"role", "content"}``, an open one with text included."""
        return [message.as_dict() for message in self._read().all_messages()]

    def sync(self) -> None:
        """Wait until everything submitted has run; raises the ProgramError if something failed."""
        self._read()

    def error(self) -> ProgramError | None:
        """Wait until everything submitted has run; the error that stopped it, or None."""
        try:
            self._read()
        except ProgramError as error:
            return error
        return None

    @property
    def usage(self) -> Usage:
        """What the whole run has cost so far, all branches included."""
        return self._stream.run.usage

    def __repr__(self) -> str:
        return f"<ProgramState with variables {list(self._stream.variables)}>"


class _Turn:
    """What ``with s.user():`` works on: closes the turn at the end of the block."""

    def __init__(self, state: ProgramState, role: Role | None) -> None:
        self._state = state
        self._role = role

    def __enter__(self) -> ProgramState:
        if self._role is None:
            raise ValueError("a turn that was given its content takes no with block")
        return self._state

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None and self._role is not None:
            self._state._stream.append(RoleEnd(self._role))


class ProgramGroup:
    """The branches of a fork: iterable, indexable, and joined back with `join`."""

    def __init__(self, parent: ProgramState, states: list[ProgramState]) -> None:
        self._parent = parent
        self._states = states

    def __len__(self) -> int:
        return len(self._states)

    def __getitem__(self, index: int) -> ProgramState:
        return self._states[index]

    def __setitem__(self, index: int, state: ProgramState) -> None:
        """Only what ``forks[i] += ...`` assigns: the branch itself."""
        if state is not self._states[index]:
            raise TypeError("a branch cannot be replaced: append to it with +=")

    def __iter__(self) -> Iterator[ProgramState]:
        return iter(self._states)

    def __iadd__(
        self, value: Callable[[int], Expr | str] | Sequence[Expr | str] | Expr | str
    ) -> ProgramGroup:
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
            state += item
        return self

    def join(self, mode: JoinMode = "gather_variable") -> None:
        """Bring the branches' results back to the parent; does not wait for them.

        "gather_variable": each variable that branches wrote since the fork becomes the parent's,
        as the list of its values in branch order. "concate_and_append": the text that each branch
        wrote since the fork is appended to the parent's, in branch order, as plain text.
        """
        parent = self._parent._stream
        streams = [state._stream for state in self._states]
        if mode == "gather_variable":
            names = dict.fromkeys(name for stream in streams for name in stream.written)
            for name in names:
                futures = tuple(s.variables[name] for s in streams if name in s.written)
                parent.bind(name, parent.submit(_Gather(name, futures)))
        elif mode == "concate_and_append":
            parent.submit(_AppendTexts(tuple((s, s.submit(_Read())) for s in streams)))
        else:
            raise ValueError(f"join mode must be gather_variable or concate_and_append, not {mode}")
