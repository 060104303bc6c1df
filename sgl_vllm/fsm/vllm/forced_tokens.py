"""The tokens that a request's grammar forces, whichever backend made the grammar.

Owns the questions to vLLM's live grammars, ours and those of vLLM's own backends, about what must
come next. Does not own the grammars (`grammar.py`), nor how text becomes tokens
(`fsm/forced_tokenizer.py`).
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_guidance import GuidanceGrammar
from vllm.v1.structured_output.backend_types import (
    StructuredOutputGrammar,
    StructuredOutputOptions,
)
from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar
from xgrammar import GrammarMatcher

from sgl_vllm.fsm.masks import only_bit
from sgl_vllm.fsm.vllm.backend import SglBackend
from sgl_vllm.fsm.vllm.formats import FORMATS
from sgl_vllm.fsm.vllm.grammar import SglGrammar
from sgl_vllm.fsm.vllm.resources import TokenizerResources
from sgl_vllm.fsm.vocabulary import Vocabulary, Words

MAX_FORCED_CHARS = 4_096
"""Longer forced text enters in several jumps: tokenizing it at once would hold up the engine."""

MAX_FORCED_BYTES_OF_XGRAMMAR = 256
"""Where xgrammar might force endless text, it is asked for one byte after the other, and for at
most this many at a time. Each costs some 10 us, and 200 us where most of the vocabulary is legal.
"""

MAX_RUN_BYTES = 64 << 10
"""Where no run can be longer, xgrammar is asked for the whole run: 1 us, and 0.1 us for a byte."""


class ForcedTokens:
    """The tokens that the grammar of a request forces.

    A call costs some microseconds, and more only if tokens are forced, or for the grammars of
    xgrammar that might force endless text (`MAX_FORCED_BYTES_OF_XGRAMMAR`).
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
        assert request.structured_output_request is not None
        return self._take_from_stock(
            grammar, request, backend, *request.structured_output_request.structured_output_key
        )

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

    def _take_from_stock(
        self,
        grammar: StructuredOutputGrammar,
        request: Request,
        backend: SglBackend,
        request_type: StructuredOutputOptions,
        spec: str,
    ) -> list[int]:
        """The same for a grammar that reports forced text only, and tokens through its bitmask."""
        if isinstance(grammar, XgrammarGrammar):
            if has_short_runs(request_type, spec):
                text = _run_of_xgrammar(grammar.matcher)
            else:
                masks = self._masks_of(backend.resources_of(request_type))
                text, _ = _whole_characters(_bytes_of_xgrammar(grammar.matcher, masks))
            is_complete = grammar.matcher.is_completed()
        elif isinstance(grammar, GuidanceGrammar):
            text, _ = _whole_characters(grammar.ll_matcher.compute_ff_bytes())
            is_complete = grammar.ll_matcher.is_accepting()
        else:
            return []
        if not text and not is_complete:
            return []
        text = text[:MAX_FORCED_CHARS]
        resources = backend.resources_of(request_type)
        masks, tokens = self._masks_of(resources), list[int]()
        if text:
            spelled = resources.forced_tokenizer.run(request._all_token_ids, text)
            tokens = list(spelled.tokens)
            if not tokens or not _accept(grammar, request, tokens):
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


def _accept(grammar: StructuredOutputGrammar, request: Request, tokens: list[int]) -> bool:
    """Advance `grammar` by `tokens`, which spell legal text. False, and no change, if one of them
    ends the text."""
    if not isinstance(grammar, XgrammarGrammar):
        if grammar.validate_tokens(tokens) != tokens:
            return False
        return grammar.accept_tokens(request.request_id, tokens)
    # xgrammar validates by accepting, some 30 us for a token: do it once.
    params = request.sampling_params
    if params is not None and not params.all_stop_token_ids.isdisjoint(tokens):
        return False
    num_before = grammar.num_processed_tokens
    grammar.accept_tokens(request.request_id, tokens)
    num_accepted = grammar.num_processed_tokens - num_before
    if num_accepted < len(tokens):
        grammar.rollback(num_accepted)
        return False
    return True


class _MaskReader:
    """Reads what one bitmask leaves open, for grammars that offer nothing but their bitmasks."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.bitmask = torch.full((1, vocabulary.num_words), -1, dtype=torch.int32)
        self._legal: Words = self.bitmask.numpy()[0].view(np.uint32)
        of_byte = {
            piece[0]: token for token, piece in enumerate(vocabulary.token_bytes) if len(piece) == 1
        }
        self._bytes, tokens = np.array([*of_byte.items()], dtype=np.int64).reshape(-1, 2).T
        self._words, self._shifts = tokens >> 5, (tokens & 31).astype(np.uint32)
        self._not_beginning_with: dict[int, Words] = {}

    def only_token(self) -> int | None:
        """The only legal token; None if there are none or several."""
        return only_bit(self._legal)

    def next_bytes(self) -> int:
        """The bytes that are legal tokens by themselves, as bits."""
        is_legal = (self._legal[self._words] >> self._shifts) & 1
        flags = np.zeros(256, np.uint8)
        flags[self._bytes] = is_legal
        return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")

    def only_first_byte(self) -> int | None:
        """The byte with which all legal tokens begin.

        None if they differ, if there are none, or if a legal token is not text. Costs a few passes
        over the bitmask.
        """
        legal, pieces = self._legal, self._vocabulary.token_bytes
        numbers = legal.nonzero()[0]
        if not len(numbers):
            return None
        number = int(numbers[0])
        token = number * 32 + (int(legal[number]) & -int(legal[number])).bit_length() - 1
        piece = pieces[token] if token < len(pieces) else b""
        if not piece:
            return None
        byte = piece[0]
        if byte not in self._not_beginning_with:
            ids = self._vocabulary.tokens_beginning_with(byte)
            self._not_beginning_with[byte] = ~self._vocabulary.words_of(ids)
        return None if (legal & self._not_beginning_with[byte]).any() else byte


def has_short_runs(request_type: StructuredOutputOptions, spec: str) -> bool:
    """Whether a format cannot force more than `MAX_RUN_BYTES` at a time."""
    return len(spec) <= MAX_RUN_BYTES and _has_short_runs(request_type, spec)


@functools.lru_cache(maxsize=128)
def _has_short_runs(request_type: StructuredOutputOptions, spec: str) -> bool:
    try:
        longest = FORMATS[request_type].longest_run(spec)
    except (ValueError, RecursionError):  # vLLM's backends read it, so it may still be a format
        return False
    return longest is not None and longest <= MAX_RUN_BYTES


def _run_of_xgrammar(matcher: GrammarMatcher) -> str:
    """The forced text. xgrammar has no limit for it: see `has_short_runs`."""
    try:
        run: str = matcher.find_jump_forward_string()
        return run
    except UnicodeDecodeError as error:  # it ends inside a character
        return _whole_characters(error.object)[0]


def _bytes_of_xgrammar(matcher: GrammarMatcher, masks: _MaskReader) -> bytes:
    """The forced bytes, found one at a time, as a short grammar can force gigabytes, such as
    `root ::= "a" root`."""
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
