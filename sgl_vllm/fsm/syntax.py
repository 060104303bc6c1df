"""Trees of patterns and of regular parts of grammars: what both are read into.

    "ab" [0-9]*      Sequence((Text(b"ab"), Repetition(one_of(((48, 57),)), 0, None)))

Owns the types. Does not own where a tree comes from (`regex.py`, `regular_parts.py`) or what it is
compiled to. Trees are never changed; they are not frozen, because that makes their construction
three times as slow. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from sgl_vllm.fsm.characters import Bytes, encodings
from sgl_vllm.fsm.small_cache import cached_if_few
from sgl_vllm.protocol.code_points import Ranges


@dataclass(unsafe_hash=True, slots=True)
class Text:
    """A literal; may be empty."""

    data: bytes


@dataclass(unsafe_hash=True, slots=True)
class Spelled:
    """One of some characters, in whatever way they are spelled.

    Attributes:
        spellings: byte strings, of which each byte is from a range.
    """

    spellings: tuple[Bytes, ...]


@dataclass(unsafe_hash=True, slots=True)
class Sequence:
    parts: tuple[Node, ...]


@dataclass(unsafe_hash=True, slots=True)
class Choice:
    options: tuple[Node, ...]


@dataclass(unsafe_hash=True, slots=True)
class Repetition:
    """`low` to `high` times; without a limit if that is None."""

    part: Node
    low: int
    high: int | None


Node: TypeAlias = "Text | Spelled | Sequence | Choice | Repetition"


@cached_if_few
def one_of(ranges: Ranges) -> Node:
    """One of some code points in UTF-8. Surrogates are code points like others, as in xgrammar."""
    return Spelled(tuple([one for low, high in ranges for one in encodings(low, high)]))
