"""Forced runs of tokens as intervals of bytes, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreOutput, FinishReason

from sgl_vllm.jump.report import ForcedReports
from sgl_vllm.protocol.request_keys import REPORT

PIECES = [b"", b"a", b"bc", "é".encode(), b"\xe6\x97", b"\xa5"]
TOKENS = st.lists(st.integers(0, len(PIECES)), max_size=30)  # one more than there are pieces


def asking(request_id: str = "r", **params: Any) -> Any:
    params = {"extra_args": {REPORT: 1}, **params}
    return SimpleNamespace(
        request_id=request_id, sampling_params=SamplingParams(**params), output_token_ids=[]
    )


def output(finish: FinishReason | None, request_id: str = "r") -> EngineCoreOutput:
    return EngineCoreOutput(request_id=request_id, new_token_ids=[], finish_reason=finish)


def text_of(tokens: list[int]) -> bytes:
    return b"".join(PIECES[token] for token in tokens if token < len(PIECES))


@given(st.lists(st.tuples(TOKENS, st.booleans()), max_size=8), st.booleans())
def test_every_interval_is_where_its_tokens_are_in_the_text(steps, has_stop_string):
    """Steps of tokens, of which some are forced; with a stop string each step is reported."""
    reports = ForcedReports(lambda: PIECES)
    request = asking(stop=["never"] if has_stop_string else [])
    reports.expect(request)
    forced: list[bytes] = []
    num_forced = 0
    for tokens, is_forced in steps:
        start = len(request.output_token_ids)
        request.output_token_ids += tokens
        if is_forced:
            reports.forced(request, start, start + len(tokens), is_jump=True)
            forced.append(text_of(tokens))
            num_forced += len(tokens)
        step = output(None)
        reports.after_update([step], {"r": request})
        assert (step.kv_transfer_params is not None) == has_stop_string
    last = output(FinishReason.LENGTH)
    reports.after_update([last], {})
    report = last.kv_transfer_params[REPORT]
    text = text_of(request.output_token_ids)
    assert report["forced_tokens"] == num_forced
    pieces = [text[start:end] for start, end in report["forced_bytes"]]
    assert pieces == [piece for piece in forced if piece]


def told(request: Any, finish: FinishReason) -> dict[str, Any]:
    reports = ForcedReports(lambda: PIECES)
    reports.expect(request)
    request.output_token_ids += [1, 2, 3]
    reports.forced(request, 1, 3, is_jump=True)
    last = output(finish)
    reports.after_update([last], {})
    return last.kv_transfer_params[REPORT]


def test_the_token_that_stops_an_output_has_no_bytes_unless_it_is_kept():
    assert told(asking(), FinishReason.LENGTH)["forced_bytes"] == [[1, 5]]
    assert told(asking(), FinishReason.STOP)["forced_bytes"] == [[1, 3]]
    kept = asking(stop_token_ids=[3], include_stop_str_in_output=True)
    assert told(kept, FinishReason.STOP)["forced_bytes"] == [[1, 5]]


def test_an_answer_that_carries_something_else_is_left_alone():
    reports = ForcedReports(lambda: PIECES)
    reports.expect(asking())
    last = EngineCoreOutput("r", [], finish_reason=FinishReason.LENGTH, kv_transfer_params={"a": 1})
    reports.after_update([last], {})
    assert last.kv_transfer_params == {"a": 1}


def test_an_unexpected_error_costs_the_report_and_nothing_else(caplog):
    def broken() -> list[bytes]:
        raise RuntimeError("no vocabulary")

    reports = ForcedReports(broken)
    reports.expect(asking())
    last = output(FinishReason.LENGTH)
    reports.after_update([last], {})
    assert last.kv_transfer_params is None


def test_only_requests_that_ask_are_recorded():
    for extra_args in (None, {}, {REPORT: 0}, {"other": 1}):
        reports = ForcedReports(lambda: PIECES)
        reports.expect(asking(extra_args=extra_args))
        last = output(FinishReason.LENGTH)
        reports.after_update([last], {})
        assert last.kv_transfer_params is None
