"""What is refused before vLLM validates a format by compiling it. No model is needed."""

from __future__ import annotations

import json
import time

import psutil
import pytest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.structured_output import backend_xgrammar

from sgl_vllm.fsm.vllm.frontend import install_checks

ITEMS = {"type": "array", "minItems": 60_000_000}
TAG = {"structures": [{"begin": "<a>", "schema": ITEMS, "end": ""}], "triggers": ["<a>"]}


@pytest.fixture(autouse=True)
def checks() -> None:
    install_checks()


@pytest.mark.parametrize(
    "structured",
    [
        StructuredOutputsParams(json=ITEMS),
        StructuredOutputsParams(json=json.dumps(ITEMS)),
        StructuredOutputsParams(structural_tag=json.dumps(TAG)),
        StructuredOutputsParams(regex="(a{100000}){100000}"),
        StructuredOutputsParams(grammar='root ::= "a"{1000000000}'),
    ],
)
def test_a_count_above_its_bound_costs_nothing(structured: StructuredOutputsParams) -> None:
    params = SamplingParams(structured_outputs=structured)
    before, begun = psutil.Process().memory_info().rss, time.monotonic()
    with pytest.raises(VLLMValidationError, match="at most"):
        backend_xgrammar.validate_xgrammar_grammar(params)
    assert time.monotonic() - begun < 1
    assert psutil.Process().memory_info().rss < before + (32 << 20)


def test_other_formats_are_validated_as_before() -> None:
    validate = backend_xgrammar.validate_xgrammar_grammar
    validate(SamplingParams(structured_outputs=StructuredOutputsParams(json={"type": "array"})))
    with pytest.raises(VLLMValidationError, match="Failed to transform json schema"):
        wrong = StructuredOutputsParams(json={"type": "array", "minItems": 3, "maxItems": 1})
        validate(SamplingParams(structured_outputs=wrong))
    with pytest.raises(VLLMValidationError, match="Invalid JSON"):
        validate(SamplingParams(structured_outputs=StructuredOutputsParams(json="{")))
