"""The tokens that a request's grammar leaves no choice about, whoever's grammar it is.

Owns: asking vLLM's live grammars, ours and those of stock's backends, what must come next. Does not
own the grammars (`backend.py`), nor how text becomes tokens (`forced.py`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_guidance import GuidanceGrammar
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar
from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar

from sgl_vllm.fsm.forced import ForcedTokenizer
from sgl_vllm.fsm.masks import Row, only_bit
from sgl_vllm.fsm.vllm.backend import SglBackend, SglGrammar, TokenizerResources
from sgl_vllm.fsm.vocabulary import Vocabulary

MAX_FORCED_CHARS = 4_096
"""Longer forced text enters in several jumps, so that tokenizing it does not hold up the engine."""

MAX_FORCED_BYTES_OF_XGRAMMAR = 256
"""As many are asked of a grammar of xgrammar's at a time; each costs some ten microseconds."""


class ForcedTokens:
    """The tokens that the grammar of a request leaves no choice about.

    A call costs some microseconds for our own grammars and some tens for others, more only when
    there is something to jump over.
    """

    def __init__(self, manager: StructuredOutputManager) -> None:
        self._manager = manager
        self._masks: _MaskReader | None = None

    def take(self, request: Request) -> list[int]:
        """The tokens forced after what `request` has so far; its grammar has accepted them.

        Empty if nothing is forced, or if the grammar is not one that can be asked.
        """
        grammar = live_grammar(self._manager, request)
        backend = self._manager.backend
        if grammar is None or not isinstance(backend, SglBackend):
            return []
        if isinstance(grammar, SglGrammar):
            return self._take_ours(grammar, request, backend.tools.forced)
        return self._take_others(grammar, request, backend.tools)

    @staticmethod
    def _take_ours(grammar: SglGrammar, request: Request, tokenizer: ForcedTokenizer) -> list[int]:
        run, next_bytes, end = grammar.forced()
        if not run and end is None:
            return []
        text, rest = _whole_characters(run)
        if rest:
            next_bytes, end = 1 << rest[0], None
        tokens = tokenizer.tokenize(request._all_token_ids, text) if text else []
        if text and not tokens:
            return []
        if not grammar.stops.isdisjoint(tokens):  # they are no text here: the model goes around
            return []
        tokens = tokens[: tokenizer.num_settled(tokens, next_bytes)]
        if end is not None:
            tokens.append(end)
        if tokens and not grammar.accept_tokens(request.request_id, tokens):
            raise RuntimeError(f"forced tokens {tokens} are refused by their own grammar")
        return tokens

    def _take_others(
        self, grammar: StructuredOutputGrammar, request: Request, tools: TokenizerResources
    ) -> list[int]:
        """The same of a grammar that only tells the forced text, and tokens by its mask."""
        if self._masks is None:
            self._masks = _MaskReader(tools.vocabulary)
        if isinstance(grammar, XgrammarGrammar):
            text, _ = _whole_characters(_forced_of_xgrammar(grammar.matcher, self._masks))
            completed = grammar.matcher.is_completed()
        elif isinstance(grammar, GuidanceGrammar):
            text, _ = _whole_characters(grammar.ll_matcher.compute_ff_bytes())
            completed = grammar.ll_matcher.is_accepting()
        else:
            return []
        if not text and not completed:
            return []
        text = text[:MAX_FORCED_CHARS]
        tokens = tools.forced.tokenize(request._all_token_ids, text) if text else []
        if (text and not tokens) or grammar.validate_tokens(tokens) != tokens:
            return []
        grammar.accept_tokens(request.request_id, tokens)
        try:
            grammar.fill_bitmask(self._masks.bitmask, 0)
            next_bytes, end = self._masks.next_bytes(), self._masks.only_token()
            num_settled = len(tokens)
            if next_bytes or end is None:
                num_settled, end = tools.forced.num_settled(tokens, next_bytes), None
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


def live_grammar(
    manager: StructuredOutputManager, request: Request
) -> StructuredOutputGrammar | None:
    """The grammar that decides on the next token of `request`; None if none does (any more, or as
    long as the model reasons)."""
    structured = request.structured_output_request
    if structured is None:
        return None
    if manager.reasoner_cls is not None and not structured.reasoning_ended:
        return None
    grammar = structured.grammar
    if not isinstance(grammar, StructuredOutputGrammar) or grammar.is_terminated():
        return None
    return grammar


class _MaskReader:
    """What one mask leaves open, of grammars that tell no more than their masks."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.bitmask = torch.full((1, vocabulary.num_words), -1, dtype=torch.int32)
        self._legal: Row = self.bitmask.numpy()[0].view(np.uint32)
        self._byte_tokens = [
            (piece[0], token)
            for token, piece in enumerate(vocabulary.token_bytes)
            if len(piece) == 1
        ]
        self._others: dict[int, Row] = {}
        """For a byte, the tokens that do not begin with it."""

    def only_token(self) -> int | None:
        """The one legal token, if it is but one."""
        return only_bit(self._legal)

    def next_bytes(self) -> int:
        """The bytes that are legal tokens by themselves, as bits."""
        legal = self._legal
        return sum(
            1 << byte for byte, token in self._byte_tokens if legal[token >> 5] >> (token & 31) & 1
        )

    def only_first_byte(self) -> int | None:
        """The byte with which all legal tokens begin; None if there is none or a legal token is no
        text. A few passes over the mask."""
        legal, pieces = self._legal, self._vocabulary.token_bytes
        words = legal.nonzero()[0]
        if not len(words):
            return None
        word = int(words[0])
        token = word * 32 + (int(legal[word]) & -int(legal[word])).bit_length() - 1
        piece = pieces[token] if token < len(pieces) else b""
        if not piece:
            return None
        byte = piece[0]
        if byte not in self._others:
            ids = self._vocabulary.tokens_beginning_with(byte)
            self._others[byte] = ~self._vocabulary.row_of(ids)
        return None if (legal & self._others[byte]).any() else byte


def _forced_of_xgrammar(matcher: Any, masks: _MaskReader) -> bytes:
    """What must come next, byte by byte: its own `find_jump_forward_string` knows no limit, and
    twenty lines of a grammar may force gigabytes, `root ::= "a" root` without end."""
    run = bytearray()
    while len(run) < MAX_FORCED_BYTES_OF_XGRAMMAR and not matcher.is_completed():
        matcher.fill_next_token_bitmask(masks.bitmask)
        byte = masks.only_first_byte()
        if byte is None or not matcher.accept_string(bytes([byte])):
            break
        run.append(byte)
    if run:
        matcher.rollback(len(run))
    return bytes(run)


def _whole_characters(data: bytes) -> tuple[str, bytes]:
    """The text that `data` begins with, and the bytes of a last character that is cut."""
    try:
        return data.decode(), b""
    except UnicodeDecodeError as error:
        return data[: error.start].decode(), data[error.start :]
