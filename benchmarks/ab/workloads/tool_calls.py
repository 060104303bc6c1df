"""Tool calls as agent frameworks ask for them: functions with JSON schemas in `tools`.

A third of the agents may call several functions in an answer, a third one function, and a third has
to call the function that it is told. Functions are `strict`, so arguments are held to their schemas
on both servers. White space is up to the model: vLLM's option that forbids it is not for tools.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sgl_vllm as sgl
from benchmarks.ab.workloads.base import Item, Texts, Workload
from sgl_vllm.demo import TOOL_FLAGS

NUM_TOOLS = 3
NUM_STEPS = 2
QUESTION_TOKENS = (12, 40)
RESULT_TOKENS = (12, 60)
MAX_TOKENS = 192
MAX_MODEL_LEN = 2048

Json = dict[str, Any]


# All parameters are required, as `strict` functions of OpenAI's have them.
TOOLS: list[Json] = json.loads(Path(__file__).with_name("tools.json").read_text())


@sgl.function
def agent(
    s: sgl.ProgramState, tools: list[Json], choice: str, parallel: bool, told: tuple[str, ...]
) -> None:
    s += sgl.system(f"You call functions ({choice}). They are: " + json.dumps(tools))
    for number, one in enumerate(told):
        s += sgl.user(one)
        s += sgl.assistant(sgl.gen(f"calls{number}", max_tokens=MAX_TOKENS))


def request_fields(item: Item) -> Mapping[str, Any]:
    """`choice` is a value of `tool_choice`, or the name of the function that has to be called."""
    choice = item["choice"]
    named = {"type": "function", "function": {"name": choice}}
    return {
        "tools": item["tools"],
        "tool_choice": choice if choice == "required" else named,
        "parallel_tool_calls": item["parallel"],
    }


def items(texts: Texts, num_requests: int) -> list[Item]:
    return [_item(texts, number) for number in range(num_requests)]


def _item(texts: Texts, number: int) -> Item:
    tools = [TOOLS[index] for index in texts.order(NUM_TOOLS, len(TOOLS))]
    is_named = number % 3 == 2
    lengths = [QUESTION_TOKENS, *[RESULT_TOKENS] * (NUM_STEPS - 1)]
    return {
        "tools": tools,
        "choice": tools[0]["function"]["name"] if is_named else "required",
        "parallel": number % 3 == 0,
        "told": tuple(texts.text(texts.number(*length)) for length in lengths),
    }


WORKLOAD = Workload.of(
    "tool_calls",
    agent,
    items,
    structured=True,
    request_fields=request_fields,
    server_args=lambda block_size_tokens: (
        *("--max-model-len", str(MAX_MODEL_LEN)),
        *TOOL_FLAGS,
        *("--structured-outputs-config.backend", "xgrammar"),
    ),
)
