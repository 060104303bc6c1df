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


def with_format(grammar: object) -> Any:
    return SimpleNamespace(grammar=grammar)


def running(refusal: str | None) -> SglGrammar:
    grammar = SglGrammar.__new__(SglGrammar)
    grammar.refusal = refusal
    return grammar


@pytest.mark.parametrize(
    ("structured", "finish", "reason"),
    [
        pytest.param(with_format(ValueError("large")), FinishReason.ERROR, "large", id="invalid"),
        pytest.param(
            with_format(CompilationLimitError("large")), FinishReason.ERROR, "large", id="limit"
        ),
        pytest.param(with_format(running("large")), FinishReason.ERROR, "large", id="limit later"),
        pytest.param(with_format(CompilersBusyError("busy")), FinishReason.ERROR, None, id="busy"),
        pytest.param(with_format(KeyError("a bug")), FinishReason.ERROR, None, id="our error"),
        pytest.param(with_format(running(None)), FinishReason.ERROR, None, id="our error later"),
        pytest.param(with_format(object()), FinishReason.ERROR, None, id="another backend"),
        pytest.param(with_format(running("large")), FinishReason.ABORT, None, id="aborted"),
        pytest.param(None, FinishReason.ERROR, None, id="no format"),
        pytest.param(with_format(running(None)), FinishReason.STOP, 7, id="ends well"),
    ],
)
def test_only_what_is_the_formats_fault_is_told_in_the_last_output(structured, finish, reason):
    request: Any = SimpleNamespace(
        request_id="r", sampling_params=SamplingParams(), structured_output_request=structured
    )
    refusals = Refusals()
    refusals.expect(request)
    step = EngineCoreOutput("r", [1])
    refusals.after_update([step], {"r": request})
    assert step.stop_reason is None
    stop_token = 7 if finish == FinishReason.STOP else None
    last = EngineCoreOutput("r", [], finish_reason=finish, stop_reason=stop_token)
    refusals.after_update([last], {})
    assert last.stop_reason == reason
