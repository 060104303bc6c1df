"""What is refused before vLLM validates a format by compiling it, and where it validates.

No model is needed.
"""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.structured_output import backend_xgrammar

from sgl_vllm.fsm.vllm import frontend
from sgl_vllm.fsm.vllm.frontend import install_checks

ITEMS = {"type": "array", "minItems": 60_000_000}


@pytest.fixture(autouse=True)
def checks() -> None:
    install_checks()


ENGINE: Any = SimpleNamespace(
    input_processor=SimpleNamespace(
        model_config=SimpleNamespace(is_diffusion=False),
        structured_outputs_config=SimpleNamespace(backend="auto"),
        tokenizer=object(),
    )
)


def add(*requests: SamplingParams) -> list[Any]:
    """Add requests together. What vLLM's `add_request` gets of each, after it has validated it."""
    inputs = ENGINE.input_processor

    async def add_request(engine, request_id, prompt, params) -> Any:
        params._validate_structured_outputs(
            inputs.model_config, inputs.structured_outputs_config, inputs.tokenizer
        )
        return params.structured_outputs

    async def add_all() -> Any:
        adding = [
            frontend._validated_in_thread(add_request, ENGINE, str(number), {}, params)
            for number, params in enumerate(requests)
        ]
        return await asyncio.gather(*adding, return_exceptions=True)

    return asyncio.run(add_all())


def test_a_format_is_validated_once_and_not_in_the_event_loop(monkeypatch) -> None:
    validated_in: list[threading.Thread] = []
    validate = backend_xgrammar.validate_xgrammar_grammar

    def record(params: SamplingParams) -> None:
        validated_in.append(threading.current_thread())
        validate(params)

    monkeypatch.setattr(backend_xgrammar, "validate_xgrammar_grammar", record)
    (added,) = add(SamplingParams(structured_outputs=StructuredOutputsParams(regex="[a-z]+")))
    assert added.regex == "[a-z]+" and added._backend == "xgrammar"
    assert len(validated_in) == 1
    assert validated_in[0] is not threading.main_thread()


def test_the_prompts_of_a_batch_share_a_format_that_is_validated_for_each() -> None:
    """vLLM's validation replaces the choice by a grammar."""
    shared = StructuredOutputsParams(choice=["yes", "no"])
    added = add(*[SamplingParams(structured_outputs=shared) for _ in range(50)])
    assert {(one.choice, "yes" in one.grammar, one._backend) for one in added} == {
        (None, True, "xgrammar")
    }
    assert shared.choice == ["yes", "no"] and shared.grammar is None


def test_a_wrong_format_is_refused_as_by_vllm() -> None:
    (refused,) = add(SamplingParams(structured_outputs=StructuredOutputsParams(json="{")))
    assert isinstance(refused, VLLMValidationError)
    (refused,) = add(SamplingParams(structured_outputs=StructuredOutputsParams(json=ITEMS)))
    assert isinstance(refused, VLLMValidationError) and "at most" in str(refused)


def test_a_grammar_of_llama_cpp_is_validated_in_xgrammars_dialect() -> None:
    sent = SamplingParams(
        structured_outputs=StructuredOutputsParams(grammar='root ::= | "a" .  # any')
    )
    lark = SamplingParams(structured_outputs=StructuredOutputsParams(grammar='start: "a" |'))
    taken, as_it_is = add(sent, lark)
    assert taken.grammar == 'root ::=() | "a" [^]  # any'
    assert isinstance(as_it_is, Exception) or as_it_is.grammar == 'start: "a" |'
