"""How many calls API speculative execution may waste. Pure: sends nothing."""

from __future__ import annotations


class AheadBudget:
    """Whether a backend is asked past the end of a generation, as far as that has paid so far.

    If a server sends several tokens at once and a text ends inside of them, what was generated
    ahead is of no use, and the call is made again. There may be one such call, another one for each
    call that was saved since, and another one for every 16 that were made without. So a server that
    fell behind once keeps its speculation, and one that always sends several tokens at once makes
    at most a sixteenth more calls.
    """

    _MOST = 4.0
    _FOR_A_PLAIN_CALL = 1 / 16

    def __init__(self) -> None:
        self._calls = 1.0

    @property
    def allows_a_call(self) -> bool:
        """Whether one more call may be wasted."""
        return self._calls >= 1

    def saved(self) -> None:
        """A call was answered from text generated ahead."""
        self._add(1)

    def wasted(self) -> None:
        """A call has to be made again."""
        self._add(-1)

    def asked_plainly(self) -> None:
        """A call was made that asked for nothing ahead."""
        self._add(self._FOR_A_PLAIN_CALL)

    def _add(self, calls: float) -> None:
        self._calls = min(self._calls + calls, self._MOST)
