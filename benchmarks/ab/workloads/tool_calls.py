"""Tool calls as agent frameworks ask for them: functions with JSON schemas in `tools`.

A third of the agents may call several functions in an answer, a third one function, and a third has
to call the function that it is told. Functions are `strict`, so arguments are held to their schemas
on both servers. White space is up to the model: vLLM's option that forbids it is not for tools.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import sgl_vllm as sgl
from benchmarks.ab.workloads.base import Item, Texts, Workload

NUM_TOOLS = 3
NUM_STEPS = 2
QUESTION_TOKENS = (12, 40)
RESULT_TOKENS = (12, 60)
MAX_TOKENS = 192
MAX_MODEL_LEN = 2048

Json = dict[str, Any]


def text(max_length: int) -> Json:
    return {"type": "string", "maxLength": max_length}


def one_of(*values: str) -> Json:
    return {"type": "string", "enum": [*values]}


def function(name: str, description: str, /, **parameters: Json) -> Json:
    """A tool whose parameters are all required, as `strict` ones of OpenAI's are."""
    schema = {
        "type": "object",
        "properties": parameters,
        "required": [*parameters],
        "additionalProperties": False,
    }
    made = {"name": name, "description": description, "strict": True, "parameters": schema}
    return {"type": "function", "function": made}


INTEGER = {"type": "integer"}
BOOLEAN = {"type": "boolean"}
TOOLS = (
    function(
        "get_weather_forecast",
        "The weather of the next days.",
        city=text(20),
        country_code=one_of("DE", "FR", "GB", "JP", "US"),
        number_of_days=INTEGER,
        temperature_unit=one_of("celsius", "fahrenheit"),
    ),
    function(
        "search_documents",
        "Documents that match a query.",
        query=text(30),
        document_type=one_of("any", "report", "presentation", "spreadsheet"),
        maximum_number_of_results=INTEGER,
        include_archived_documents=BOOLEAN,
    ),
    function(
        "create_calendar_event",
        "Adds an event to the calendar.",
        title=text(24),
        start_time={
            "type": "object",
            "properties": {"hour": INTEGER, "minute": INTEGER},
            "required": ["hour", "minute"],
            "additionalProperties": False,
        },
        duration_in_minutes=INTEGER,
        send_invitations=BOOLEAN,
        visibility=one_of("default", "private", "public"),
    ),
    function(
        "convert_currency",
        "An amount of money in another currency.",
        amount=INTEGER,
        from_currency=one_of("EUR", "GBP", "JPY", "USD"),
        to_currency=one_of("EUR", "GBP", "JPY", "USD"),
    ),
    function(
        "update_ticket",
        "Changes a ticket of the support team.",
        ticket_number=INTEGER,
        new_status=one_of("open", "in_progress", "waiting_for_customer", "resolved"),
        priority=one_of("low", "normal", "high", "urgent"),
        labels={
            "type": "array",
            "items": one_of("billing", "bug", "feature_request", "security"),
            "minItems": 1,
            "maxItems": 3,
        },
        notify_the_customer=BOOLEAN,
    ),
    function(
        "book_train_ticket",
        "Reserves seats in a train.",
        departure_station=text(16),
        arrival_station=text(16),
        number_of_passengers=INTEGER,
        travel_class=one_of("first_class", "second_class"),
        is_refundable=BOOLEAN,
    ),
)


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


WORKLOAD = Workload(
    name="tool_calls",
    summary="tool calls of agents, by name and by choice, one and several in an answer",
    gain=(
        "Names of the only function, of arguments, and all that is between them and between calls "
        "is appended without a pass of its own."
    ),
    program=agent,
    items=items,
    num_requests=48,
    quick_requests=12,
    concurrency=1,
    structured=True,
    request_fields=request_fields,
    server_args=lambda block_size_tokens: (
        *("--max-model-len", str(MAX_MODEL_LEN)),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        *("--structured-outputs-config.backend", "xgrammar"),
    ),
)
