"""Refuses large bodies before they are parsed, because parsing blocks all other requests.

Owns the option `max_body_mb`. Bodies are counted as they arrive, so a body is refused at the limit
whatever its `Content-Length` says, or at once if that says too much. Does not own what a body may
contain, such as how long a format may be (`fsm/vllm/frontend.py`).
"""

from __future__ import annotations

from fastapi import HTTPException
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class BodyLimitMiddleware:
    """Answers 413 to a body that is too large.

    The limit in bytes is read from `app.state.sgl_vllm_max_body_bytes`, because vLLM reads the
    options after the middleware is added. 0 means none.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limit = 0
        if scope["type"] == "http":
            limit = getattr(scope["app"].state, "sgl_vllm_max_body_bytes", 0)
        if not limit:
            return await self._app(scope, receive, send)
        declared = Headers(scope=scope).get("content-length", "")
        is_declared_too_large = declared.isdecimal() and int(declared) > limit
        num_read = 0

        async def receive_within_limit() -> Message:
            nonlocal num_read
            if is_declared_too_large:
                raise _too_large(limit)
            message = await receive()
            num_read += len(message.get("body", b""))
            if num_read > limit:
                raise _too_large(limit)
            return message

        await self._app(scope, receive_within_limit, send)


def _too_large(limit: int) -> HTTPException:
    message = f"the body has more than {limit:,} bytes, the limit of this server (max_body_mb)"
    return HTTPException(413, message)
