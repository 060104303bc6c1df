"""Stop texts that a service does not take: the client watches the text and cuts it.

Owns the watching and the cut. What a stop text is, is in `speculation.py`.
"""

from __future__ import annotations

from sgl_vllm.lang.backends.requests import Generated, Watch
from sgl_vllm.lang.speculation import first_stop, without_begun_stop


class StopWatch:
    """Ends a streamed text at the first of `stops`, and passes what is before it to `watch`.

    A suffix that may be the beginning of a stop text is held back until more follows.
    """

    def __init__(self, stops: tuple[str, ...], watch: Watch | None) -> None:
        self._stops = stops
        self._watch = watch
        self._text = ""
        self._num_shown = 0

    def __call__(self, piece: str, num_tokens: int | None) -> bool:
        self._text += piece
        stop = first_stop(self._text, self._stops)
        end = stop[0] if stop else len(without_begun_stop(self._text, self._stops))
        shown = self._text[self._num_shown : end]
        self._num_shown = max(end, self._num_shown)
        enough = shown != "" and self._watch is not None and self._watch(shown, num_tokens)
        return enough or stop is not None


def cut_at_stop(generated: Generated, stops: tuple[str, ...]) -> Generated:
    """The text before the first of `stops`, or all of it."""
    stop = first_stop(generated.text, stops)
    return generated if stop is None else generated.cut(stop[0])
