"""Forced reports: which part of an output was forced, for requests that ask.

Owns the record of forced runs and the report in the answer. Does not own when text is forced
(`jump.py`), or the number in `usage` (`routes/forced_usage.py`). A request that does not ask costs
one check of its arguments.

    output tokens    {   "   name   ":   "   Ann   ",   "   age   ...
    forced runs     [0              5)            [6            9)
    output text     {"name": "Ann", "age...
    in bytes        [0      10)  [13   20)

The report travels in `kv_transfer_params`, which vLLM's completion and chat answers pass through.
There is none where a KV connector needs the field for its own parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NotRequired, TypedDict  # Any: JSON

from vllm.logger import init_logger
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.request import Request

from sgl_vllm.degrade import Guard
from sgl_vllm.output_records import follow
from sgl_vllm.protocol.quoting import quoted
from sgl_vllm.protocol.request_keys import COUNT, REPORT
from sgl_vllm.step_hooks import StepHooks

logger = init_logger("vllm.sgl_vllm.report")


class ForcedReport(TypedDict):
    """The report as JSON: how many output tokens were forced, and the half-open intervals of the
    output's UTF-8 text that these tokens wrote. With the radix cache also which prompt tokens were
    not read from it, and why (`radix/misses.py`). With `COUNT`, it has only the number."""

    forced_tokens: int
    forced_bytes: NotRequired[list[list[int]]]
    cache: NotRequired[dict[str, Any] | None]


@dataclass(slots=True)
class Record:
    """The forced runs of one output.

    Attributes:
        runs: half-open intervals of output tokens, in order.
        ends: where the text of each token counted so far ends, in bytes of the output, after a 0.
    """

    request: Request
    runs: list[tuple[int, int]] = field(default_factory=list)
    ends: list[int] = field(default_factory=lambda: [0])

    @property
    def num_forced(self) -> int:
        return sum(end - start for start, end in self.runs)

    def report(self, token_bytes: Sequence[bytes], *, hides_last: bool) -> ForcedReport:
        """The report so far. Where a stop string cuts the text, `forced_bytes` may go beyond it.

        Args:
            hides_last: whether the last token is not part of the text.
        """
        ends = self.ends
        for token in self.request.output_token_ids[len(ends) - 1 :]:
            ends.append(ends[-1] + (len(token_bytes[token]) if token < len(token_bytes) else 0))
        if hides_last:
            ends[-1] = ends[-2:][0]
        intervals = [[ends[start], ends[end]] for start, end in self.runs]
        return ForcedReport(
            forced_tokens=self.num_forced,
            forced_bytes=[[start, end] for start, end in intervals if start < end],
        )


class ForcedReports(StepHooks):
    """The records of live requests that asked for a report.

    Args:
        token_bytes: returns the bytes of each token. Called when the first report is due.
        explain: what to report of the cache about a request, by its id; None without the tree.
    """

    def __init__(
        self,
        token_bytes: Callable[[], Sequence[bytes]],
        explain: Callable[[str], dict[str, Any] | None] | None = None,
    ) -> None:
        self._token_bytes = token_bytes
        self._explain = explain
        self._records: dict[str, Record] = {}
        self._guard = Guard("the forced report", "the answer has none", logger)

    def expect(self, request: Request) -> None:
        """Begin a record if a new request asks for one."""
        params = request.sampling_params
        if params is not None and params.extra_args and params.extra_args.get(REPORT):
            self._records[request.request_id] = Record(request)

    def forced(self, request: Request, start: int, end: int, *, is_jump: bool) -> None:
        """Tokens [start, end) of the output of `request` are forced."""
        record = self._records.get(request.request_id)
        if record is not None and is_jump and start < end:
            record.runs.append((start, end))

    def follows_outputs(self) -> bool:
        return bool(self._records)

    def after_update(
        self, outputs: Iterable[EngineCoreOutput], unfinished: Mapping[str, Request]
    ) -> None:
        """Put the report of each request into the outputs that must carry it."""
        for output, record, is_due in follow(self._records, outputs, unfinished):
            if is_due and output.kv_transfer_params is None:
                output.kv_transfer_params = self._answer(record, output.finish_reason)

    def _answer(
        self, record: Record, finish_reason: FinishReason | None
    ) -> dict[str, ForcedReport] | None:
        """None after an unexpected error, which must not end the engine."""
        params = record.request.sampling_params
        if params is not None and params.extra_args and params.extra_args[REPORT] == COUNT:
            return {REPORT: ForcedReport(forced_tokens=record.num_forced)} if record.runs else None
        shows_stop = params is not None and params.include_stop_str_in_output
        ended_by_token = finish_reason == FinishReason.STOP
        try:
            hides_last = ended_by_token and not shows_stop
            report = record.report(self._token_bytes(), hides_last=hides_last)
            if self._explain is not None:
                report["cache"] = self._explain(record.request.request_id)
            return {REPORT: report}
        except Exception:
            self._guard.record(f"request {quoted(record.request.request_id)}")
            return None
