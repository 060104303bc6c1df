"""Why a request with a format is refused, in the output that ends it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreOutput, FinishReason

from sgl_vllm.fsm.vllm.grammar import SglGrammar
from sgl_vllm.fsm.vllm.limits import CompilationLimitError, CompilersBusyError
from sgl_vllm.scheduler.refusals import Refusals


def with_format(grammar: object, request_id: str = "r") -> Any:
    return SimpleNamespace(
        request_id=request_id,
        sampling_params=SamplingParams(),
        structured_output_request=SimpleNamespace(grammar=grammar),
    )


def without_format() -> Any:
    return SimpleNamespace(
        request_id="r", sampling_params=SamplingParams(), structured_output_request=None
    )


def running(refusal: str | None) -> SglGrammar:
    grammar = SglGrammar.__new__(SglGrammar)
    grammar.refusal = refusal
    return grammar


def reason(request: Any, finish: FinishReason = FinishReason.ERROR) -> object:
    """What the last output of `request` says, after one that does not end it."""
    refusals = Refusals()
    refusals.expect(request)
    step = EngineCoreOutput("r", [1])
    refusals.after_update([step], {"r": request})
    assert step.stop_reason is None
    last = EngineCoreOutput("r", [], finish_reason=finish)
    refusals.after_update([last], {})
    return last.stop_reason


@pytest.mark.parametrize(
    "grammar",
    [ValueError("too large"), CompilationLimitError("too large"), running("too large")],
    ids=["invalid", "beyond a limit", "beyond a limit later"],
)
def test_a_refused_request_says_why(grammar) -> None:
    assert reason(with_format(grammar)) == "too large"


@pytest.mark.parametrize(
    "grammar",
    [CompilersBusyError("others take too long"), KeyError("a bug"), running(None), object()],
    ids=["busy", "an error of ours", "an error of ours later", "another backend's grammar"],
)
def test_what_is_not_the_formats_fault_is_no_refusal(grammar) -> None:
    assert reason(with_format(grammar)) is None


def test_only_errors_of_requests_with_a_format_get_a_reason() -> None:
    assert reason(without_format()) is None
    assert reason(with_format(running("too large")), FinishReason.ABORT) is None


def test_the_stop_token_of_a_request_that_ends_well_stays() -> None:
    refusals = Refusals()
    refusals.expect(with_format(running(None)))
    last = EngineCoreOutput("r", [7], finish_reason=FinishReason.STOP, stop_reason=7)
    refusals.after_update([last], {})
    assert last.stop_reason == 7
