"""Why an engine refuses the format of a request, in the output that ends the request.

Owns what counts as the client's error: an invalid format, one that no text satisfies, one beyond a
limit. Does not own how the client learns of it (`routes/incoming.py`). The reason travels in
`stop_reason`, which vLLM leaves empty for requests that end in an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.request import Request

from sgl_vllm.fsm.vllm.grammar import SglGrammar
from sgl_vllm.output_records import follow
from sgl_vllm.step_hooks import StepHooks


class Refusals(StepHooks):
    """Follows requests with a format until they end."""

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}

    def expect(self, request: Request) -> None:
        """Follow a new request if it has a format."""
        if request.structured_output_request is not None:
            self._requests[request.request_id] = request

    def follows_outputs(self) -> bool:
        return bool(self._requests)

    def after_update(
        self, outputs: Iterable[EngineCoreOutput], unfinished: Mapping[str, Request]
    ) -> None:
        """Put the reason into the output of each request that is refused. Cost: as of `follow`."""
        for output, request, _ in follow(self._requests, outputs, unfinished):
            if output.finish_reason == FinishReason.ERROR and (reason := _reason(request)):
                output.stop_reason = reason


def _reason(request: Request) -> str | None:
    """None if the engine failed, which vLLM tells the client with status 500."""
    structured = request.structured_output_request
    grammar = structured.grammar if structured is not None else None
    if isinstance(grammar, SglGrammar):
        return grammar.refusal
    return str(grammar) if isinstance(grammar, ValueError) else None
