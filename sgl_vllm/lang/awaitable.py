"""What reading a variable gives in an async program.

Owns the error of a forgotten `await`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import Any, NoReturn  # Any: values of the user's types


class ValueToAwait(Awaitable[Any]):
    """An awaitable that can be awaited any number of times, also never.

    Using it as the value that it stands for is a TypeError: an `await` was forgotten, and the
    prompt would have its address.
    """

    def __init__(self, what: str, start: Callable[[], Awaitable[Any]]) -> None:
        self._what = what
        self._start = start

    def __await__(self) -> Generator[Any, None, Any]:
        return self._start().__await__()

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError(f"{self._what} has to be awaited in an async program: await {self._what}")

    __bool__ = __eq__ = __ne__ = __str__ = __format__ = __iter__ = __len__ = __contains__ = _refuse
    __hash__ = object.__hash__
