"""uvicorn for scripted apps, which stops immediately.

uvicorn itself checks every 0.1 s whether to stop, and waits as long again for open requests.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi.responses import JSONResponse, Response


class HttpServer(uvicorn.Server):
    def __init__(self, app: Any) -> None:
        super().__init__(uvicorn.Config(app, log_level="critical", lifespan="off"))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ends = asyncio.Event()

    async def main_loop(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self.on_tick(0)  # makes the headers that all answers have
        if not self.should_exit:
            await self._ends.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = None
        for server in self.servers:
            server.close()
        self.hang_up()

    def hang_up(self) -> None:
        """On the server's own loop: close every connection."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    def soon(self, call: Callable[[], object]) -> None:
        """From any thread: `call` on the server's own loop, if it serves."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(call)

    def end(self) -> None:
        """From any thread."""
        self.should_exit = True
        self.soon(self._ends.set)


@contextmanager
def serving_app(app: Any) -> Iterator[str]:
    """`app`, running in a thread on a free loopback port. Gives its URL."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = HttpServer(app)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.end()
        thread.join(timeout=10)
        listening.close()


def refusing(
    when: Callable[[str, dict[str, Any]], object], status: int = 400, message: str = "no"
) -> Callable[[str, dict[str, Any]], Response | None]:
    """A fault: requests whose path and body fulfil `when` are errors."""

    def fault(path: str, body: dict[str, Any]) -> Response | None:
        is_refused = when(path, body)
        return JSONResponse({"error": {"message": message}}, status) if is_refused else None

    return fault


def completes(path: str, body: dict[str, Any]) -> bool:
    """Whether a request generates text."""
    return path.endswith("completions")
