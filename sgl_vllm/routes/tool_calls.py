"""Tells the engines which answers call a tool, so that they know what a program is doing.

An engine sees tokens. Only vLLM's frontend knows that some of them call a tool, and says so in the
answer. Owns reading that from the answers of `/v1/chat/completions`, with and without streaming.
Changes no answer and delays none. Does not own what the engines make of it (`radix/contexts.py`).
"""

from __future__ import annotations

import asyncio
import json
import re

from fastapi import FastAPI, HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.logger import init_logger

from sgl_vllm.routes.engines import ask_engines

logger = init_logger("vllm.sgl_vllm.server")

ROUTE = "/chat/completions"

_CALLS = b'"tool_calls":[{'
"""In an answer or a part of it that calls a tool. Inside a text of JSON its quotes are escaped."""

_ID = re.compile(rb'"id":("(?:[^"\\]|\\.)*")')
"""Of the answer: the first one."""

_NAME = re.compile(rb'"function":\{[^{}]*?"name":("(?:[^"\\]|\\.)*")')


class ToolCallMiddleware:
    """Sends the id of each answer that calls a tool, and the first tool's name, to the engines when
    the answer is complete. Other requests pass through unchanged.

    Costs a search for a few bytes in each part of a chat's answer, and one utility call to the
    engines for each answer that calls a tool.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._telling: set[asyncio.Task[None]] = set()  # the loop itself keeps weak references only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope.get("path", "").endswith(ROUTE):
            return await self._app(scope, receive, send)
        called: list[bytes] = []

        async def watch(message: Message) -> None:
            await send(message)
            if message["type"] != "http.response.body":
                return
            if not called and _CALLS in message.get("body", b""):
                called.append(message["body"])
            if called and not message.get("more_body", False):
                task = asyncio.create_task(_tell(scope["app"], called[0]))
                self._telling.add(task)
                task.add_done_callback(self._telling.discard)

        await self._app(scope, receive, watch)


async def _tell(app: FastAPI, part: bytes) -> None:
    """Tell the engines of an answer, of which `part` is the first part that calls a tool."""
    answer_id, name = _ID.search(part), _NAME.search(part, part.find(_CALLS))
    if answer_id is None or name is None:
        return
    arguments = {"request_id": json.loads(answer_id[1]), "tool": json.loads(name[1])}
    try:
        await ask_engines(app.state.engine_client, type(None), "called_tool", arguments)
    except HTTPException as error:  # the engines have ended, or hang
        logger.debug("sgl_vllm: the engines do not learn of a tool call: %r", error)
