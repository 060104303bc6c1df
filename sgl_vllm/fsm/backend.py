"""Asks vLLM's live grammars what they force next.

Owns: every contact of jump-forward with vLLM's structured-output backends. The grammar stays
vLLM's own, masks included, so what is legal is exactly what stock says; only xgrammar's grammars
can be asked so far, and a request with another one is decoded token by token as in stock.
"""

from __future__ import annotations

import numpy as np
import torch
import xgrammar
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend, XgrammarGrammar

from sgl_vllm.fsm.forced import ForcedTokenizer


class ForcedTokens:
    """The tokens that the grammar of a request leaves no choice about.

    Built with the first structured request (one sort of the vocabulary). A call costs some tens of
    microseconds, more only when there is something to jump over.
    """

    def __init__(self, manager: StructuredOutputManager) -> None:
        self._manager = manager
        self._tokenizer: ForcedTokenizer | None = None
        self._byte_tokens: list[tuple[int, int]] = []
        self._mask: torch.Tensor | None = None

    def take(self, request: Request) -> list[int]:
        """The tokens forced after what `request` has so far; its grammar has accepted them.

        Empty if nothing is forced, or if the grammar is not one that can be asked.
        """
        structured = request.structured_output_request
        backend = self._manager.backend
        if structured is None or not isinstance(backend, XgrammarBackend):
            return []
        if self._manager.reasoner_cls is not None and not structured.reasoning_ended:
            return []
        grammar = structured.grammar
        if not isinstance(grammar, XgrammarGrammar) or grammar.is_terminated():
            return []
        try:
            text = grammar.matcher.find_jump_forward_string()
        except UnicodeDecodeError:  # what is forced ends inside a character: the model goes on
            return []
        if not text and not grammar.matcher.is_completed():
            return []
        if self._tokenizer is None:
            self._build(backend, grammar.ctx.tokenizer_info)
        assert self._tokenizer is not None
        tokens = self._tokenizer.tokenize(request._all_token_ids, text) if text else []
        if (text and not tokens) or grammar.validate_tokens(tokens) != tokens:
            return []
        grammar.accept_tokens(request.request_id, tokens)
        try:
            num_settled, end = self._settle(grammar, tokens)
        except Exception:
            grammar.rollback(len(tokens))
            raise
        if num_settled < len(tokens):
            grammar.rollback(len(tokens) - num_settled)
        if end is not None:
            grammar.accept_tokens(request.request_id, [end])
            tokens.append(end)
            num_settled += 1
        return tokens[:num_settled]

    def _settle(self, grammar: XgrammarGrammar, tokens: list[int]) -> tuple[int, int | None]:
        """How many of `tokens`, which `grammar` has accepted, no longer token could absorb; and the
        one token that may follow them (in practice the end of the sequence), if it is but one."""
        assert self._tokenizer is not None
        legal = self._legal_tokens(grammar)
        next_bytes = sum(
            1 << byte for byte, token in self._byte_tokens if legal[token >> 5] >> (token & 31) & 1
        )
        if next_bytes or int(np.bitwise_count(legal).sum()) != 1:
            return self._tokenizer.num_settled(tokens, next_bytes), None
        word = int(legal.nonzero()[0][0])
        return len(tokens), word * 32 + int(legal[word]).bit_length() - 1

    def _legal_tokens(self, grammar: XgrammarGrammar) -> np.ndarray:
        """The grammar's mask in its present state: bit t of the row for token t."""
        assert self._mask is not None
        grammar.fill_bitmask(self._mask, 0)
        return self._mask.numpy()[0].view(np.uint32)

    def _build(self, backend: XgrammarBackend, info: xgrammar.TokenizerInfo) -> None:
        token_bytes = list(info.decoded_vocab)
        for token in {*info.special_token_ids, *info.stop_token_ids}:
            token_bytes[token] = b""
        tokenizer = self._manager.tokenizer
        self._tokenizer = ForcedTokenizer(
            lambda text: tokenizer.encode(text, add_special_tokens=False), token_bytes
        )
        self._byte_tokens = [
            (piece[0], token) for token, piece in enumerate(token_bytes) if len(piece) == 1
        ]
        self._mask = backend.allocate_token_bitmask(1)
