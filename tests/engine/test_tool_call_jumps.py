"""Jumps in tool calls: several calls in an answer, and calls after the model has reasoned."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.engine.engine import Ask, Engine, tokens_of, words

NUM_REQUESTS = 4
MAX_TOKENS = 150
MIN_TOKENS = 80
"""So that an answer has several calls. The model would end it after one."""

SPARE_PASSES = 2
"""Of each request."""


def function(**choices: list[Any]) -> dict[str, Any]:
    """A schema whose arguments are one of some values each."""
    return {
        "type": "object",
        "properties": {name: {"enum": values} for name, values in choices.items()},
        "required": [*choices],
        "additionalProperties": False,
    }


FUNCTIONS = {
    "get_weather": function(city=["Rome", "Reading", "Oslo"], unit=["celsius", "fahrenheit"]),
    "get_time": function(time_zone=["UTC", "CET"], twelve_hours=[True, False]),
}
CALLS = {  # as vLLM's parser for Hermes has them
    "type": "tags_with_separator",
    "separator": "",
    "at_least_one": True,
    "tags": [
        {
            "type": "tag",
            "begin": f'<tool_call>\n{{"name": "{name}", "arguments": ',
            "content": {"type": "json_schema", "json_schema": schema},
            "end": "}\n</tool_call>",
        }
        for name, schema in FUNCTIONS.items()
    ],
}


def calling(max_tokens: int = MAX_TOKENS) -> SamplingParams:
    tag = json.dumps({"type": "structural_tag", "format": CALLS})
    structured = StructuredOutputsParams(structural_tag=tag)
    return SamplingParams(
        temperature=0,
        max_tokens=max_tokens,
        min_tokens=min(max_tokens, MIN_TOKENS),
        structured_outputs=structured,
    )


def num_valid_calls(text: str) -> int:
    """Of calls that are complete. Nothing but calls may be there."""
    calls = re.findall(r"<tool_call>\n(.*?)\n</tool_call>", text, re.DOTALL)
    rest = re.sub(r"<tool_call>\n.*?\n</tool_call>", "", text, flags=re.DOTALL)
    assert rest == "" or '<tool_call>\n{"name": "'.startswith(rest[:21])
    for call in map(json.loads, calls):
        jsonschema.validate(call["arguments"], FUNCTIONS[call["name"]])
    return len(calls)


@pytest.fixture(scope="module")
def engine(start) -> Engine:
    return start(plugin={"self_check": "off"}, structured_outputs_config={"backend": "xgrammar"})


def num_forced(engine: Engine) -> int:
    counters = engine.scheduler.sgl_vllm.stats().jump_forward
    assert counters is not None
    return counters.forced_tokens


def test_several_calls_take_a_pass_for_each_undecided_token(engine):
    engine.run([Ask(words(20), calling(1))])  # the format is compiled
    num_calls = 0
    for number in range(NUM_REQUESTS):
        engine.reset_counts()
        before = num_forced(engine)
        (answer,) = engine.run([Ask(words(20, seed=number + 1), calling())])
        num_undecided = len(tokens_of(answer)) - (num_forced(engine) - before)
        assert engine.forward_passes <= num_undecided + SPARE_PASSES
        assert num_undecided < 0.5 * len(tokens_of(answer))
        num_calls += num_valid_calls(answer.outputs[0].text)
    assert num_calls > NUM_REQUESTS
    stats = engine.scheduler.sgl_vllm.stats()
    assert stats.fsm is not None and stats.fsm.ours == 1


def test_calls_after_reasoning_jump_too(engine, monkeypatch):
    prompt = words(20, seed=9)
    (free,) = engine.run([Ask(prompt, SamplingParams(temperature=0, max_tokens=12, min_tokens=12))])
    thought = tokens_of(free)
    last = next(n for n in range(4, 12) if thought[n] not in thought[:n])

    class Reasoner:
        """The token that ends the thought has no text of its own in other parsers."""

        def __init__(self, tokenizer: object, **kwargs: Any) -> None:
            pass

        def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
            return False

        def is_reasoning_end_streaming(
            self, input_ids: Sequence[int], delta_ids: Sequence[int]
        ) -> bool:
            return thought[last] in delta_ids

    monkeypatch.setattr(engine.core.structured_output_manager, "reasoner_cls", Reasoner)
    engine.reset_counts()
    before = num_forced(engine)
    (answer,) = engine.run([Ask(prompt, calling())])
    tokens = tokens_of(answer)
    assert tokens[: last + 1] == thought[: last + 1]
    num_undecided = len(tokens) - (num_forced(engine) - before)
    assert engine.forward_passes <= num_undecided + SPARE_PASSES
    assert num_forced(engine) - before > 0.5 * (len(tokens) - last - 1)
    text = engine.llm.get_tokenizer().decode(tokens[last + 1 :], skip_special_tokens=True)
    assert num_valid_calls(text) > 0
