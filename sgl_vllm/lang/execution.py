"""What each operation does to the prompt of a stream.

Owns the prompt (its transcript, the text being generated, text generated ahead) and the meaning of
every operation but those that need other streams: forks, blocks and computed expressions are in
`stream.py`. `gen` is in `generation.py`. Runs on the background loop; knows no protocol, which is
the backends' job.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any  # Any: what a coroutine sends is not used

from sgl_vllm.lang.backends.base import logger
from sgl_vllm.lang.backends.requests import ScoreAnswer
from sgl_vllm.lang.errors import BackendError, ProgramError, UnsupportedError
from sgl_vllm.lang.generation import Generation, open_prompt
from sgl_vllm.lang.ir import (
    AnyOrder,
    Gen,
    MediaExpr,
    Picture,
    RoleBegin,
    RoleEnd,
    Select,
    Show,
    Speech,
    SpokenGen,
    Text,
    Tool,
    Transcription,
    Var,
    VarScopeBegin,
    VarScopeEnd,
)
from sgl_vllm.lang.loop import result_of
from sgl_vllm.lang.making import make
from sgl_vllm.lang.operation_queue import OperationQueue
from sgl_vllm.lang.operations import (
    AppendTexts,
    Await,
    Continue,
    EarlyTool,
    Fork,
    Gather,
    JoinRecord,
    Needed,
    Operation,
    Read,
)
from sgl_vllm.lang.ordering import arranged, pieces_of, places_of
from sgl_vllm.lang.prefill_ahead import times_to_send, tool_times
from sgl_vllm.lang.prompts import Prompt
from sgl_vllm.lang.run import Run
from sgl_vllm.lang.settings import global_config
from sgl_vllm.lang.speculation import Ahead
from sgl_vllm.lang.text import check_unicode
from sgl_vllm.lang.transcript import SelectMeta, SpanKind, Transcript, Variable
from sgl_vllm.lang.usage import Usage
from sgl_vllm.lang.waiting import RunningTool, current_tool
from sgl_vllm.protocol.hints import NO_HINTS, Hints

SENDS_NOTHING = (
    *(Text, Show, RoleBegin, RoleEnd, VarScopeBegin, VarScopeEnd, Read, Gather),
    *(Speech, Picture, Await, AnyOrder, Var, AppendTexts),
)
"""Operations that send no request with the prompt, and lead to none."""


@dataclass(frozen=True)
class Written:
    """A prompt's transcript, and what the running operation has generated so far: text, and the
    pieces of a file."""

    transcript: Transcript
    partial: str = ""
    pieces: tuple[bytes, ...] = ()


class Execution:
    """Runs the operations of one prompt, one at a time.

    `queue` is that of the stream whose operations are run: the prompt's own, or that of a block.

    Invariant: `written` is replaced as a whole, so that every thread sees a transcript together
    with the partial text that follows it.
    """

    def __init__(self, run: Run, where: str, queue: OperationQueue, transcript: Transcript) -> None:
        self.queue = queue
        self.written = Written(transcript)
        self.joins: list[JoinRecord] = []
        self.listeners: set[Callable[[], object]] = set()  # called on the loop at every change
        self._run = run
        self._where = where
        self._speculated: Ahead | None = None
        self._scopes: list[tuple[str, int]] = []  # the open var_scopes, and where they begin

    def begin(self, parent: Execution) -> None:
        """Continue what the prompt of the parent has written when it forks."""
        self.written = Written(parent.written.transcript)
        self._speculated = parent._speculated

    def stop(self) -> None:
        """Nothing is executed any more."""
        self.written = Written(self.written.transcript)

    async def execute(self, operation: Operation, needed: Needed) -> Variable | Transcript | None:
        """Run `operation`. Returns its variable if it makes one; for a Read, the transcript."""
        transcript = self.written.transcript
        match operation:
            case Text(value):
                self._append(value)
            case RoleBegin(role):
                self._replace(transcript.turn_begun(role))
            case RoleEnd(role):
                self._replace(transcript.turn_ended(role))
            case Gen():
                return await self._generate(operation)
            case Select():
                return await self._select(operation)
            case Var(name):
                self._append((await result_of(needed[name])).text, "variable", name)
            case AnyOrder():
                await self._append_any_order(operation, needed)
            case Tool():
                tool = await with_values_awaited(operation, needed)
                return await self._append_result(tool, self._call_now(tool))
            case EarlyTool(tool, result, _):
                result_to_come = self._prefilling(result_of(result), None)
                return await self._append_result(tool, result_to_come)
            case MediaExpr():
                return await self._make(operation, needed)
            case Show(media):
                self._replace(transcript.shown(media))
            case VarScopeBegin():
                self._scopes.append((operation.name, len(transcript.text)))
            case VarScopeEnd():
                return Variable.of(transcript.text[self._begin_of(operation.name) :])
            case Await(future):
                await result_of(future)
            case Read():
                return transcript
            case Gather(name, futures, branches):
                values = [(await result_of(future)).value for future in futures]
                self.joins.append(JoinRecord(len(transcript.spans), branches, name))
                return Variable(values, str(values), is_joined=True)
            case AppendTexts():
                await self._append_texts(operation)
            case Continue(branch, read):
                continued = await result_of(read)
                self.joins.append(JoinRecord(len(transcript.spans), (branch,), None))
                self._replace(continued)
            case _:
                raise TypeError(f"{type(operation).__name__} cannot be run")
        return None

    # --- the prompt ----------------------------------------------------------------------------

    def _append(self, text: str, kind: SpanKind = "text", name: str | None = None) -> None:
        """Append text that was not generated. ValueError for text that cannot be sent."""
        check_unicode(text)
        self.written = Written(self.written.transcript.appended(text, kind, name))
        if self._speculated is not None:
            self._speculated = self._speculated.after(text)

    def _replace(self, transcript: Transcript) -> None:
        """Take a transcript that text generated ahead does not continue."""
        self.written = Written(transcript)
        self._speculated = None

    def _show(self, partial: str) -> None:
        """Let readers see the text generated so far."""
        self.written = Written(self.written.transcript, partial)
        self.notify()

    def _show_media(self, text: str, piece: bytes) -> None:
        """Let readers have more text and the next piece of a file."""
        written = self.written
        pieces = (*written.pieces, piece) if piece else written.pieces
        self.written = Written(written.transcript, written.partial + text, pieces)
        self.notify()

    def notify(self) -> None:
        """Tell the readers that there is more text, or that the stream has ended."""
        for listener in tuple(self.listeners):
            with contextlib.suppress(RuntimeError):  # of a reader whose own event loop has ended
                listener()

    # --- the model -----------------------------------------------------------------------------

    async def _generate(self, expr: Gen) -> Variable:
        before = self.written.transcript
        hints = functools.partial(self._hints, expr)
        generation = Generation(expr, self._run, before, self._speculated, self._show, hints)
        variable = await generation.variable()
        self._speculated = generation.ahead
        forced, usage = generation.first.forced, generation.usage
        after = before.appended(variable.text, "gen", expr.name, forced=forced, usage=usage)
        self.written = Written(after.seen())
        return variable

    def _hints(self, expr: Gen, is_last: bool) -> Hints:
        """Those of `expr`, which is being sent: the tool that is queued behind its last attempt
        with only text before it."""
        if not global_config.enable_hints_of_what_follows:
            return NO_HINTS
        running = self.queue.running
        # Inside of a computed value, the queue does not show what follows.
        if is_last and running is not None and running.operation is expr:
            following = (one for one in self.queue.upcoming() if not isinstance(one, SENDS_NOTHING))
            if isinstance(tool := next(following, None), Tool):
                return Hints(next_tool=tool.called)
        return NO_HINTS

    async def _select(self, expr: Select) -> Variable:
        self._speculated = None
        backend, before = self._run.backend, self.written.transcript
        if backend.scoreless_methods is not None and expr.method not in backend.scoreless_methods:
            raise UnsupportedError(
                backend.name,
                f"select by {type(expr.method).__name__}",
                "this backend chooses without scores, which only token_length_normalized allows",
            )
        answer = await backend.score(
            open_prompt(before, backend, "select"),
            expr.choices,
            unconditional=expr.method.needs_unconditional,
            warm=before.is_worth_warming,
        )
        self._run.usage += answer.usage
        scores: tuple[float, ...] = ()
        token_logprobs: tuple[tuple[float, ...], ...] = ()
        details: Mapping[str, object] = {}
        if isinstance(answer, ScoreAnswer):
            decision = expr.method(answer.choices)
            index, scores, details = decision.index, decision.scores, decision.details
            token_logprobs = tuple(choice.logprobs for choice in answer.choices)
        else:
            index = answer.index
        chosen = expr.choices[index]
        after = before.appended(chosen, "select", expr.name, usage=answer.usage)
        self.written = Written(after.seen())
        meta = SelectMeta(expr.choices, scores, token_logprobs, answer.usage, details)
        return Variable(expr.parse(chosen) if expr.parse else chosen, chosen, meta)

    async def _make(self, expr: MediaExpr, needed: Needed) -> Variable:
        known = {name: await result_of(future) for name, future in needed.items()}
        watch = self._show_media if self._run.is_streamed else None
        variable, after = await make(expr, self._run, self.written.transcript, known, watch)
        self.written = Written(after)
        if isinstance(expr, SpokenGen):
            self._speculated = None
        elif isinstance(expr, Transcription) and self._speculated is not None:
            self._speculated = self._speculated.after(variable.text)
        return variable

    # --- the user's code -----------------------------------------------------------------------

    async def call_tool(self, tool: Tool, early: RunningTool | None = None) -> object:
        """Call a tool whose arguments are values. Returns its result.

        Args:
            early: stands for the call of a tool before its turn.
        """
        running, tools = early or RunningTool(current_tool.get()), self.queue.tools
        if early is None:
            tools.append(running)
        token = current_tool.set(running)
        try:
            return await self._run.background.call_tool(
                tool.function, *tool.args, **dict(tool.kwargs)
            )
        except ProgramError as error:  # of a program that the tool ran
            raise ProgramError(str(tool), self._where, error) from error
        finally:
            current_tool.reset(token)
            running.has_ended = True
            if early is None:
                tools.remove(running)

    async def _append_result(self, tool: Tool, call: Coroutine[Any, Any, object]) -> Variable:
        variable = Variable.of(await call)
        self._append(variable.text, "tool", tool.name)
        return variable

    async def _call_now(self, tool: Tool) -> object:
        begin_s = time.monotonic()
        result = await self._prefilling(self.call_tool(tool), tool_times.soonest_s(tool.called))
        tool_times.took(tool.called, time.monotonic() - begin_s)
        return result

    async def _prefilling(self, call: Coroutine[Any, Any, object], tool_s: float | None) -> object:
        """Wait for a tool. If that takes long and text will be generated after it, meanwhile have
        the server compute the prompt up to here. `tool_s` is how long it will take at least."""
        times = times_to_send(self.written.transcript, tool_s)
        if not times or not global_config.enable_prefill_during_tools:
            return await call
        sending = asyncio.create_task(self._send_ahead(times))
        try:
            return await call
        finally:
            sending.cancel()  # what follows is sent anyway

    async def _send_ahead(self, times: Sequence[float]) -> None:
        transcript, now_s = self.written.transcript, asyncio.get_running_loop().time
        begin_s = now_s()
        for at_s in times:
            left_s = begin_s + at_s - now_s()
            if left_s < 0:  # the request before has just ended
                continue
            await asyncio.sleep(left_s)
            if self._will_generate() and await self._warm(transcript, self._run.backend.warm_ahead):
                self.written = Written(transcript.seen())

    def _will_generate(self) -> bool:
        """Whether the prompt goes on with text of the model, as far as is known."""
        return self._speculated is None and any(
            isinstance(operation, Gen | SpokenGen | Select | Fork)
            for operation in self.queue.upcoming()
        )

    async def _warm(
        self, transcript: Transcript, warm: Callable[[Prompt], Awaitable[Usage]]
    ) -> bool:
        """Send what requests to come begin with. Returns whether the server has it then.

        This only saves time. A chat template may reject an incomplete prompt, and any other
        problem shows up again in those requests, so its failure is not reported.
        """
        try:
            usage = await warm(transcript.prompt())
        except BackendError as error:
            logger.debug("warming failed: %s", error)
            return False
        self._run.usage += usage  # after the await: other streams add to it meanwhile
        return True

    async def _append_any_order(self, expr: AnyOrder, needed: Needed) -> None:
        texts = [
            part.value if isinstance(part, Text) else (await result_of(needed[part.name])).text
            for part in expr.segments
        ]
        run = self._run
        before = self.written.transcript
        order = arranged(expr, texts, before, run.backend, run.planned_orders)
        reusable = before.reusable
        if expr.reuses:
            reusable += places_of(order, len(before.text))
        for text in pieces_of(expr, order, before.orders):
            self._append(text)
        after = self.written.transcript
        self.written = Written(replace(after, orders=(*after.orders, order), reusable=reusable))

    def _begin_of(self, scope: str) -> int:
        """Where a scope that ends here begins. Scopes inside it that an exception has left are
        dropped."""
        while True:
            name, begin = self._scopes.pop()
            if name == scope:
                return begin

    # --- fork and join -------------------------------------------------------------------------

    async def warm_for_branches(self, num_branches: int) -> None:
        """Before a fork: send what its branches share to the server, so that they find it cached.
        Not if the server has (nearly) all of it, or will not be asked."""
        transcript = self.written.transcript
        if self._speculated is not None and self._speculated.sampling.temperature != 0:
            self._speculated = None  # one sample, and each branch draws its own
        if num_branches > 1 and self._speculated is None and transcript.is_worth_warming:
            await self._warm(transcript, self._run.backend.warm)
            self.written = Written(transcript.seen())  # if that failed, the branches send it

    async def _append_texts(self, operation: AppendTexts) -> None:
        num_spans = len(self.written.transcript.spans)
        texts = [
            (await result_of(read)).text[branch.forked_at :] for branch, read in operation.branches
        ]
        branches = tuple(branch for branch, _ in operation.branches)
        self.joins.append(JoinRecord(num_spans, branches, None))
        for text in texts:
            self._append(text)


async def with_values_awaited(tool: Tool, needed: Needed) -> Tool:
    """A tool with the values of variables in their place, once they exist."""
    values = {name: (await result_of(future)).value for name, future in needed.items()}
    return tool.with_values(values)
