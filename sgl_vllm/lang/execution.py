"""Runs a stream's operations: what each expression does to the prompt.

Owns the stream's prompt (its transcript, the text being generated, text generated ahead) and the
meaning of every operation. `gen` is in `generation.py`, queueing and errors are in `stream.py`.
Runs on the background loop; knows no protocol, which is the backends' job.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol  # Any: what a coroutine sends is not used

from sgl_vllm.lang.backends.base import logger
from sgl_vllm.lang.backends.requests import ScoreAnswer
from sgl_vllm.lang.errors import BackendError, ProgramError, UnsupportedError
from sgl_vllm.lang.generation import Generation, open_prompt
from sgl_vllm.lang.ir import (
    AnyOrder,
    Block,
    Computed,
    Gen,
    Making,
    RoleBegin,
    RoleEnd,
    Select,
    Show,
    SpokenGen,
    Text,
    Tool,
    Transcription,
    Values,
    Var,
    VarScopeBegin,
    VarScopeEnd,
    parts_of,
)
from sgl_vllm.lang.loop import result_of
from sgl_vllm.lang.making import make
from sgl_vllm.lang.operation_queue import Waits
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
    needed_by,
)
from sgl_vllm.lang.ordering import arranged, pieces_of, places_of
from sgl_vllm.lang.prefill_ahead import PrefillAhead
from sgl_vllm.lang.prompts import Prompt
from sgl_vllm.lang.run import Run
from sgl_vllm.lang.speculation import Ahead
from sgl_vllm.lang.text import check_unicode
from sgl_vllm.lang.tool_times import tool_times
from sgl_vllm.lang.transcript import SelectMeta, SpanKind, Timing, Transcript, Variable
from sgl_vllm.lang.usage import Usage
from sgl_vllm.lang.waiting import RunningTool, current_tool
from sgl_vllm.protocol.hints import Hints


@dataclass(frozen=True)
class Written:
    """A prompt's transcript, and what the running operation has generated so far: text, and the
    pieces of a file."""

    transcript: Transcript
    partial: str = ""
    pieces: tuple[bytes, ...] = ()


class Host(Protocol):
    """The stream whose operations are run."""

    @property
    def waits(self) -> Waits:
        """What its operations wait for."""

    def changed(self) -> None:
        """Text has been added."""

    def upcoming(self) -> Sequence[Operation]:
        """The operations that are queued behind the running one."""

    def hints_of(self, expr: Gen, num_own: int | None, is_last: bool) -> Hints:
        """Those of a generation that is being sent (see `Lookahead.hints`)."""

    def run_block(self, block: Block, variables: Needed) -> Awaitable[Values]:
        """Let a block write the prompt on a stream of its own."""


class Execution:
    """Runs the operations of one stream, one at a time.

    Invariant: `written` is replaced as a whole, so that every thread sees a transcript together
    with the partial text that follows it.
    """

    def __init__(self, run: Run, where: str, host: Host, transcript: Transcript) -> None:
        self.written = Written(transcript)
        self.joins: list[JoinRecord] = []
        self._run = run
        self._where = where
        self._host = host
        self._num_own: int | None = 0  # generations, as in `Lookahead.hints`
        self._ahead: Ahead | None = None
        self._scopes: list[tuple[str, int]] = []  # the open var_scopes, and where they begin

    def begin(self, transcript: Transcript, ahead: Ahead | None, *, is_cached: bool) -> None:
        """Continue what a parent has written. `is_cached` says whether the server has it."""
        self.written = Written(transcript)
        self._ahead = ahead
        self._num_own = 0 if is_cached else None

    def take_over(self, other: Execution) -> None:
        """Continue the same prompt from where `other` has written it to."""
        self.written = other.written
        self.joins = other.joins
        self._ahead = other._ahead
        self._num_own = other._num_own

    def stop(self) -> None:
        """Nothing is executed any more."""
        self.written = Written(self.written.transcript)

    async def execute(
        self, operation: Operation, needed: Needed
    ) -> Variable | Transcript | Values | None:
        """Run `operation`. Returns its variable if it makes one; for a Read, the transcript; for a
        Block, its variables by name."""
        transcript = self.written.transcript
        match operation:
            case Text(value):
                self._append(value)
            case RoleBegin(role):
                self._replace(transcript.turn_begun(role))
            case RoleEnd(role):
                self._replace(transcript.turn_ended(role))
            case Gen():
                return await self._timed(self._generate(operation))
            case Select():
                return await self._timed(self._select(operation))
            case Var(name):
                self._append((await result_of(needed[name])).text, "variable", name)
            case AnyOrder():
                await self._append_any_order(operation, needed)
            case Computed():
                return await self._compute(operation, needed)
            case Block():
                return await self._host.run_block(operation, needed)
            case Tool():
                tool = await filled(operation, needed)
                return await self._timed(self._append_result(tool, self._call_now(tool)))
            case EarlyTool(tool, result, _):
                result_to_come = self._prefilling(result_of(result), None)
                return await self._timed(self._append_result(tool, result_to_come))
            case Making():
                return await self._timed(self._make(operation, needed))
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
            case Fork():
                await self._fork(operation)
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
                self._num_own = None
            case _:
                raise TypeError(f"{type(operation).__name__} cannot be run")
        return None

    async def _timed(self, appending: Coroutine[Any, Any, Variable]) -> Variable:
        """Run what appends a span, and note on the span how long that took."""
        begin_s = self._run.elapsed_s
        variable = await appending
        timing = Timing(begin_s, self._run.elapsed_s)
        self.written = replace(self.written, transcript=self.written.transcript.timed(timing))
        return variable

    # --- the prompt ----------------------------------------------------------------------------

    def _append(self, text: str, kind: SpanKind = "text", name: str | None = None) -> None:
        """Append text that was not generated. ValueError for text that cannot be sent."""
        check_unicode(text)
        self.written = Written(self.written.transcript.appended(text, kind, name))
        if self._ahead is not None:
            self._ahead = self._ahead.after(text)

    def _replace(self, transcript: Transcript) -> None:
        """Take a transcript that text generated ahead does not continue."""
        self.written = Written(transcript)
        self._ahead = None

    def _show(self, partial: str) -> None:
        """Let readers see the text generated so far."""
        self.written = Written(self.written.transcript, partial)
        self._host.changed()

    def _show_media(self, text: str, piece: bytes) -> None:
        """Let readers have more text and the next piece of a file."""
        written = self.written
        pieces = (*written.pieces, piece) if piece else written.pieces
        self.written = Written(written.transcript, written.partial + text, pieces)
        self._host.changed()

    # --- the model -----------------------------------------------------------------------------

    async def _generate(self, expr: Gen) -> Variable:
        before = self.written.transcript
        if self._num_own is not None:
            self._num_own += 1
        hints = functools.partial(self._host.hints_of, expr, self._num_own)
        generation = Generation(expr, self._run, before, self._ahead, self._show, hints)
        result = await generation.result()
        self._ahead = result.ahead
        first = result.first
        after = before.appended(
            first.text, "gen", expr.name, forced=first.forced, usage=result.usage
        )
        self.written = Written(after.seen())
        return result.variable

    async def _select(self, expr: Select) -> Variable:
        self._ahead = None
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
            warm=before.is_worth_a_hint,
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

    async def _make(self, expr: Making, needed: Needed) -> Variable:
        known = {name: await result_of(future) for name, future in needed.items()}
        watch = self._show_media if self._run.is_streamed else None
        variable, after = await make(expr, self._run, self.written.transcript, known, watch)
        self.written = Written(after)
        if isinstance(expr, SpokenGen):
            self._ahead = None
        elif isinstance(expr, Transcription) and self._ahead is not None:
            self._ahead = self._ahead.after(variable.text)
        return variable

    # --- the user's code -----------------------------------------------------------------------

    async def _compute(self, expr: Computed, variables: Needed) -> Variable:
        variable = Variable.of("")
        for part in parts_of(await expr.function()):
            result = await self.execute(part, needed_by(part, variables))
            if isinstance(result, Variable):
                variable = result
            elif isinstance(result, Mapping) and expr.name is not None:
                variable = result[expr.name]
        return variable

    async def call(self, tool: Tool, early: RunningTool | None = None) -> object:
        """Call a tool whose arguments are values. Returns its result.

        Args:
            early: stands for the call of a tool before its turn.
        """
        running = early or RunningTool(self._host.waits, current_tool.get())
        if early is None:
            self._host.waits.tools.append(running)
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
                self._host.waits.tools.remove(running)

    async def _append_result(self, tool: Tool, call: Coroutine[Any, Any, object]) -> Variable:
        variable = Variable.of(await call)
        self._append(variable.text, "tool", tool.name)
        return variable

    async def _call_now(self, tool: Tool) -> object:
        begin_s = self._run.elapsed_s
        result = await self._prefilling(self.call(tool), tool_times.soonest_s(tool.called))
        tool_times.took(tool.called, self._run.elapsed_s - begin_s)
        return result

    async def _prefilling(self, call: Coroutine[Any, Any, object], tool_s: float | None) -> object:
        """Wait for a tool. If that takes long and text will be generated after it, meanwhile have
        the server compute the prompt up to here. `tool_s` is how long it will take at least."""
        transcript, warm = self.written.transcript, self._run.backend.warm_ahead
        ahead = PrefillAhead(transcript, lambda one: self._warm(one, warm), self._will_generate)
        with ahead.during(tool_s):
            result = await call
        if ahead.is_computed:
            self.written = Written(transcript.seen())
        return result

    def _will_generate(self) -> bool:
        """Whether the prompt goes on with text of the model, as far as is known."""
        return self._ahead is None and any(
            isinstance(operation, Gen | SpokenGen | Select | Fork)
            for operation in self._host.upcoming()
        )

    async def _warm(
        self, transcript: Transcript, warm: Callable[[Prompt], Awaitable[Usage]]
    ) -> bool:
        """Send what requests to come begin with (the frontend hint). Returns whether the server
        has it then.

        The hint only saves time. A chat template may reject an incomplete prompt, and any other
        problem shows up again in those requests, so its failure is not reported.
        """
        try:
            usage = await warm(transcript.prompt())
        except BackendError as error:
            logger.debug("a hint failed: %s", error)
            return False
        self._run.usage += usage  # after the await: other streams add to it meanwhile
        return True

    async def _append_any_order(self, expr: AnyOrder, needed: Needed) -> None:
        texts = [
            part.value if isinstance(part, Text) else (await result_of(needed[part.name])).text
            for part in expr.segments
        ]
        run = self._run
        order = await arranged(
            expr, texts, self.written.transcript, run.backend, run.planned_orders
        )
        before = self.written.transcript
        reusable = before.reusable
        if expr.reuses:
            reusable += places_of(expr, order, len(before.text))
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

    async def _fork(self, operation: Fork) -> None:
        """Send what the branches share to the server, then start them."""
        transcript = self.written.transcript
        if self._ahead is not None and self._ahead.sampling.temperature != 0:
            self._ahead = None  # one sample, and each branch draws its own
        is_cached = not transcript.is_worth_a_hint
        if len(operation.children) > 1 and self._ahead is None and transcript.is_worth_a_hint:
            is_cached = await self._warm(transcript, self._run.backend.warm)
            self.written = Written(transcript.seen())
        self._num_own = 0 if is_cached else None
        for child in operation.children:
            child.begin(self.written.transcript, self._ahead, is_cached=is_cached)

    async def _append_texts(self, operation: AppendTexts) -> None:
        num_spans = len(self.written.transcript.spans)
        texts = [
            (await result_of(read)).text[branch.forked_at :] for branch, read in operation.branches
        ]
        branches = tuple(branch for branch, _ in operation.branches)
        self.joins.append(JoinRecord(num_spans, branches, None))
        for text in texts:
            self._append(text)


async def filled(tool: Tool, needed: Needed) -> Tool:
    """A tool with the values of variables in their place, once they exist."""
    values = {name: (await result_of(future)).value for name, future in needed.items()}
    return tool.with_values(values)
