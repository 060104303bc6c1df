"""Forced tokens in `usage`: `completion_tokens_details.accepted_prediction_tokens`.

OpenAI's clients know this field, and read it from streams too. Owns which requests ask the engines
for the count, and where answers show it. Does not own the count (`jump/report.py`).

    HTTP request ---- tally ---- usage of its answer: the sum
                        |
        each engine request with a format: the number so far, in its outputs
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any  # Any: fields of vLLM's
from weakref import WeakKeyDictionary

from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.entrypoints.serve.engine.protocol import CompletionTokenUsageInfo, UsageInfo
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.output_processor import RequestState

from sgl_vllm.protocol.request_keys import COUNT, FORCED, REPORT
from sgl_vllm.vllm_api.patching import wrap

Tally = dict[str, int]
"""Forced tokens of one answer, by the engine requests that it is made of."""

_tally: ContextVar[Tally | None] = ContextVar("sgl_vllm_forced", default=None)
_tallies: WeakKeyDictionary[RequestState, Tally] = WeakKeyDictionary()


def begin_answer() -> None:
    """Start a new tally: later output of the current task belongs to another answer."""
    _tally.set({})


class TallyMiddleware:
    """Begins an answer for each HTTP request, which runs in a task of its own."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begin_answer()
        await self._app(scope, receive, send)


def ask(params: SamplingParams | None) -> None:
    """Let a request with a format, whose output may be forced, ask for the number."""
    if params is not None and params.structured_outputs is not None and _tally.get() is not None:
        asked = params.extra_args or {}
        params.extra_args = {**asked, REPORT: asked.get(REPORT) or COUNT}


def follow(state: RequestState) -> None:
    """The outputs of a request that may have asked belong to the current answer."""
    if (tally := _tally.get()) is not None:
        _tallies[state] = tally


def take(state: RequestState, output: EngineCoreOutput) -> None:
    """Note the number in an output. Removes it if the client did not ask for a report."""
    answers = output.kv_transfer_params or {}
    if (report := answers.get(REPORT)) is None:
        return
    if (tally := _tallies.get(state)) is not None:
        tally[output.request_id] = report["forced_tokens"]
    if report.keys() == {"forced_tokens"}:
        others = {key: answer for key, answer in answers.items() if key != REPORT}
        output.kv_transfer_params = others or None


def show_in_usage() -> None:
    """From now on, the `usage` of each answer has its forced tokens, if there are any."""

    @wrap(UsageInfo, "__init__")
    def with_forced(original: Any, usage: UsageInfo, **fields: Any) -> None:
        original(usage, **fields)
        num_forced = sum((_tally.get() or {}).values())
        if num_forced := min(num_forced, usage.completion_tokens or 0):  # a stop string cuts both
            known = usage.completion_tokens_details
            details = {**(known.model_dump() if known else {}), FORCED: num_forced}
            usage.completion_tokens_details = CompletionTokenUsageInfo(**details)
