"""Runs expressions: a stream of operations per prompt, all streams on one event loop.

Owns the meaning of expressions, the order of operations, errors and their propagation. What a
prompt holds is in `transcript.py`, what the user's function sees of it in `state.py`; knows no
protocol (backends do) and no program function (`program.py` does).

Operations are submitted from any thread and run one after the other on the background loop. A
stream has a task only while it has something to do. Every submitted operation has a future: of
its variable if it has a name. Whatever happens to a stream, the futures of its operations are
resolved: that is why nothing can wait for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import itertools
import os
import re
import threading
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

from sgl_vllm.lang.backends.base import (
    Backend,
    ChatPrompt,
    GenAnswer,
    Generated,
    GenRequest,
    Prompt,
    ScoreAnswer,
    Usage,
    branch_name,
    logger,
    program_id,
)
from sgl_vllm.lang.errors import BackendError, ProgramCancelled, ProgramError, UnsupportedError
from sgl_vllm.lang.ir import (
    Computed,
    Expr,
    Gen,
    RoleBegin,
    RoleEnd,
    Sampling,
    Select,
    Show,
    Text,
    Tool,
    Var,
    VarScopeBegin,
    VarScopeEnd,
    parts_of,
)
from sgl_vllm.lang.loop import BackgroundLoop
from sgl_vllm.lang.speculation import Ahead, Lookout, can_be_speculated
from sgl_vllm.lang.transcript import GenMeta, SelectMeta, Transcript, Variable

T = TypeVar("T")

Needed: TypeAlias = Mapping[str, "Future[Variable]"]


@dataclass(frozen=True)
class Read:
    """Reads the transcript once everything before it has run."""

    def __str__(self) -> str:
        return "read"


@dataclass(frozen=True)
class _Fork:
    children: tuple[Stream, ...]

    def __str__(self) -> str:
        return f"fork({len(self.children)})"


@dataclass(frozen=True)
class Gather:
    """Waits for one variable of several branches; its own variable is their list."""

    name: str
    futures: tuple[Future[Variable], ...]
    branches: tuple[Stream, ...] = ()

    def __str__(self) -> str:
        return f"join of {self.name!r}"


@dataclass(frozen=True)
class AppendTexts:
    """Waits for branches and appends what each wrote after the fork."""

    branches: tuple[tuple[Stream, Future[Transcript]], ...]

    def __str__(self) -> str:
        return "join"


@dataclass(frozen=True)
class Joined:
    """What looking on shows of a join: `branches` came back after the first `num_spans` spans, by
    the variable `name` or, if that is None, by their texts."""

    num_spans: int
    branches: tuple[Stream, ...]
    name: str | None


Operation: TypeAlias = Expr | Read | _Fork | Gather | AppendTexts


def new_future() -> Future[Any]:
    """A future that cannot be cancelled by those who wait for it."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


_tool_of: contextvars.ContextVar[Stream | None] = contextvars.ContextVar(
    "sgl_vllm_tool_of", default=None
)
"""The stream whose tool runs here."""

_process = uuid.uuid4().hex[:8]
_run_numbers = itertools.count(1)


