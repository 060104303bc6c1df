"""Text for a terminal: safe to print, and short. And the error whose text is all that is printed.

Prompts and server messages are untrusted. `printable` removes what could control a terminal.
"""

from __future__ import annotations

import re

WIDTH_OF_FILES = 160
"""In characters, of tables that go to no terminal."""


class CommandError(Exception):
    """A subcommand failed. The message is one line for people."""

    status = 1


class Misused(CommandError):
    """A subcommand got arguments, or an installation, with which it cannot start."""

    status = 2


def reason_of(error: Exception) -> str:
    """Why a file or a server cannot be reached, without the system's number of the error."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return re.sub(r"^\[Errno -?\d+\] ", "", str(error)) or type(error).__name__


def printable(text: str) -> str:
    """`text` on one line, without control characters or marks that change the text direction."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def age(seconds: float) -> str:
    if seconds < 1:
        return "now"
    for unit, length_s, most in (("s", 1, 100), ("min", 60, 100), ("h", 3600, 48)):
        if seconds < most * length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"
