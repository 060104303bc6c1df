"""What to say about a misspelled name: an option, a command, or an argument of the language."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(
    word: object, words: Iterable[str], otherwise: str = "", *, cutoff: float = 0.6
) -> str:
    """`; did you mean WORD?` with the nearest of `words`, or `otherwise` if none is near.

    Args:
        cutoff: how similar two words must be to be near; 1 for the same word.
    """
    by_letters = {one.lower(): one for one in words}
    near = difflib.get_close_matches(str(word).lower(), by_letters, n=1, cutoff=cutoff)
    return f"; did you mean {by_letters[near[0]]}?" if near else otherwise
