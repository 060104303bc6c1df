"""What is refused before vLLM validates a format by compiling it, and where it validates.

No model is needed.
"""

from __future__ import annotations

import asyncio
import re
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.structured_output import backend_xgrammar

from sgl_vllm.fsm.vllm import frontend
from sgl_vllm.fsm.vllm.frontend import install_checks

GBNF = 'root ::= | "a" .  # any'
ITEMS = {"type": "array", "minItems": 60_000_000}


@pytest.fixture(autouse=True)
def checks() -> None:
    install_checks()


class Inputs:
    """What is asked of vLLM's input processor."""

    model_config = SimpleNamespace(is_diffusion=False)
    structured_outputs_config = SimpleNamespace(backend="auto")
    tokenizer = object()


ENGINE: Any = SimpleNamespace(input_processor=Inputs())


@pytest.fixture(autouse=True)
def new_engine(monkeypatch) -> None:
    monkeypatch.setattr(ENGINE, "input_processor", Inputs())


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


@pytest.fixture
def validated_in(monkeypatch) -> list[threading.Thread]:
    """The threads in which vLLM has validated a format, one for each time."""
    threads: list[threading.Thread] = []
    validate = backend_xgrammar.validate_xgrammar_grammar

    def record(params: SamplingParams) -> None:
        threads.append(threading.current_thread())
        validate(params)

    monkeypatch.setattr(backend_xgrammar, "validate_xgrammar_grammar", record)
    return threads


def test_a_format_is_validated_once_and_not_in_the_event_loop(validated_in) -> None:
    (added,) = add(SamplingParams(structured_outputs=StructuredOutputsParams(regex="[a-z]+")))
    assert added.regex == "[a-z]+" and added._backend == "xgrammar"
    assert len(validated_in) == 1
    assert validated_in[0] is not threading.main_thread()


@pytest.mark.parametrize(
    "spec",
    [{"regex": "[a-z]+"}, {"choice": ["a", "b"]}, {"json": {"enum": [1]}}, {"grammar": GBNF}],
)
def test_a_format_that_was_valid_is_not_validated_again(validated_in, spec) -> None:
    added = [
        add(SamplingParams(structured_outputs=StructuredOutputsParams(**spec)))[0] for _ in range(3)
    ]
    assert added[0] == added[1] == added[2]
    assert {(one._backend, one._backend_was_auto) for one in added} == {("xgrammar", True)}
    assert len(validated_in) == 1
    add(SamplingParams(structured_outputs=StructuredOutputsParams(regex="[a-z]*")))
    assert len(validated_in) == 2


def test_what_is_known_of_formats_is_bounded(monkeypatch, validated_in) -> None:
    monkeypatch.setattr(frontend, "MAX_VALID_FORMATS", 3)
    for pattern in ("a", "b", "c", "d", "d", "a", "a"):
        add(SamplingParams(structured_outputs=StructuredOutputsParams(regex=pattern)))
    assert len(validated_in) == 5
    monkeypatch.setattr(frontend, "MAX_CHANGE_CHARS", 300)
    for choice in (["a"], ["a"], ["b" * 300], ["b" * 300]):
        add(SamplingParams(structured_outputs=StructuredOutputsParams(choice=choice)))
    assert len(validated_in) == 5 + 3


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


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ('city: "Paris" | "Rome"', "Lark's syntax .*no rule `start`"),
        ('city ::= "Paris" | "Rome"', "EBNF.*no rule `root`"),
        ('root ::= "Paris" | (', "Invalid grammar specification: EBNF .*line 1"),
        ('start: "a" "b', "Invalid grammar specification: Lark .*line 1"),
    ],
)
def test_an_error_in_a_grammar_says_what_it_is(grammar: str, message: str) -> None:
    ENGINE.input_processor.structured_outputs_config = SimpleNamespace(backend="xgrammar")
    (refused,) = add(SamplingParams(structured_outputs=StructuredOutputsParams(grammar=grammar)))
    assert isinstance(refused, VLLMValidationError)
    assert re.search(message, str(refused)), refused


def test_a_grammar_of_llama_cpp_is_validated_in_xgrammars_dialect() -> None:
    sent = SamplingParams(structured_outputs=StructuredOutputsParams(grammar=GBNF))
    ENGINE.input_processor.structured_outputs_config = SimpleNamespace(backend="xgrammar")
    lark = SamplingParams(structured_outputs=StructuredOutputsParams(grammar='start: "a" |'))
    taken, as_it_is = add(sent, lark)
    assert taken.grammar == 'root ::=() | "a" [^]  # any'
    assert isinstance(as_it_is, Exception) or as_it_is.grammar == 'start: "a" |'
