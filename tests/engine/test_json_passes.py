"""Forward passes of JSON and of tool calls, held against the tokens that the format leaves
undecided."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jsonschema
import pytest
from vllm import SamplingParams

from benchmarks.ab.workloads.json_regex import CHARACTER
from benchmarks.schemas import is_plain, schemas
from tests.effort import requests
from tests.engine.engine import Ask, Engine, in_format, tokens_of, words

pytestmark = pytest.mark.platforms

NUM_REQUESTS = 4
SPARE_PASSES = 2
"""Of each request, on average: one in flight when it ended, and one at a jump that was not
expected, most of them where a string or a number ends in a format not seen before."""

MODES: dict[str, dict[str, Any]] = {
    "off": {"jump_forward": False},
    "exact": {"jump_mode": "exact"},
    "canonical": {"jump_mode": "canonical"},
}


def function(**choices: list[Any]) -> dict[str, Any]:
    """A schema whose arguments are one of some values each."""
    properties = {name: {"enum": values} for name, values in choices.items()}
    members = {"properties": properties, "required": [*choices]}
    return {"type": "object", **members, "additionalProperties": False}


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
CALLING = {"structural_tag": json.dumps({"type": "structural_tag", "format": CALLS})}


def asks(kind: str, max_tokens: int = 72) -> list[Ask]:
    plain = [one.text for one in schemas(None) if is_plain(json.loads(one.text))]
    formats: dict[str, list[dict[str, Any]]] = {
        "regex": [{"regex": CHARACTER}] * NUM_REQUESTS,
        "schema": [{"json": text} for text in plain[:NUM_REQUESTS]],
        "tool calls": [CALLING] * NUM_REQUESTS,
    }
    # So that an answer has several calls. The model would end it after one.
    more = {"min_tokens": min(max_tokens, 60)} if kind == "tool calls" else {}
    return [
        Ask(words(20, seed=number), in_format(max_tokens, one, **more))
        for number, one in enumerate(formats[kind])
    ]


KINDS = ("regex", "schema", "tool calls")


@dataclass
class Passes:
    """Forward passes of some requests, and the tokens of their output that were not forced."""

    num_requests: int
    num_passes: int
    num_undecided: int
    texts: list[str]


def run(engine: Engine, wanted: list[Ask], at_once: int) -> Passes:
    assert engine.llm.reset_prefix_cache()
    engine.reset_counts()
    before = num_forced(engine)
    outputs = [
        output
        for start in range(0, len(wanted), at_once)
        for output in engine.run(wanted[start : start + at_once])
    ]
    engine.check_nothing_is_left()
    num_undecided = sum(len(tokens_of(one)) for one in outputs) - (num_forced(engine) - before)
    texts = [output.outputs[0].text for output in outputs]
    return Passes(len(wanted), engine.forward_passes, num_undecided, texts)


def num_forced(engine: Engine) -> int:
    counters = engine.scheduler.sgl_vllm.stats().jump_forward
    return counters.forced_tokens if counters is not None else 0


@pytest.fixture(scope="module")
def measured(start) -> tuple[dict[tuple[str, str, int], Passes], Engine]:
    """By mode, format, and requests at a time; with the engine of the last mode."""
    found = {}
    num_alone = requests(2 * NUM_REQUESTS) if requests(100) < 100 else 2
    for mode, options in MODES.items():
        engine: Engine = start(
            plugin={"self_check": "off", **options},
            structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
        )
        # Compiled when they are added, so that requests at once start in the same pass.
        engine.core.structured_output_manager._use_async_grammar_compilation = False
        for kind in KINDS:
            engine.run(asks(kind, 1))  # the formats are compiled
            for at_once, num_requests in ((1, num_alone), (NUM_REQUESTS, NUM_REQUESTS)):
                found[mode, kind, at_once] = run(engine, asks(kind)[:num_requests], at_once)
    return found, engine


@pytest.mark.parametrize("at_once", [1, NUM_REQUESTS])
@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_decides_a_token_and_exact_jumps_never_take_more_than_decoding(
    measured, kind, at_once
):
    found, _ = measured
    off, exact, jumping = (found[mode, kind, at_once] for mode in MODES)
    assert jumping.num_passes <= jumping.num_undecided + SPARE_PASSES * jumping.num_requests
    if at_once == 1:  # all at a time take as many passes as the longest answer
        assert jumping.num_passes < (0.6 if kind == "tool calls" else 0.9) * off.num_passes
    assert exact.num_passes <= off.num_passes
    if kind == "tool calls":
        num_calls = sum(map(num_valid_calls, jumping.texts))
        assert num_calls >= jumping.num_requests


def num_valid_calls(text: str) -> int:
    """Of calls that are complete. Nothing but calls may follow the first one. vLLM's V2 runner lets
    one of these answers begin with other text, also without the plugin."""
    text = text[text.index("<tool_call>") :]
    calls = re.findall(r"<tool_call>\n(.*?)\n</tool_call>", text, re.DOTALL)
    rest = re.sub(r"<tool_call>\n.*?\n</tool_call>", "", text, flags=re.DOTALL)
    assert rest == "" or '<tool_call>\n{"name": "'.startswith(rest[:21])
    for call in map(json.loads, calls):
        jsonschema.validate(call["arguments"], FUNCTIONS[call["name"]])
    return len(calls)


def test_calls_after_reasoning_jump_too(measured, monkeypatch):
    _, engine = measured
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
    (answer,) = engine.run([Ask(prompt, asks("tool calls", 150)[0].params)])
    tokens = tokens_of(answer)
    assert tokens[: last + 1] == thought[: last + 1]
    num_undecided = len(tokens) - (num_forced(engine) - before)
    assert engine.forward_passes <= num_undecided + SPARE_PASSES
    assert num_forced(engine) - before > 0.5 * (len(tokens) - last - 1)
    text = engine.llm.get_tokenizer().decode(tokens[last + 1 :], skip_special_tokens=True)
    assert num_valid_calls(text) > 0
