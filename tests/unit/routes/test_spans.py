"""Our attributes on vLLM's spans, made by vLLM's own code."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.metrics.stats import IterationStats, RequestStateStats

from sgl_vllm.routes.spans import add_to_spans
from sgl_vllm.scheduler.traces import RequestTraces


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    monkeypatch.setattr(trace, "get_tracer", lambda name: provider.get_tracer(name))
    yield exporter
    provider.shutdown()


def processor() -> OutputProcessor:
    return OutputProcessor(None, log_stats=True, tracing_enabled=True)


def trace_request(processor: OutputProcessor, output: EngineCoreOutput) -> None:
    state = SimpleNamespace(
        stats=RequestStateStats(arrival_time=time.time()),
        prompt_token_ids=[1, 2, 3],
        prompt_embeds=None,
        external_req_id=output.request_id,
        top_p=None,
        max_tokens_param=None,
        temperature=None,
        n=None,
    )
    processor.do_tracing(output, state, IterationStats())


def finished(name: str) -> EngineCoreOutput:
    return EngineCoreOutput(name, [1], finish_reason=FinishReason.STOP)


def test_a_span_has_its_own_requests_attributes_beside_vllms(exporter) -> None:
    traces = RequestTraces(block_size=16)
    add_to_spans(tracing := processor())
    traces.expect(request := SimpleNamespace(request_id="a", sampling_params=None))
    traces.jumped(request, 0, 7)
    traces.after_update([jumped := finished("a")], {})
    trace_request(tracing, jumped)
    trace_request(tracing, finished("b"))  # by an engine without the plugin
    first, second = ({**span.attributes} for span in exporter.get_finished_spans())
    assert first["gen_ai.request.id"] == "a"
    assert first["gen_ai.usage.prompt_tokens"] == 3
    assert first["sgl_vllm.forced_tokens"] == 7
    assert not [name for name in second if name.startswith("sgl_vllm")]
