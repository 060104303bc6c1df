"""The attributes `sgl_vllm.*` on the spans that vLLM makes of its requests.

Owns what happens in vLLM's API process, only if vLLM traces: the attributes that have come with a
request's last output (`scheduler/traces.py`) are set on its span when vLLM starts it, by a span
processor, which is OpenTelemetry's own hook.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any  # Any: OpenTelemetry's values

from opentelemetry import trace
from opentelemetry.sdk.trace import Span, SpanProcessor
from vllm.logger import init_logger
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.output_processor import OutputProcessor

from sgl_vllm.scheduler.traces import take_attributes
from sgl_vllm.vllm_api.patching import adopt

logger = init_logger("vllm.sgl_vllm.spans")

_attributes: ContextVar[dict[str, Any] | None] = ContextVar("sgl_vllm_attributes", default=None)
"""Of the request whose span is being made."""


class _AddAttributes(SpanProcessor):
    def on_start(self, span: Span, parent_context: Any = None) -> None:
        if attributes := _attributes.get():
            span.set_attributes(attributes)


class _TracingOutputProcessor(OutputProcessor):
    """Added to a live processor."""

    def do_tracing(self, engine_core_output: EngineCoreOutput, *args: Any, **kwargs: Any) -> None:
        token = _attributes.set(take_attributes(engine_core_output))
        try:
            super().do_tracing(engine_core_output, *args, **kwargs)
        finally:
            _attributes.reset(token)


def add_to_spans(processor: OutputProcessor) -> None:
    """Let the spans of `processor`, which traces, have our attributes; a warning if it cannot."""
    provider = trace.get_tracer_provider()
    if type(processor) is not OutputProcessor or not hasattr(provider, "add_span_processor"):
        logger.warning("no sgl_vllm.* attributes on spans: this vLLM traces in another way")
        return
    provider.add_span_processor(_AddAttributes())
    adopt(processor, _TracingOutputProcessor)
