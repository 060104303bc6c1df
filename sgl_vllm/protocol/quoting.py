"""A client's text in a log line or an error message. Pure.

A client chooses the ids and names that it sends: they may have line breaks, escape sequences of
terminals, or millions of characters.
"""

from __future__ import annotations

MAX_QUOTED_CHARS = 100


def quoted(text: str) -> str:
    """`text` in quotes, on one line and in ASCII: its first `MAX_QUOTED_CHARS` characters."""
    return ascii(text[:MAX_QUOTED_CHARS]) + ("..." if len(text) > MAX_QUOTED_CHARS else "")