class Run:
    """One run of a program: what its streams have in common.

    Holds every stream of the run, forks included, the sampling defaults and the usage. `stream`
    asks backends for text as it comes. `num_api_spec_tokens` switches API speculation on: so many
    tokens a generation may run past its end. `id` is what backends tell the server.
    """

    def __init__(
        self,
        backend: Backend,
        defaults: Sampling,
        background: BackgroundLoop,
        *,
        stream: bool = False,
        num_api_spec_tokens: int | None = None,
    ) -> None:
        self.id = f"sgl-{_process}-{os.getpid()}-{next(_run_numbers)}"
        self.backend = backend
        self.defaults = defaults
        self.background = background
        self.stream = stream
        self.num_api_spec_tokens = num_api_spec_tokens
        self.usage = Usage()
        self.streams: list[Stream] = []
        self.body: Future[Any] | None = None
        """Of a streamed run: done when the program's function has returned, in `body_thread`."""
        self.body_thread: int | None = None
        self.context = contextvars.copy_context()
        self.context.run(program_id.set, self.id)
        self._given_up: Exception | None = None
        self._interrupts: list[Callable[[], object]] = []

    @property
    def given_up(self) -> Exception | None:
        """Why nothing of this run runs any more."""
        return self._given_up

    def check(self) -> Future[Any]:
        """Done when all operations submitted so far are; raises the first stream's error."""
        reads = [stream.submit(Read()) for stream in list(self.streams)]
        return reads[0] if len(reads) == 1 else self.background.start(_all_of(reads))

    def cancel(self, reason: Exception | None = None) -> None:
        """Give up: cancel requests under way; fail what still waits and what is yet submitted."""
        if self._given_up is None:
            self._given_up = reason or ProgramCancelled(
                "the program was given up before this was done"
            )
        for stream in list(self.streams):
            self.background.soon(stream.cancel)
        for interrupt in tuple(self._interrupts):
            interrupt()

    async def call(self, function: Callable[[], Awaitable[T]]) -> T:
        """Await the program's own function, on whatever event loop, until the run is given up.

        It is then cancelled, and the error is that of the operation that was given up, or a
        ProgramError of the function's own.
        """
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        num_cancelled, num_interrupts = task.cancelling(), 0
        is_running = True

        def interrupt() -> None:
            nonlocal num_interrupts
            if is_running:
                num_interrupts += 1
                task.cancel()

        def interrupt_soon() -> None:
            loop.call_soon_threadsafe(interrupt)

        def take_back() -> None:
            nonlocal num_interrupts
            for _ in range(num_interrupts):
                task.uncancel()
            num_interrupts = 0

        self._interrupts.append(interrupt_soon)
        try:
            return await function()
        except asyncio.CancelledError as error:
            take_back()
            if task.cancelling() > num_cancelled:
                raise  # somebody else's wish, who waits for this task
            if self._given_up is None:
                raise ProgramError("the program's function", "", error) from error
            await result_of(self.background.start(asyncio.sleep(0)))  # the streams have ended
            errors = (stream.snapshot().error for stream in self.streams)
            raise next(
                (error for error in errors if error is not None),
                ProgramError("the program's function", "", self._given_up),
            ) from self._given_up
        finally:
            is_running = False
            take_back()
            self._interrupts.remove(interrupt_soon)

    def cancel_after(self, timeout_s: float | None) -> Callable[[], None]:
        """Give up in `timeout_s`, unless what is returned is called before; None: never."""
        if timeout_s is None:
            return lambda: None
        why = TimeoutError(f"the program was not done within timeout_s={timeout_s:g}")
        timers: list[asyncio.TimerHandle] = []
        loop = self.background.loop
        self.background.soon(lambda: timers.append(loop.call_later(timeout_s, self.cancel, why)))

        def in_time() -> None:
            for timer in timers:
                timer.cancel()

        return lambda: self.background.soon(in_time)

    def discard(self, stream: Stream) -> None:
        """Give one branch up, and those that it was forked into: nobody is told of their errors."""
        for child in stream.children:
            self.discard(child)
        if stream in self.streams:
            self.streams.remove(stream)
        stream.discarded = True
        self.background.soon(stream.cancel)


