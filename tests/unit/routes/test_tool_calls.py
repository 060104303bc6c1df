"""Which answers call a tool, read from answers as vLLM sends them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator

import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from fastapi.testclient import TestClient
from vllm.entrypoints.generate.base.protocol import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    FunctionCall,
    ToolCall,
)
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatCompletionResponseStreamChoice,
    ChatCompletionStreamResponse,
    ChatMessage,
)
from vllm.entrypoints.serve.engine.protocol import UsageInfo

from tests.fake_engines import FakeEngine, fake_server

ID = "chatcmpl-a1"
NAME = 'look "it" up é'


def whole(message: ChatMessage) -> Iterator[str]:
    choice = ChatCompletionResponseChoice(index=0, message=message, finish_reason="tool_calls")
    answer = ChatCompletionResponse(id=ID, model="m", choices=[choice], usage=UsageInfo())
    yield json.dumps(answer.model_dump(), ensure_ascii=False, separators=(",", ":"))


def streamed(*deltas: DeltaMessage) -> Iterator[str]:
    for delta in deltas:
        choice = ChatCompletionResponseStreamChoice(index=0, delta=delta)
        part = ChatCompletionStreamResponse(id=ID, model="m", choices=[choice])
        yield f"data: {part.model_dump_json(exclude_unset=True)}\n\n"
    yield "data: [DONE]\n\n"


CALLS = [
    ToolCall(function=FunctionCall(name=NAME, arguments='{"name": "x"}')),
    ToolCall(function=FunctionCall(name="second", arguments="{}")),
]
DELTAS = [
    DeltaMessage(role="assistant", content=""),
    DeltaMessage(
        tool_calls=[DeltaToolCall(index=0, function=DeltaFunctionCall(name=NAME, arguments=""))]
    ),
    DeltaMessage(
        tool_calls=[DeltaToolCall(index=0, function=DeltaFunctionCall(arguments='{"name":"x"}'))]
    ),
]
QUOTED = '{"id":"chatcmpl-other","tool_calls":[{"function":{"name":"not a call"}}]}'


def told(parts: Iterator[str], path: str = "/v1/chat/completions") -> list[tuple]:
    """What the engine is asked when the server gives this answer."""
    engine = FakeEngine()
    app: FastAPI = fake_server(engine)
    sent = list(parts)

    @app.post(path)
    async def answer() -> StreamingResponse:
        async def body() -> AsyncIterator[str]:
            for part in sent:
                yield part

        return StreamingResponse(body())

    with TestClient(app) as client:
        assert client.post(path).text == "".join(sent)
        client.get("/health")  # until then the engine has been told
    return engine.asked


EXPECTED = [("called_tool", {"request_id": ID, "tool": NAME})]


def test_an_answer_that_calls_tools_is_told_with_its_id_and_the_first_tool() -> None:
    assert told(whole(ChatMessage(role="assistant", tool_calls=CALLS))) == EXPECTED


def test_a_streamed_answer_is_told_once() -> None:
    assert told(streamed(*DELTAS)) == EXPECTED


@pytest.mark.parametrize(
    "parts",
    [
        whole(ChatMessage(role="assistant", content="no tool", tool_calls=[])),
        whole(ChatMessage(role="assistant", content=QUOTED)),
        streamed(DELTAS[0], DeltaMessage(content=QUOTED)),
        iter(['data: {"tool_calls":[{"function":{}}]}']),
        iter([]),
    ],
    ids=["without", "quoted", "quoted in a stream", "incomplete", "empty"],
)
def test_of_other_answers_nothing_is_told(parts: Iterator[str]) -> None:
    assert told(parts) == []
