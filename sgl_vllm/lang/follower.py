"""Follows what grows in a stream: its text, or the text or the file of one variable.

Owns what is new since the last look, where it ends, and waiting for more.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Generic, TypeVar

from sgl_vllm.lang.errors import ProgramError, cause_of, reading
from sgl_vllm.lang.media import Media
from sgl_vllm.lang.stream import Stream
from sgl_vllm.lang.transcript import Variable
from sgl_vllm.lang.waiting import waiting

T = TypeVar("T", str, bytes)


class _Follower(ABC, Generic[T]):
    """Reads something that grows from where it read last.

    `body` is done when the program's function can append no more; None if the text ends when the
    stream is idle.
    """

    def __init__(self, stream: Stream, body: Future[None] | None) -> None:
        self._stream = stream
        self._body = body
        self._future: Future[Variable] | None = None

    @abstractmethod
    def look(self) -> tuple[T, bool]:
        """What is new, and whether the end has been reached. Raises the stream's error."""

    def _next(self) -> tuple[T, bool]:
        """`look` for the program: its errors are handled then. Outside of the program, what its
        function has raised comes before the errors of operations that this has canceled."""
        try:
            with reading():
                return self.look()
        except ProgramError as error:
            failed = error
        raise failed if self._body is None else cause_of(failed)

    def _waiting(self) -> AbstractContextManager[None]:
        """Around waiting for a change. RuntimeError in a tool that is waited for, as `waiting`."""
        return (
            waiting(*self._stream.queue.last()) if self._future is None else waiting(self._future)
        )

    def pieces(self) -> Iterator[T]:
        """Block the thread for each piece."""
        self._stream.run.background.refuse_to_wait()
        event = threading.Event()
        stop = self._stream.listeners.add(event.set)
        try:
            while True:
                event.clear()
                piece, is_end = self._next()
                if piece:
                    yield piece
                elif is_end:
                    return
                else:
                    with self._waiting():
                        event.wait()
        finally:
            stop()

    async def pieces_async(self) -> AsyncIterator[T]:
        """Await each piece."""
        loop, event = asyncio.get_running_loop(), asyncio.Event()
        stop = self._stream.listeners.add(lambda: loop.call_soon_threadsafe(event.set))
        try:
            while True:
                event.clear()
                piece, is_end = self._next()
                if piece:
                    yield piece
                elif is_end:
                    return
                else:
                    with self._waiting():
                        await event.wait()
        finally:
            stop()

    def _variable(self, name: str) -> Future[Variable] | None:
        """The variable to follow; None if the program has yet to make it."""
        body = self._body
        has_returned = body is None or body.done()
        if name not in self._stream.variables:
            if has_returned:
                if body is not None:
                    body.result()
                self._stream.variable(name)  # raises KeyError
            return None
        if self._future is None:  # follow this one to its end, even if the name is bound again
            self._future = self._stream.variables[name]
        return self._future


class TextFollower(_Follower[str]):
    """Follows the text of a stream, or of one variable."""

    def __init__(self, stream: Stream, var_name: str | None, body: Future[None] | None) -> None:
        super().__init__(stream, body)
        self._var_name = var_name
        self._num_chars = 0

    def look(self) -> tuple[str, bool]:
        name = self._var_name
        text, is_end = self._text() if name is None else self._text_of_variable(name)
        piece = text[self._num_chars :]
        self._num_chars = max(self._num_chars, len(text))
        return piece, is_end and not piece

    def _text(self) -> tuple[str, bool]:
        body = self._body
        has_returned = body is None or body.done()
        is_end = has_returned and self._stream.is_idle
        snapshot = self._stream.snapshot()
        if len(snapshot.text) <= self._num_chars and is_end:
            if body is not None:
                body.result()
            if snapshot.error is not None:
                raise snapshot.error
        return snapshot.text, is_end

    def _text_of_variable(self, name: str) -> tuple[str, bool]:
        future = self._variable(name)
        if future is None:
            return "", False
        if not future.done():
            return self._stream.partial_of(future).partial, False
        return future.result().text, True


class FileFollower(_Follower[bytes]):
    """Follows the file in a variable, in the pieces in which it arrives."""

    def __init__(self, stream: Stream, var_name: str, body: Future[None] | None) -> None:
        super().__init__(stream, body)
        self._var_name = var_name
        self._num_pieces = 0
        self._num_bytes = 0

    def look(self) -> tuple[bytes, bool]:
        future = self._variable(self._var_name)
        if future is None:
            return b"", False
        if future.done():
            piece, is_end = self._rest(future.result().value), True
        else:
            arrived = self._stream.partial_of(future).pieces
            piece, is_end = b"".join(arrived[self._num_pieces :][:1]), False
            self._num_pieces += bool(piece)
        self._num_bytes += len(piece)
        return piece, is_end and not piece

    def _rest(self, value: object) -> bytes:
        if not isinstance(value, Media):
            kind = type(value).__name__
            raise TypeError(f"the variable {self._var_name!r} is of type {kind}: it is no audio")
        return value.data[self._num_bytes :]
