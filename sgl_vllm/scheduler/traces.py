"""The plugin's attributes on the span of a traced request.

Owns the record of each request, kept only if vLLM traces (`--otlp-traces-endpoint`), and its way to
vLLM's API process: in the headers of an output, the one field that vLLM has for tracing. There
`routes/spans.py` takes it out again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from sgl_vllm.jump.records import follow
from sgl_vllm.step_hooks import StepHooks

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.request import Request

SPAN_HEADER = "sgl_vllm"
"""The key in an output's `trace_headers`. The value is the attributes as JSON."""


@dataclass(slots=True)
class RequestTrace:
    """The attributes of a request's span, without their prefix `sgl_vllm.`.

    Attributes:
        cached_tokens: prompt tokens found in the tree, or with radix off in vLLM's own cache.
        partial_block_cached_tokens: those of them in the last, partial block of the hit.
        connector_cached_tokens: further prompt tokens that a KV connector had.
        jumps, forced_tokens: runs of forced tokens in the output, and the tokens in them.
        overtakes: how many later requests were admitted before this one.
    """

    cached_tokens: int = 0
    partial_block_cached_tokens: int = 0
    connector_cached_tokens: int = 0
    jumps: int = 0
    forced_tokens: int = 0
    overtakes: int = 0


class RequestTraces(StepHooks):
    """The records of all live requests."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._records: dict[str, RequestTrace] = {}

    def expect(self, request: Request) -> None:
        self._records[request.request_id] = RequestTrace()

    def admitted(self, request: Request, overtakes: int) -> None:
        """`request` was admitted, after `overtakes` later requests. May happen again after a
        preemption."""
        if (trace := self._records.get(request.request_id)) is not None:
            trace.overtakes += overtakes

    def jumped(self, request: Request, start: int, end: int) -> None:
        """Tokens [start, end) of the output of `request` were forced."""
        if (trace := self._records.get(request.request_id)) is not None:
            trace.jumps += 1
            trace.forced_tokens += end - start

    def after_update(
        self, outputs: Iterable[EngineCoreOutput], unfinished: Mapping[str, Request]
    ) -> None:
        """Put the record of each request into the outputs that must carry it."""
        for output, trace, is_due in follow(self._records, outputs, unfinished):
            if (prefill := output.prefill_stats) is not None:
                trace.cached_tokens = prefill.num_local_cached_tokens
                trace.partial_block_cached_tokens = trace.cached_tokens % self._block_size
                trace.connector_cached_tokens = prefill.num_external_cached_tokens
            if is_due:
                headers = {SPAN_HEADER: json.dumps(asdict(trace))}
                output.trace_headers = {**(output.trace_headers or {}), **headers}


def take_attributes(output: EngineCoreOutput) -> dict[str, int]:
    """Remove the attributes from an output's headers, which are then as vLLM made them."""
    headers = dict(output.trace_headers or {})
    text = headers.pop(SPAN_HEADER, None)
    if text is None:
        return {}
    output.trace_headers = headers or None
    return {f"sgl_vllm.{name}": value for name, value in json.loads(text).items()}
