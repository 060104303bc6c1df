"""What a request's span is told, from the engine's outputs to vLLM's API process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.metrics.stats import PrefillStats

from sgl_vllm.scheduler.traces import RequestTraces, take_attributes

CALLER = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


def request(name: str = "r", stop: Any = None) -> Any:
    return SimpleNamespace(request_id=name, sampling_params=SimpleNamespace(stop=stop))


def output(name: str = "r", **fields: Any) -> EngineCoreOutput:
    return EngineCoreOutput(request_id=name, new_token_ids=[1], **fields)


def arrived(sent: EngineCoreOutput) -> EngineCoreOutput:
    """As it is after the way from the engine's process."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=EngineCoreOutput)


def test_all_that_happened_to_a_request_is_with_its_last_output_alone() -> None:
    traces = RequestTraces(block_size=16)
    traces.expect(one := request())
    traces.admitted(one, 3)
    first = output(
        prefill_stats=PrefillStats(num_local_cached_tokens=37, num_external_cached_tokens=64),
        trace_headers=CALLER,
    )
    traces.jumped(one, 0, 5)
    traces.after_update([first], {"r": one})
    traces.admitted(one, 1)  # it was preempted, and waited again
    traces.jumped(one, 9, 11)
    last = output(finish_reason=FinishReason.STOP, trace_headers=CALLER)
    traces.after_update([last], {})
    assert take_attributes(arrived(first)) == {}
    last = arrived(last)
    assert take_attributes(last) == {
        "sgl_vllm.cached_tokens": 37,
        "sgl_vllm.partial_block_cached_tokens": 5,
        "sgl_vllm.connector_cached_tokens": 64,
        "sgl_vllm.jumps": 2,
        "sgl_vllm.forced_tokens": 7,
        "sgl_vllm.overtakes": 4,
    }
    assert last.trace_headers == CALLER


def test_with_stop_strings_each_output_has_what_there_is_so_far() -> None:
    traces = RequestTraces(block_size=16)
    traces.expect(one := request(stop=["x"]))
    traces.jumped(one, 0, 5)
    traces.after_update([sent := output()], {"r": one})
    assert take_attributes(sent)["sgl_vllm.forced_tokens"] == 5


@pytest.mark.parametrize("headers", [None, CALLER])
def test_without_attributes_headers_stay_as_they_are(headers: Any) -> None:
    sent = output(finish_reason=FinishReason.STOP, trace_headers=headers)
    RequestTraces(block_size=16).after_update([sent], {})
    assert take_attributes(sent) == {}
    assert sent.trace_headers == headers


def test_nothing_is_kept_of_requests_that_were_aborted() -> None:
    traces = RequestTraces(block_size=16)
    for name in "abc":
        traces.expect(request(name))
    traces.after_update([output("b", finish_reason=FinishReason.LENGTH)], {"c": request("c")})
    assert list(traces._records) == ["c"]
