"""Follows the text of a stream, or of one variable, as it grows.

Owns what is new since the last look, and where the text ends. Waiting for more is the caller's.
"""

from __future__ import annotations

from concurrent.futures import Future

from sgl_vllm.lang.errors import reading
from sgl_vllm.lang.stream import Stream
from sgl_vllm.lang.transcript import Variable


class Follower:
    """Reads a growing text from where it read last.

    `body` is done when the program's function can append no more; None if the text ends when the
    stream is idle.
    """

    def __init__(self, stream: Stream, var_name: str | None, body: Future[None] | None) -> None:
        self._stream = stream
        self._var_name = var_name
        self._body = body
        self._future: Future[Variable] | None = None
        self._num_chars = 0

    def look(self) -> tuple[str, bool]:
        """The new text, and whether the end has been reached. Raises the stream's error."""
        with reading():
            text, is_end = (
                self._text() if self._var_name is None else self._variable(self._var_name)
            )
        piece = text[self._num_chars :]
        self._num_chars = max(self._num_chars, len(text))
        return piece, is_end and not piece

    def _text(self) -> tuple[str, bool]:
        body = self._body
        has_returned = body is None or body.done()
        is_end = has_returned and self._stream.is_idle
        snapshot = self._stream.snapshot()
        if len(snapshot.text) <= self._num_chars and is_end:
            if snapshot.error is not None:
                raise snapshot.error
            if body is not None:
                body.result()
        return snapshot.text, is_end

    def _variable(self, name: str) -> tuple[str, bool]:
        body = self._body
        has_returned = body is None or body.done()
        if name not in self._stream.variables:
            if has_returned:
                if body is not None:
                    body.result()
                self._stream.variable(name)  # raises KeyError
            return "", False
        if self._future is None:  # follow this one to its end, even if the name is bound again
            self._future = self._stream.variables[name]
        if not self._future.done():
            return self._stream.partial_of(self._future), False
        return self._future.result().text, True
