"""Forced tokens by a grammar's bitmask alone: those that are the only legal token.

Used with `jump_mode=exact`. Works with every structured-output backend, because it asks through
vLLM's interface. `fsm/vllm/forced_tokens.py` asks for forced text and spells it canonically.
"""

from __future__ import annotations

import numpy as np
import torch
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from sgl_vllm.fsm.masks import only_bit
from sgl_vllm.fsm.vllm.forced_tokens import live_grammar


class UniqueTokens:
    """Takes tokens from grammars while exactly one is legal: one bitmask for each, and one more."""

    def __init__(self, manager: StructuredOutputManager) -> None:
        self._manager = manager
        self._bitmask: torch.Tensor | None = None

    def take(self, request: Request) -> list[int]:
        """The tokens forced after the last token of `request`; its grammar has accepted them."""
        grammar = live_grammar(self._manager, request)
        if grammar is None:
            return []
        tokens: list[int] = []
        room = request.max_tokens - request.num_output_tokens
        try:
            while len(tokens) < room and not grammar.is_terminated():
                token = self._only_legal_token(grammar)
                if token is None or not grammar.accept_tokens(request.request_id, [token]):
                    break
                tokens.append(token)
        except Exception:
            if tokens:
                grammar.rollback(len(tokens))
            raise
        return tokens

    def _only_legal_token(self, grammar: StructuredOutputGrammar) -> int | None:
        if self._bitmask is None:
            backend = self._manager.backend
            assert backend is not None
            self._bitmask = backend.allocate_token_bitmask(1)
        grammar.fill_bitmask(self._bitmask, 0)
        return only_bit(self._bitmask.numpy()[0].view(np.uint32))
