"""Formats whose texts can be listed: which tokens are legal, and what is forced, without automata.

Owns the reference that structured canaries are compared with. It does not use `sgl_vllm.fsm`,
so it cannot have the same faults.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar


@dataclass(frozen=True)
class Language:
    """Fixed text with choices in it.

    Attributes:
        pieces: fixed text, or the texts to choose from. No choice begins with another one of its
            piece.
    """

    pieces: tuple[str | tuple[str, ...], ...]

    @property
    def _choices(self) -> list[tuple[str, ...]]:
        return [(piece,) if isinstance(piece, str) else piece for piece in self.pieces]

    @cached_property
    def regex(self) -> str:
        """The same format as a regular expression."""
        return "".join(f"({'|'.join(map(_quoted, texts))})" for texts in self._choices)

    @cached_property
    def texts(self) -> frozenset[bytes]:
        """Every text of the format, as UTF-8."""
        return frozenset("".join(chosen).encode() for chosen in itertools.product(*self._choices))

    def rests(self, begun: bytes) -> list[bytes]:
        """What may follow `begun` up to the end; empty if no text begins so."""
        return [text[len(begun) :] for text in self.texts if text.startswith(begun)]

    def forced(self, begun: bytes) -> bytes:
        """The text that follows `begun` in every case."""
        rests = self.rests(begun)
        ends = zip(min(rests, default=b""), max(rests, default=b""), strict=False)
        return bytes(one for one, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], ends))


def _quoted(text: str) -> str:
    return re.sub(r"([{}()\[\].*+?|\\^$])", r"\\\1", text)


class TokenTable:
    """The tokens that some texts consist of, by their bytes.

    Args:
        token_bytes: the bytes of each token; empty for special ones.
        end: the token that ends a text.
        languages: those whose texts are asked for later. Cost: O(tokens).
    """

    def __init__(
        self, token_bytes: Sequence[bytes], end: int, languages: Iterable[Language]
    ) -> None:
        self.end = end
        self._token_bytes = token_bytes
        all_text = b"\n".join(text for language in languages for text in language.texts)
        self._by_bytes: dict[bytes, list[int]] = {}
        for token, piece in enumerate(token_bytes):
            if piece and piece in all_text:
                self._by_bytes.setdefault(piece, []).append(token)

    def bytes_of(self, tokens: Iterable[int]) -> bytes:
        """The text of some tokens; special ones have none."""
        known = self._token_bytes
        return b"".join(known[token] for token in tokens if 0 <= token < len(known))

    def legal(self, language: Language, begun: bytes) -> set[int]:
        """The tokens with which a text of `language` can go on, or end."""
        pieces = {rest[:n] for rest in language.rests(begun) for n in range(1, len(rest) + 1)}
        legal = {token for piece in pieces for token in self._by_bytes.get(piece, ())}
        return legal | {self.end} if begun in language.texts else legal

    def why_not_in(self, language: Language, tokens: Sequence[int]) -> str | None:
        """Why an output that has ended by itself is no text of the format; None if it is one."""
        text = self.bytes_of(token for token in tokens if token != self.end)
        return None if text in language.texts else f"{text!r} does not fit the format"

    def why_not_forced(
        self, language: Language, tokens: Sequence[int], places: Iterable[int]
    ) -> str | None:
        """Why some tokens of an output that were forced are not what the format forces; None if
        they are."""
        for place in places:
            begun, piece = self.bytes_of(tokens[:place]), self.bytes_of(tokens[place : place + 1])
            if tokens[place] == self.end:
                if begun not in language.texts:
                    return f"the end was forced at token {place}, where the text goes on"
            elif not language.rests(begun):
                return f"the text before the forced token {place} does not fit the format"
            elif not language.forced(begun).startswith(piece):
                return f"{piece!r} was forced at token {place}, not {language.forced(begun)!r}"
        return None


class ListedGrammar(StructuredOutputGrammar):
    """The grammar of one request, in place of the one that vLLM would compile.

    Args:
        forced: by the place in the output, tokens that are the only legal ones there.
    """

    def __init__(self, language: Language, table: TokenTable, forced: Mapping[int, int]) -> None:
        self._language = language
        self._table = table
        self._forced = forced
        self._tokens: list[int] = []

    def _legal(self) -> set[int]:
        legal = self._table.legal(self._language, self._table.bytes_of(self._tokens))
        only = self._forced.get(len(self._tokens))
        return legal if only is None else legal & {only}

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        for token in tokens:
            if self.is_terminated():
                return True
            if token not in self._legal():
                return False
            self._tokens.append(token)
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """The longest prefix of `tokens` that would be accepted; does not advance."""
        num_before = len(self._tokens)
        for token in tokens:
            if self.is_terminated() or not self.accept_tokens("", [token]):
                break
        accepted = self._tokens[num_before:]
        self.rollback(len(accepted))
        return accepted

    def rollback(self, num_tokens: int) -> None:
        del self._tokens[len(self._tokens) - num_tokens :]

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        row = bitmask[batch_index]
        row.zero_()
        for token in self._legal():
            word, bit = divmod(token, 32)
            row[word] |= (1 << bit) - (1 << 32 if bit == 31 else 0)

    def is_terminated(self) -> bool:
        return self._tokens[-1:] == [self._table.end]

    def reset(self) -> None:
        self._tokens.clear()
