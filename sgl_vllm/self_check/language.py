"""Formats whose texts can be listed: which tokens are legal, and what is forced, without automata.

Owns the reference that structured canaries are compared with. It does not use `sgl_vllm.fsm`,
so it cannot have the same faults. Pure.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Language:
    """Fixed text with choices in it.

    Attributes:
        pieces: fixed text, or the texts to choose from. No choice begins with another one of its
            piece.
    """

    pieces: tuple[str | tuple[str, ...], ...]

    @cached_property
    def regex(self) -> str:
        """The same format as a regular expression."""
        return "".join(
            _quoted(piece) if isinstance(piece, str) else f"({'|'.join(map(_quoted, piece))})"
            for piece in self.pieces
        )

    @cached_property
    def texts(self) -> frozenset[bytes]:
        """Every text of the format, as UTF-8."""
        choices = [(piece,) if isinstance(piece, str) else piece for piece in self.pieces]
        return frozenset("".join(chosen).encode() for chosen in itertools.product(*choices))

    def rests(self, begun: bytes) -> list[bytes]:
        """What may follow `begun` up to the end; empty if no text begins so."""
        return [text[len(begun) :] for text in self.texts if text.startswith(begun)]

    def forced(self, begun: bytes) -> bytes:
        """The text that follows `begun` in every case."""
        rests = self.rests(begun)
        if not rests:
            return b""
        first, last = min(rests), max(rests)  # what these two begin with, all do
        length = 0
        while length < len(first) and first[length] == last[length]:
            length += 1
        return first[:length]


def _quoted(text: str) -> str:
    return re.sub(r"([{}()\[\].*+?|\\^$])", r"\\\1", text)


class TokenTable:
    """The tokens that some texts consist of, by their bytes.

    Args:
        token_bytes: the bytes of each token; empty for special ones.
        languages: those whose texts are asked for later. Cost: O(tokens).
    """

    def __init__(self, token_bytes: Sequence[bytes], languages: Iterable[Language]) -> None:
        self._token_bytes = token_bytes
        all_text = b"\n".join(text for language in languages for text in sorted(language.texts))
        self._by_bytes: dict[bytes, list[int]] = {}
        for token, piece in enumerate(token_bytes):
            if piece and piece in all_text:
                self._by_bytes.setdefault(piece, []).append(token)
        self._longest = max(map(len, self._by_bytes), default=0)

    def bytes_of(self, tokens: Iterable[int]) -> bytes:
        """The text of some tokens; special ones have none."""
        known = self._token_bytes
        return b"".join(known[token] for token in tokens if 0 <= token < len(known))

    def legal(self, language: Language, begun: bytes) -> set[int]:
        """The tokens with which a text of `language` can go on. The end of a text is not one."""
        pieces = {
            rest[:length]
            for rest in language.rests(begun)
            for length in range(1, min(len(rest), self._longest) + 1)
        }
        return {token for piece in pieces for token in self._by_bytes.get(piece, ())}


def why_not_forced(
    language: Language,
    table: TokenTable,
    ends: Collection[int],
    tokens: Sequence[int],
    runs: Iterable[tuple[int, int]],
) -> str | None:
    """Why some of `tokens` that were forced are not what the format forces; None if they are.

    Args:
        ends: the tokens that end a text.
        tokens: a whole output.
        runs: half-open intervals of `tokens` that were forced.
    """
    for start, end in runs:
        begun = table.bytes_of(tokens[:start])
        run = list(tokens[start:end])
        if run and run[-1] in ends:
            run.pop()
            if begun + table.bytes_of(run) not in language.texts:
                return f"the end was forced after token {end - 1}, where the text goes on"
        text = table.bytes_of(run)
        if not language.rests(begun):
            return f"the text before the forced token {start} does not fit the format"
        if not language.forced(begun).startswith(text):
            return f"{text!r} was forced at token {start}, where {language.forced(begun)!r} is"
    return None


def why_not_in(
    language: Language, table: TokenTable, ends: Collection[int], tokens: Sequence[int]
) -> str | None:
    """Why an output that has ended by itself is no text of the format; None if it is one."""
    text = table.bytes_of(token for token in tokens if token not in ends)
    return None if text in language.texts else f"{text!r} does not fit the format"


def forced_tokens(tokens: Sequence[int], runs: Iterable[tuple[int, int]]) -> Mapping[int, int]:
    """The forced tokens of an output by their positions. A run may be cut by the end of it."""
    return {
        place: tokens[place] for start, end in runs for place in range(start, min(end, len(tokens)))
    }
