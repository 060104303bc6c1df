"""Follows what grows in a stream: its text, or the text or the file of one variable.

Owns what is new since the last look, where it ends, and waiting for more.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Generic, TypeVar

from sgl_vllm.lang.errors import ProgramError, cause_of, reading
from sgl_vllm.lang.execution import Written
from sgl_vllm.lang.media import Media
from sgl_vllm.lang.stream import Stream
from sgl_vllm.lang.transcript import Variable
from sgl_vllm.lang.waiting import waiting

T = TypeVar("T", str, bytes)


class _Follower(ABC, Generic[T]):
    """Reads something that grows, from where it read last.

    `function_done` is done when the program's function can append no more; None if the text ends
    when the stream is idle.
    """

    def __init__(
        self, stream: Stream, name: str | None, function_done: Future[None] | None
    ) -> None:
        self._stream = stream
        self._name = name
        self._function_done = function_done
        self._future: Future[Variable] | None = None

    @property
    def _has_returned(self) -> bool:
        return self._function_done is None or self._function_done.done()

    def _raise_of_function(self) -> None:
        """Raise what the program's function has raised."""
        if self._function_done is not None:
            self._function_done.result()

    @abstractmethod
    def _look(self) -> tuple[T, bool]:
        """What is new, and whether it is the end. Raises the stream's error."""

    def _next(self) -> T | None:
        """What is new, which may be nothing; None at the end. Errors are handled then. Outside of
        the program, what its function has raised comes before the errors of operations that this
        has canceled."""
        try:
            with reading():
                piece, is_end = self._look()
        except ProgramError as error:
            failed = error
        else:
            return None if is_end and not piece else piece
        raise failed if self._function_done is None else cause_of(failed)

    def _waiting(self) -> AbstractContextManager[None]:
        """Around waiting for a change. RuntimeError in a tool that is waited for, as `waiting`."""
        last = self._stream.queue.last() if self._future is None else [self._future]
        return waiting(*last)

    def pieces(self) -> Iterator[T]:
        """Block the thread for each piece."""
        self._stream.run.background.refuse_to_wait()
        event = threading.Event()
        self._stream.listeners.add(event.set)
        try:
            while (piece := self._next()) is not None:
                if piece:
                    yield piece
                    continue
                with self._waiting():
                    event.wait()
                event.clear()
        finally:
            self._stream.listeners.discard(event.set)

    async def pieces_async(self) -> AsyncIterator[T]:
        """Await each piece."""
        loop, event = asyncio.get_running_loop(), asyncio.Event()
        changed = functools.partial(loop.call_soon_threadsafe, event.set)
        self._stream.listeners.add(changed)
        try:
            while (piece := self._next()) is not None:
                if piece:
                    yield piece
                    continue
                with self._waiting():
                    await event.wait()
                event.clear()
        finally:
            self._stream.listeners.discard(changed)

    def _variable(self, name: str) -> tuple[Variable | None, Written | None]:
        """The variable if it is known, or else what there is of it; neither if the program has yet
        to make it."""
        if name not in self._stream.variables:
            if self._has_returned:
                self._raise_of_function()
                self._stream.variable(name)  # raises KeyError
            return None, None
        if self._future is None:  # follow this one to its end, even if the name is bound again
            self._future = self._stream.variables[name]
        if self._future.done():
            return self._future.result(), None
        return None, self._stream.partial_of(self._future)


class TextFollower(_Follower[str]):
    """Follows the text of a stream, or of one variable."""

    _num_chars = 0

    def _look(self) -> tuple[str, bool]:
        text, is_end = self._text() if self._name is None else self._text_of(self._name)
        piece = text[self._num_chars :]
        self._num_chars = max(self._num_chars, len(text))
        return piece, is_end

    def _text(self) -> tuple[str, bool]:
        is_end = self._has_returned and self._stream.is_idle
        snapshot = self._stream.snapshot()
        if len(snapshot.text) <= self._num_chars and is_end:
            self._raise_of_function()
            if snapshot.error is not None:
                raise snapshot.error
        return snapshot.text, is_end

    def _text_of(self, name: str) -> tuple[str, bool]:
        variable, written = self._variable(name)
        if variable is not None:
            return variable.text, True
        return written.partial if written else "", False


class FileFollower(_Follower[bytes]):
    """Follows the file in a variable, in the pieces in which it arrives."""

    _num_pieces = 0
    _num_bytes = 0

    def _look(self) -> tuple[bytes, bool]:
        variable, written = self._variable(str(self._name))
        if variable is None:
            piece = b"".join(written.pieces[self._num_pieces :][:1]) if written else b""
            self._num_pieces += bool(piece)
        elif isinstance(variable.value, Media):
            piece = variable.value.data[self._num_bytes :]
        else:
            kind = type(variable.value).__name__
            raise TypeError(f"the variable {self._name!r} is of type {kind}: it is no audio")
        self._num_bytes += len(piece)
        return piece, variable is not None