@dataclass(frozen=True)
class Snapshot:
    """A stream at one moment: its transcript, and what has come so far of the text being
    generated as `partial_name`. `busy` says what runs, `error` what has ended it."""

    transcript: Transcript
    partial: str
    partial_name: str | None
    busy: str | None
    error: ProgramError | None

    @property
    def text(self) -> str:
        return self.transcript.text + self.partial


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
        parent: Stream | None = None,
        seen_chars: int = 0,
    ) -> None:
        """`seen_chars`: so much of the text it is going to write is in the server's cache."""
        self.run = run
        self.where = where
        self.variables: dict[str, Future[Variable]] = dict(variables or {})
        self.written: dict[str, None] = {}  # names this stream wrote itself, in order
        self.parent = parent
        self.children: list[Stream] = []
        self.forked_at = 0  # where in the text this branch's own part begins
        self.discarded: bool = parent is not None and parent.discarded
        # As many spans are the parent's; None until the branch has begun.
        self.num_inherited_spans: int | None = 0 if parent is None else None
        self.joins: list[Joined] = []
        self._transcript = Transcript(seen_chars=seen_chars)
        self._partial = ""  # what has come so far of the text being generated
        self._ahead: Ahead | None = None
        self._scopes: list[int] = []  # where the open var_scopes begin
        self._lock = threading.Lock()
        self._queue: deque[tuple[Operation, Future[Any], Needed]] = deque()
        self._busy = parent is not None  # a branch waits for its fork
        self._task: asyncio.Task[None] | None = None
        self._error: ProgramError | None = None
        self._listeners: list[Callable[[], object]] = []
        self._context = run.context.copy()
        self._context.run(branch_name.set, where)
        if not self.discarded:
            run.streams.append(self)

    # --- the submitting side: any thread -----------------------------------------------------

    def submit(self, operation: Operation, needed: Needed | None = None) -> Future[Any]:
        """Queue an operation; its future is resolved in bounded time."""
        future = new_future()
        with self._lock:
            given_up = self._why_given_up()
            if self._error is None and given_up is not None:
                self._error = ProgramError(str(operation), self.where, given_up)
            if self._error is not None:
                _abandon(operation, future, self._error)
                return future
            self._queue.append((operation, future, needed or {}))
            was_idle, self._busy = not self._busy, True
        if was_idle:
            self.run.background.soon(self._start_task)
        return future

    def append(self, value: Expr | str) -> None:
        """Submit what a program appends; KeyError for a variable that it does not make before."""
        for expr in parts_of(value):
            future = self.submit(expr, self._needed_by(expr))
            match expr:
                case Gen(name) if name is not None:
                    self.bind(name, future)
                    if expr.reasoning_name is not None:
                        self.bind(expr.reasoning_name, _reasoning_of(future))
                case Select(name) | VarScopeEnd(name) | Tool(name) if name is not None:
                    self.bind(name, future)
                case Computed() if expr.name is not None:
                    self.bind(expr.name, future)

    def _needed_by(self, expr: Expr) -> Needed | None:
        """The variables, as they are now, that an expression reads when it runs."""
        match expr:
            case Var(name):
                return {name: self.variable(name)}
            case Computed(_, needs):
                return {name: self.variable(name) for name in needs}
            case Tool(_, _, args, kwargs):
                given = (*args, *(value for _, value in kwargs))
                names = (value.name for value in given if isinstance(value, Var))
                return {name: self.variable(name) for name in names}
        return None

    def variable(self, name: str) -> Future[Variable]:
        """The future of variable `name`; KeyError if the program does not make it."""
        future = self.variables.get(name)
        if future is None:
            known = ", ".join(map(repr, self.variables)) or "none"
            raise KeyError(f"the program has no variable {name!r} (it has: {known})")
        return future

    def bind(self, name: str, future: Future[Variable]) -> None:
        """From here on, `name` means what `future` gives."""
        self.variables[name] = future
        self.written[name] = None

    def fork(self, size: int, label: Callable[[int], str]) -> list[Stream]:
        children = [Stream(self.run, label(i), self.variables, parent=self) for i in range(size)]
        self.children += children
        self.submit(_Fork(tuple(children)))
        return children

    # --- looking on: any thread ----------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """What there is now; does not wait."""
        with self._lock:
            running = self._queue[0][0] if self._queue else None
            return Snapshot(
                self._transcript,
                self._partial,
                getattr(running, "name", None),
                None if running is None else str(running),
                self._error,
            )

    def partial_of(self, future: Future[Variable]) -> str:
        """What has come so far of the variable being generated; nothing for all others."""
        with self._lock:
            return self._partial if self._queue and self._queue[0][1] is future else ""

    def refuse_to_wait_for_itself(self) -> None:
        """RuntimeError in a tool of this stream, or of one that has yet to fork it: what is
        submitted here runs after the tool, which would wait for ever."""
        caller = _tool_of.get()
        stream: Stream | None = self
        while caller is not None and stream is not None:
            if stream is caller:
                raise RuntimeError(
                    "a tool cannot wait for the prompt that waits for it: give it what it needs "
                    "as arguments, such as sgl.var('x')"
                )
            stream = stream.parent if stream.num_inherited_spans is None else None

    @property
    def is_idle(self) -> bool:
        """Nothing is under way or queued."""
        with self._lock:
            return not self._busy or self._error is not None

    def on_change(self, listener: Callable[[], object]) -> Callable[[], None]:
        """Call `listener`, on the loop, whenever there is more text, or an end; until what is
        returned is called."""
        self._listeners.append(listener)
        return functools.partial(self._forget, listener)

    def _forget(self, listener: Callable[[], object]) -> None:
        with contextlib.suppress(ValueError):
            self._listeners.remove(listener)

    def changed(self) -> None:
        """Tell who looks on."""
        for listener in tuple(self._listeners):
            try:
                listener()
            except Exception:  # such as a reader whose own event loop has ended
                logger.debug("%r looks on no more", listener, exc_info=True)
                self._forget(listener)

    # --- the running side: the background loop -------------------------------------------------

    def _start_task(self) -> None:
        run = self.run
        self._task = run.background.loop.create_task(self._drain(), context=self._context)

    async def _drain(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._busy = False
                    self._task = None
                    break
                operation, future, needed = self._queue[0]  # stays there, for `fail` to find
            try:
                result = await self._execute(operation, needed)
            except ProgramError as error:  # a joined branch's, which says where it was
                self.fail(error)
                return
            except asyncio.CancelledError as cause:
                if _is_being_cancelled():
                    self.cancel()
                else:  # by a tool, of itself
                    self.fail(ProgramError(str(operation), self.where, cause))
                return
            except BaseException as cause:  # SystemExit too: it would end the loop for all programs
                self.fail(ProgramError(str(operation), self.where, cause))
                return
            with self._lock:
                if self._error is not None:
                    return
                self._queue.popleft()
                self._partial = ""
            future.set_result(result)
            if self._listeners:
                self.changed()
        if self._listeners:
            self.changed()

    def fail(self, error: ProgramError) -> None:
        """End the stream: everything queued, and everything submitted later, gets `error`."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error
            self._partial = ""
            abandoned = list(self._queue)
            self._queue.clear()
        for operation, future, _ in abandoned:
            _abandon(operation, future, error)
        self.changed()

    def _why_given_up(self) -> Exception | None:
        if self.discarded:
            return ProgramCancelled("another branch was chosen")
        return self.run.given_up

    def cancel(self) -> None:
        """Give up what is under way and queued. Does nothing on an idle stream."""
        with self._lock:
            if not self._busy:
                return
            operation = str(self._queue[0][0]) if self._queue else "fork"
        why = self._why_given_up() or ProgramCancelled("the event loop was stopped")
        self.fail(ProgramError(operation, self.where, why))
        if self._task is not None:
            self._task.cancel()

    def _start_from(self, parent: Stream) -> None:
        """Begin a forked stream."""
        self._transcript = parent._transcript
        self._ahead = parent._ahead
        self.forked_at = len(self._transcript.text)
        self.num_inherited_spans = len(self._transcript.spans)
        self._start_task()

    async def _execute(self, operation: Operation, needed: Needed) -> Any:
        transcript = self._transcript
        match operation:
            case Text(value):
                self._write(value)
            case RoleBegin(role):
                self._ahead = None
                self._transcript = transcript.turn_begun(role)
            case RoleEnd(role):
                self._ahead = None
                self._transcript = transcript.turn_ended(role)
            case Gen():
                return await self._generate(operation)
            case Select():
                return await self._select(operation)
            case Var(name):
                self._write((await result_of(needed[name])).text, "variable", name)
            case Computed():
                return await self._compute(operation, needed)
            case Tool():
                return await self._call_tool(operation, needed)
            case Show(media):
                self._ahead = None
                self._transcript = transcript.shown(media)
            case VarScopeBegin(name):
                self._scopes.append(len(transcript.text))
            case VarScopeEnd(name):
                return Variable.of(transcript.text[self._scopes.pop() :])
            case Read():
                return transcript
            case _Fork(children):
                await self._branch(children)
            case Gather(name, futures, joined):
                values = [(await result_of(future)).value for future in futures]
                self.joins.append(Joined(len(transcript.spans), joined, name))
                return Variable.of(values)
            case AppendTexts(branches):
                joined = tuple(branch for branch, _ in branches)
                texts = [(await result_of(f)).text[branch.forked_at :] for branch, f in branches]
                self.joins.append(Joined(len(transcript.spans), joined, None))
                for text in texts:
                    self._write(text)
            case _:
                raise TypeError(f"{type(operation).__name__} cannot be run")
        return None

    def _write(self, text: str, kind: Any = "text", name: str | None = None) -> None:
        """Append what was not generated."""
        self._transcript = self._transcript.appended(text, kind, name)
        if self._ahead is not None:
            self._ahead = self._ahead.after(text)

    # --- generating ----------------------------------------------------------------------------

    def _open_prompt(self, feature: str) -> Prompt:
        """The prompt, which must end where text can be written."""
        transcript, backend = self._transcript, self.run.backend
        prompt = transcript.prompt()
        if not isinstance(prompt, ChatPrompt) or prompt.ending == "generate":
            return prompt
        if prompt.ending == "continue":
            if backend.continues_turns:
                return prompt
            raise UnsupportedError(
                backend.name,
                f"{feature} in a turn that has begun",
                f"let the {transcript.role} turn begin with it, or try "
                f"@function(num_api_spec_tokens=...)",
            )
        if transcript.role is None:
            raise ValueError(f"{feature} outside of a turn: put it in assistant(...)")
        raise UnsupportedError(
            backend.name,
            f"{feature} at the start of a {transcript.role} turn",
            "begin the turn with some text",
        )

    async def _generate(self, expr: Gen) -> Variable:
        sampling = expr.sampling.over(self.run.defaults)
        for retries_left in reversed(range(expr.retries + 1)):
            answer = await self._ask(expr, sampling)
            self.run.usage += answer.usage
            reasonings, texts = _split_off_reasoning(expr, answer.texts)
            try:
                values = [_read_as(expr, text.text, text.finish_reason) for text in texts]
            except ValueError:
                if not retries_left:
                    raise
                self._ahead = None
                self._partial = ""
            else:
                break
        first, several = texts[0], (sampling.n or 1) > 1
        written = self._transcript.appended(
            first.text, "gen", expr.name, forced=first.forced, usage=answer.usage
        ).seen()
        with self._lock:  # who looks on sees the text once
            self._transcript, self._partial = written, ""
        meta = GenMeta(
            finish_reason=tuple(text.finish_reason for text in texts),
            output_token_logprobs=tuple(text.logprobs for text in texts),
            usage=answer.usage,
            prompt_logprobs=answer.prompt_logprobs,
            with_text=sampling.return_text_in_logprobs is not False,
        )
        return Variable(
            values if several else values[0],
            first.text,
            meta,
            reasonings if several else reasonings[0],
        )

    async def _ask(self, expr: Gen, sampling: Sampling) -> GenAnswer:
        """Generate, from what is ahead if it answers, or from the server."""
        num_tokens_ahead = self.run.num_api_spec_tokens
        if num_tokens_ahead and can_be_speculated(expr, sampling):
            return await self._ask_speculatively(expr, sampling, num_tokens_ahead)
        return await self._ask_plainly(expr, sampling)

    async def _ask_plainly(self, expr: Gen, sampling: Sampling) -> GenAnswer:
        self._ahead = None
        stop = _StopRegex(sampling.stop_regex)
        watch = self._watch(expr, stop, sampling)
        request = GenRequest(
            self._open_prompt("gen"), sampling, expr.regex, expr.json_schema, watch
        )
        answer = await self.run.backend.generate(request)
        return replace(answer, texts=tuple(stop.cut(text) for text in answer.texts))

    def _watch(
        self, expr: Gen, stop: _StopRegex, sampling: Sampling
    ) -> Callable[[str, int | None], bool] | None:
        """Who looks on while text comes: readers of a streamed run, and the stop pattern."""
        if sampling.n != 1 or not (self.run.stream or stop.patterns):
            return None

        # Readers must not be given what the variable and the text will not have.
        is_shown = self.run.stream and not stop.patterns and not expr.retries
        raw = ""

        def watch(piece: str, num_tokens: int | None) -> bool:
            nonlocal raw
            raw += piece
            if is_shown:
                self._show(expr.reasoning.begun(raw) if expr.reasoning else raw)
            return stop.position(raw) is not None

        return watch

    async def _ask_speculatively(
        self, expr: Gen, sampling: Sampling, num_tokens_ahead: int
    ) -> GenAnswer:
        """From what is ahead, or from a generation that runs past its end.

        On a backend that cannot continue a turn, what the program wrote in it is asked of the
        model as well, and must come back the same.
        """
        if self._ahead is not None:
            answer = self._ahead.answer(sampling)
            if answer is not None:
                saved = Usage(saved_calls=1, saved_prompt_tokens=self._ahead.num_prompt_tokens_here)
                text, self._ahead = answer
                return GenAnswer((text,), saved)
        transcript, backend = self._transcript, self.run.backend
        begun = ""
        prompt = transcript.prompt()
        if (
            isinstance(prompt, ChatPrompt)
            and prompt.ending == "continue"
            and transcript.role == "assistant"
            and not backend.continues_turns
        ):
            begun = transcript.turn_text
            prompt = ChatPrompt(transcript.messages, "generate")
        else:
            prompt = self._open_prompt("gen")
        try:
            ahead, usage = await self._run_ahead(prompt, sampling, num_tokens_ahead, begun)
        except BackendError as error:
            if begun or error.status != 400:
                raise
            return await self._ask_plainly(expr, sampling)  # so many tokens may be too many
        if begun:
            after = ahead.after(begun)
            if after is None:
                raise UnsupportedError(
                    backend.name,
                    f"a turn that begins with {begun!r}",
                    f"the model began it with {ahead.text[: len(begun) + 20]!r}; tell it in the "
                    f"prompt how to write",
                )
            ahead = after
        answer = ahead.answer(sampling)
        if answer is None and not begun:
            # Where it ends was not told, or is inside of a piece of several tokens. From now on
            # nothing is asked for beyond `max_tokens` here, so that this happens once.
            backend.tells_tokens = False
            plain = await self._ask_plainly(expr, sampling)
            return replace(plain, usage=plain.usage + usage)
        if answer is None:
            raise UnsupportedError(
                backend.name,
                "gen in a turn that has begun",
                f"the turn {ahead.text!r} ends before it; raise max_tokens",
            )
        text, self._ahead = answer
        return GenAnswer((text,), usage)

    async def _run_ahead(
        self, prompt: Prompt, sampling: Sampling, num_tokens_ahead: int, begun: str
    ) -> tuple[Ahead, Usage]:
        backend = self.run.backend
        lookout = Lookout(sampling, num_tokens_ahead, begun, tells_tokens=backend.tells_tokens)

        def watch(piece: str, num_tokens: int | None) -> bool:
            is_enough = lookout(piece, num_tokens)
            if self.run.stream and (shown := lookout.shown()) is not None:
                self._show(shown)
            return is_enough

        answer = await backend.generate(GenRequest(prompt, lookout.sampling, watch=watch))
        return lookout.ahead(answer.texts[0], answer.usage.prompt_tokens), answer.usage

    def _show(self, text: str) -> None:
        """Let readers see what has come so far of the text being generated."""
        self._partial = text
        self.changed()

    # --- the other operations ------------------------------------------------------------------

    async def _select(self, expr: Select) -> Variable:
        self._ahead = None
        backend = self.run.backend
        if backend.scoreless_methods is not None and expr.method not in backend.scoreless_methods:
            raise UnsupportedError(
                backend.name,
                f"select by {type(expr.method).__name__}",
                "it chooses without scores, which can stand for token_length_normalized only",
            )
        answer = await backend.score(
            self._open_prompt("select"),
            expr.choices,
            unconditional=expr.method.needs_unconditional,
            warm=self._transcript.is_worth_a_hint,
        )
        self.run.usage += answer.usage
        if isinstance(answer, ScoreAnswer):
            decision = expr.method(answer.choices)
            index, scores = decision.index, decision.scores
            token_logprobs = tuple(choice.logprobs for choice in answer.choices)
        else:
            index, scores, token_logprobs = answer.index, (), ()
        chosen = expr.choices[index]
        self._transcript = self._transcript.appended(
            chosen, "select", expr.name, usage=answer.usage
        ).seen()
        meta = SelectMeta(expr.choices, scores, token_logprobs, answer.usage)
        return Variable(expr.parse(chosen) if expr.parse else chosen, chosen, meta)

    async def _compute(self, expr: Computed, needed: Needed) -> Variable:
        values = await _values_of(needed)
        variable = Variable.of("")
        for part in parts_of(expr.function(values)):
            made = await self._execute(part, {})
            if isinstance(made, Variable):
                variable = made
        return variable

    async def _call_tool(self, expr: Tool, needed: Needed) -> Variable:
        values = await _values_of(needed)

        def filled(argument: Any) -> Any:
            return values[argument.name] if isinstance(argument, Var) else argument

        args = [filled(argument) for argument in expr.args]
        kwargs = {key: filled(argument) for key, argument in expr.kwargs}
        caller = _tool_of.set(self)
        try:
            if inspect.iscoroutinefunction(expr.function):
                value = await expr.function(*args, **kwargs)
            else:
                call = functools.partial(expr.function, *args, **kwargs)
                context = contextvars.copy_context()
                value = await self.run.background.in_thread(context.run, call)
                if inspect.isawaitable(value):  # an object whose __call__ is a coroutine function
                    value = await value
        except ProgramError as error:  # of a program that the tool has run
            raise ProgramError(str(expr), self.where, error) from error
        finally:
            _tool_of.reset(caller)
        variable = Variable.of(value)
        self._write(variable.text, "tool", expr.name)
        return variable

    async def _branch(self, children: Sequence[Stream]) -> None:
        """Start the branches, after sending what they share ahead (the frontend hint).

        It is for speed only: a chat template may refuse a prompt that is not complete yet, and if
        anything else is wrong, the branches' own requests will say so.
        """
        if len(children) > 1 and self._ahead is None and self._transcript.is_worth_a_hint:
            try:
                usage = await self.run.backend.warm(self._transcript.prompt())
            except BackendError as error:
                logger.debug("a fork's hint failed: %s", error)
                usage = Usage()
            self.run.usage += usage  # read only now: other streams have added to it meanwhile
            self._transcript = self._transcript.seen()
        for child in children:
            child._start_from(self)


class _StopRegex:
    """The patterns that end a generation, and are left out of it with all that follows."""

    def __init__(self, patterns: str | tuple[str, ...] | None) -> None:
        given = (patterns,) if isinstance(patterns, str) else patterns or ()
        self.patterns = [re.compile(pattern) for pattern in given]

    def position(self, text: str) -> int | None:
        """Where the first match begins."""
        found = [match.start() for p in self.patterns if (match := p.search(text))]
        return min(found, default=None)

    def cut(self, generated: Generated) -> Generated:
        position = self.position(generated.text)
        if position is None:
            return generated
        kept, num_chars = [], 0
        for token in generated.logprobs:
            if num_chars >= position:
                break
            kept.append(token)
            num_chars += len(token.text)
        return replace(
            generated,
            text=generated.text[:position],
            finish_reason="stop",
            logprobs=tuple(kept),
            forced=tuple((a, min(b, position)) for a, b in generated.forced if a < position),
        )


def _abandon(operation: Operation, future: Future[Any], error: ProgramError) -> None:
    """An operation that will not run: whoever waits for it, or for a branch of it, gets `error`."""
    if isinstance(operation, _Fork):
        for child in operation.children:
            child.fail(error)
    future.set_exception(error)


async def _all_of(futures: Sequence[Future[Any]]) -> None:
    for future in futures:
        await result_of(future)


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _values_of(needed: Needed) -> dict[str, Any]:
    return {name: (await result_of(future)).value for name, future in needed.items()}


async def result_of(future: Future[Any]) -> Any:
    """Wait for a future of another thread, on any event loop."""
    return future.result() if future.done() else await asyncio.wrap_future(future)


def _reasoning_of(future: Future[Variable]) -> Future[Variable]:
    """The variable that holds what the model thought."""
    reasoning = new_future()

    def resolve(done: Future[Variable]) -> None:
        error = done.exception()
        if error is not None:
            reasoning.set_exception(error)
        else:
            reasoning.set_result(Variable.of(done.result().reasoning))

    future.add_done_callback(resolve)
    return reasoning


def _split_off_reasoning(
    expr: Gen, texts: tuple[Generated, ...]
) -> tuple[list[str | None], tuple[Generated, ...]]:
    if expr.reasoning is None:
        return [None] * len(texts), texts
    parts = [
        expr.reasoning.split(text.text)
        if text.reasoning is None
        else (text.reasoning.strip(), text.text.strip())
        for text in texts
    ]
    answers = (
        replace(t, text=answer, forced=()) for t, (_, answer) in zip(texts, parts, strict=True)
    )
    return [reasoning for reasoning, _ in parts], tuple(answers)


def _read_as(expr: Gen, text: str, finish_reason: str) -> object:
    if expr.parse is None:
        return text
    try:
        return expr.parse(text)
    except (ValueError, KeyError) as error:
        why = ": it was cut off, raise max_tokens" if finish_reason == "length" else ""
        shown = text if len(text) <= 200 else text[:200] + "..."
        raise ValueError(f"the generated text {shown!r} has not the wanted form{why}") from error
