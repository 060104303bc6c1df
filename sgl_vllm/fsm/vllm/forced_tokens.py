"""The tokens that a request's grammar forces.

Owns the questions to live grammars, ours and guidance's, about what must come next. Does not own
the grammars (`grammar.py`), nor how text becomes tokens (`fsm/forced_tokenizer.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_guidance import GuidanceGrammar
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from sgl_vllm.fsm.masks import only_bit
from sgl_vllm.fsm.vllm.backend import SglBackend
from sgl_vllm.fsm.vllm.grammar import SglGrammar
from sgl_vllm.fsm.vllm.resources import TokenizerResources
from sgl_vllm.fsm.vocabulary import Vocabulary, Words

MAX_FORCED_CHARS = 4_096
"""Longer forced text enters in several jumps: tokenizing it at once would hold up the engine."""


class ForcedTokens:
    """The tokens that the grammar of a request forces.

    A call takes a few microseconds, or more if tokens are forced. xgrammar's own grammars are not
    asked: few formats use them, and some of these force endless text, which xgrammar does not
    limit.
    """

    def __init__(self, manager: StructuredOutputManager) -> None:
        self._manager = manager
        self._mask_readers: dict[TokenizerResources, _MaskReader] = {}

    def take(self, request: Request) -> list[int]:
        """The tokens forced after what `request` has so far; its grammar has accepted them.

        Empty if nothing is forced, or if the grammar is of a kind that cannot be asked.
        """
        grammar = live_grammar(self._manager, request)
        backend = self._manager.backend
        if grammar is None or not isinstance(backend, SglBackend):
            return []
        if isinstance(grammar, SglGrammar):
            return self._take_from_ours(grammar, request)
        if isinstance(grammar, GuidanceGrammar):
            assert request.structured_output_request is not None
            kind, _ = request.structured_output_request.structured_output_key
            return self._take_from_guidance(grammar, request, backend.resources_of(kind))
        return []

    @staticmethod
    def _take_from_ours(grammar: SglGrammar, request: Request) -> list[int]:
        run, next_bytes, end = grammar.forced()
        if not run and end is None:
            return []
        text, rest = _whole_characters(run)
        if rest:
            next_bytes, end = 1 << rest[0], None
        tokens: tuple[int, ...] = ()
        if text:
            spelled = grammar.resources.forced_tokenizer.run(request._all_token_ids, text)
            if not spelled.tokens or not grammar.stops.isdisjoint(spelled.tokens):
                return []  # a stop token is not text here: leave it to the model
            tokens = spelled.settled(next_bytes)
        if tokens and not grammar.accept_run(request.request_id, tokens):
            raise RuntimeError(f"forced tokens {tokens} are refused by their own grammar")
        if end is None:
            return list(tokens)
        grammar.accept_tokens(request.request_id, [end])
        return [*tokens, end]

    def _take_from_guidance(
        self, grammar: GuidanceGrammar, request: Request, resources: TokenizerResources
    ) -> list[int]:
        """The same for a grammar that reports forced text only, and tokens through its bitmask."""
        text, _ = _whole_characters(grammar.ll_matcher.compute_ff_bytes())
        if not text and not grammar.ll_matcher.is_accepting():
            return []
        text = text[:MAX_FORCED_CHARS]
        masks, tokens = self._masks_of(resources), list[int]()
        if text:
            spelled = resources.forced_tokenizer.run(request._all_token_ids, text)
            tokens = list(spelled.tokens)
            if not tokens or grammar.validate_tokens(tokens) != tokens:
                return []
            if not grammar.accept_tokens(request.request_id, tokens):
                return []
        try:
            grammar.fill_bitmask(masks.bitmask, 0)
            next_bytes, end = masks.next_bytes(), masks.only_token()
            num_settled = len(tokens)
            if next_bytes or end is None:
                num_settled, end = len(spelled.settled(next_bytes)) if tokens else 0, None
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

    def _masks_of(self, resources: TokenizerResources) -> _MaskReader:
        masks = self._mask_readers.get(resources)
        if masks is None:
            masks = self._mask_readers[resources] = _MaskReader(resources.vocabulary)
        return masks


def live_grammar(
    manager: StructuredOutputManager, request: Request
) -> StructuredOutputGrammar | None:
    """The grammar that decides on the next token of `request`.

    None if there is none, if it has ended, or while the model reasons (unless the grammar holds
    then, too: `enable_in_reasoning`).
    """
    structured = request.structured_output_request
    if structured is None:
        return None
    waits_for_reasoning = manager.reasoner_cls is not None and not manager.enable_in_reasoning
    if waits_for_reasoning and not structured.reasoning_ended:
        return None
    grammar = structured.grammar
    if not isinstance(grammar, StructuredOutputGrammar) or grammar.is_terminated():
        return None
    return grammar


def may_end(grammar: StructuredOutputGrammar, stops: Iterable[int]) -> bool:
    """Whether the next token may be one of `stops`, which end the text."""
    if isinstance(grammar, GuidanceGrammar):
        return bool(grammar.ll_matcher.is_accepting())
    return any(grammar.validate_tokens([stop]) for stop in stops)


class _MaskReader:
    """Reads what one bitmask leaves open."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.bitmask = torch.full((1, vocabulary.num_words), -1, dtype=torch.int32)
        self._legal: Words = self.bitmask.numpy()[0].view(np.uint32)
        of_byte = {
            piece[0]: token for token, piece in enumerate(vocabulary.token_bytes) if len(piece) == 1
        }
        self._bytes, tokens = np.array([*of_byte.items()], dtype=np.int64).reshape(-1, 2).T
        self._words, self._shifts = tokens >> 5, (tokens & 31).astype(np.uint32)

    def only_token(self) -> int | None:
        """The only legal token; None if there are none or several."""
        return only_bit(self._legal)

    def next_bytes(self) -> int:
        """The bytes that are legal tokens by themselves, as bits."""
        is_legal = (self._legal[self._words] >> self._shifts) & 1
        flags = np.zeros(256, np.uint8)
        flags[self._bytes] = is_legal
        return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")


def _whole_characters(data: bytes) -> tuple[str, bytes]:
    """The text that `data` begins with, and the bytes of a last character that is cut."""
    try:
        return data.decode(), b""
    except UnicodeDecodeError as error:
        return data[: error.start].decode(), data[error.start :]
