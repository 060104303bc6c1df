"""vLLM's grammar interface over a format whose texts are listed (`language.py`).

Owns where one request is in its text. It is the reference for automata and for jumps: it
replaces the grammar that vLLM would compile, and can be given the tokens that a jump has forced.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from sgl_vllm.self_check.language import Language, TokenTable


class ListedGrammar(StructuredOutputGrammar):
    """The grammar of one request.

    Args:
        ends: the tokens that end a text; legal where it is complete.
        forced: by the place in the output, tokens that are the only legal ones there.
    """

    def __init__(
        self,
        language: Language,
        table: TokenTable,
        ends: Collection[int],
        forced: Mapping[int, int] | None = None,
    ) -> None:
        self._language = language
        self._table = table
        self._ends = frozenset(ends)
        self._forced = forced or {}
        self._tokens: list[int] = []
        self._has_ended = False

    def _legal(self) -> set[int]:
        begun = self._table.bytes_of(self._tokens)
        legal = self._table.legal(self._language, begun)
        if begun in self._language.texts:
            legal |= self._ends
        only = self._forced.get(len(self._tokens))
        return legal if only is None else legal & {only}

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        for token in tokens:
            if self._has_ended:
                return True
            if token not in self._legal():
                return False
            self._tokens.append(token)
            self._has_ended = token in self._ends
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """The longest prefix of `tokens` that would be accepted; does not advance."""
        num_before, had_ended = len(self._tokens), self._has_ended
        accepted: list[int] = []
        for token in tokens:
            if self._has_ended or not self.accept_tokens("", [token]):
                break
            accepted.append(token)
        del self._tokens[num_before:]
        self._has_ended = had_ended
        return accepted

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            del self._tokens[-num_tokens:]
            self._has_ended = False

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        row = bitmask[batch_index]
        row.zero_()
        for token in self._legal():
            word, bit = divmod(token, 32)
            row[word] |= (1 << bit) - (1 << 32 if bit == 31 else 0)

    def is_terminated(self) -> bool:
        return self._has_ended

    def reset(self) -> None:
        self._tokens.clear()
        self._has_ended = False
