"""Structured output for vLLM: our automata where a format is regular enough, stock's backends for
the rest.

Owns: vLLM's structured-output interface. Which texts are legal is decided in `schema.py` and
`regex.py`; which tokens in `masks.py`. What a grammar forces is asked in `forced_tokens.py`.

    format           ours                                           otherwise
    json             what `schema.py` takes on (see `SchemaSemantics`)      xgrammar, guidance
    json_object      always
    regex            what `regex.py` takes on                       xgrammar, guidance
    choice           always (stock's frontend makes it a grammar)
    grammar, structural_tag                                         xgrammar, guidance
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.tokenizers import TokenizerLike
from vllm.v1.structured_output.backend_guidance import (
    GuidanceBackend,
    GuidanceGrammar,
    process_for_additional_properties,
)
from vllm.v1.structured_output.backend_types import (
    StructuredOutputBackend,
    StructuredOutputGrammar,
    StructuredOutputOptions,
)
from vllm.v1.structured_output.backend_xgrammar import (
    XgrammarBackend,
    has_xgrammar_unsupported_json_features,
)

from sgl_vllm.fsm import regex
from sgl_vllm.fsm.automaton import Automaton, Expression, Literals, State, TooComplexError
from sgl_vllm.fsm.forced import ForcedTokenizer
from sgl_vllm.fsm.masks import Masks, Row
from sgl_vllm.fsm.schema import SchemaSemantics, UnsupportedSchemaError, compile_schema
from sgl_vllm.fsm.vllm.limits import (
    MAX_UNTRIED_CHARS,
    CompilingTakesTooLongError,
    SandboxedCompiler,
    named,
    within_limits,
)
from sgl_vllm.fsm.vocabulary import Vocabulary

logger = init_logger("vllm.sgl_vllm.fsm")

MAX_SPEC_CHARS = 4 << 20
"""A longer schema, pattern or grammar is refused."""

MAX_GRAMMAR_CHARS = 32 << 10
"""The same of a grammar for stock's backends. A chain of rules of 36 kB costs xgrammar 0.8 GB, one
of 1 MB more than 21 GB in a compilation that cannot be interrupted, and with it the engine."""

MAX_CACHED_GRAMMARS = 1_000
MAX_CACHED_STATES = 100_000
_CHECK_EVERY = 32

MAX_ERRORS = 8
"""So many unexpected errors, and our automata take no more requests."""


@dataclass
class BackendCounters:
    """Grammars that requests asked for since start, by who made them; how many were compiled,
    whatever came of it, and how long all of that took."""

    ours: int = 0
    ours_cached: int = 0
    xgrammar: int = 0
    guidance: int = 0
    refused: int = 0
    errors: int = 0
    compilations: int = 0
    compile_s: float = 0.0


@dataclass
class SglBackend(StructuredOutputBackend):
    """vLLM's interface over `sgl_vllm.fsm`.

    Args:
        vllm_config, tokenizer, vocab_size: as vLLM's backends take them.
        reading: what a schema means where backends differ; a server reads as the backend that it
            would have without us.
        use_automata: without, everything is handed on to stock's backends.
        stock: which of these is asked first, "xgrammar" or "guidance".

    Cheap to make: the vocabulary is prepared with the first grammar, outside the engine's thread.
    """

    reading: SchemaSemantics = SchemaSemantics.SPEC
    use_automata: bool = True
    stock: str = "xgrammar"
    counters: BackendCounters = field(default_factory=BackendCounters)

    def __post_init__(self) -> None:
        config = self.vllm_config.structured_outputs_config
        self._any_whitespace = not config.disable_any_whitespace
        self._close_objects = (
            config.disable_additional_properties and self.reading is SchemaSemantics.SPEC
        )
        self._lock = threading.RLock()
        self._tools: TokenizerResources | None = None
        self._guidance: GuidanceBackend | None = None
        self._automata: OrderedDict[tuple[StructuredOutputOptions, str], Automaton] = OrderedDict()
        self._num_compiled = 0
        self._rows_of: torch.Tensor | None = None
        self._rows: Row = np.zeros((0, 0), np.uint32)

    # -- vLLM's interface -------------------------------------------------------------------------

    def compile_grammar(
        self,
        request_type: StructuredOutputOptions,
        grammar_spec: str,
        stop_token_ids: set[int] | None = None,
    ) -> StructuredOutputGrammar:
        if len(grammar_spec) > MAX_SPEC_CHARS:
            self.counters.refused += 1
            raise ValueError(
                f"a {request_type.name.lower()} of {len(grammar_spec):,} characters; at most "
                f"{MAX_SPEC_CHARS:,} are taken"
            )
        _ = self.tools  # made here, which takes what time it takes, and not within the limits
        known = self._known(request_type, grammar_spec)
        if known is not None:
            return self._grammar(known, stop_token_ids)
        started = time.monotonic()
        try:
            return self._compile(request_type, grammar_spec, stop_token_ids)
        except Exception:
            self.counters.refused += 1
            raise
        finally:
            with self._lock:
                self.counters.compilations += 1
                self.counters.compile_s += time.monotonic() - started

    def allocate_token_bitmask(self, max_num_seqs: int) -> torch.Tensor:
        words = self.tools.vocabulary.num_words
        return torch.full((max_num_seqs, words), -1, dtype=torch.int32)

    def destroy(self) -> None:
        self._automata.clear()
        if self._tools is not None:
            self._tools.trial.stop()

    @property
    def failed(self) -> bool:
        """Errors have switched our automata off: everything is handed on."""
        return self.counters.errors >= MAX_ERRORS

    def note_error(self, doing: str) -> None:
        """Log the exception at hand, which should not have been."""
        logger.exception("error in %s. Please report this with the lines below", doing)
        self.counters.errors += 1
        if self.counters.errors == MAX_ERRORS:
            logger.error("%d errors: new grammars are left to stock's backends", MAX_ERRORS)

    # -- inside -----------------------------------------------------------------------------------

    @property
    def tools(self) -> TokenizerResources:
        """What is made once per vocabulary."""
        if self._tools is None:
            with self._lock:
                if self._tools is None:
                    self._tools = TokenizerResources(
                        self.vllm_config, self.tokenizer, self.vocab_size
                    )
        return self._tools

    def row(self, bitmask: torch.Tensor, index: int) -> Row:
        """A row of vLLM's bitmask, which is one tensor for the engine's whole life."""
        if self._rows_of is not bitmask:
            self._rows = bitmask.numpy().view(np.uint32)
            self._rows_of = bitmask
        return self._rows[index]

    @property
    def _takes_formats(self) -> bool:
        return self.use_automata and not self.failed

    def knows(self, request_type: StructuredOutputOptions, spec: str) -> bool:
        """Whether `compile_grammar` answers at once."""
        return self._takes_formats and (request_type, spec) in self._automata

    def _grammar(self, automaton: Automaton, stop_token_ids: set[int] | None) -> SglGrammar:
        return SglGrammar(self, automaton, stop_token_ids or {self.tools.end_token})

    def _known(self, request_type: StructuredOutputOptions, spec: str) -> Automaton | None:
        """The automaton of a format that was asked for before."""
        if not self._takes_formats:
            return None
        with self._lock:
            known = self._automata.get((request_type, spec))
            if known is not None:
                self._automata.move_to_end((request_type, spec))
                self.counters.ours_cached += 1
            return known

    def _compile(
        self, request_type: StructuredOutputOptions, spec: str, stop_token_ids: set[int] | None
    ) -> StructuredOutputGrammar:
        if self._takes_formats:
            try:
                automaton = within_limits(lambda: self._automaton(request_type, spec), request_type)
            except CompilingTakesTooLongError:
                raise
            except Exception:
                self.note_error("compiling a grammar, which is handed on")
            else:
                if automaton is not None:
                    return self._grammar(automaton, stop_token_ids)
        grammar = self._delegated(request_type, spec, stop_token_ids)
        mask = self.allocate_token_bitmask(1).zero_()
        within_limits(lambda: grammar.fill_bitmask(mask, 0), request_type)
        if not mask.any():  # vLLM would sample token 0, and fail the request for it
            raise ValueError(f"no text satisfies {named(request_type)}")
        return grammar

    def _automaton(self, request_type: StructuredOutputOptions, spec: str) -> Automaton | None:
        """The automaton of a format; None if it is another backend's."""
        expression = self._expression(request_type, spec)
        if expression is None:
            return None
        try:
            automaton = Automaton(expression)
        except TooComplexError as error:
            logger.debug("handed on: %s", error)
            return None
        if not automaton.start.first and not automaton.start.accepting:
            return None
        with self._lock:
            self.counters.ours += 1
            self._automata[request_type, spec] = automaton
            self._num_compiled += 1
            if self._num_compiled % _CHECK_EVERY == 0:
                self._shrink()
        return automaton

    def _shrink(self) -> None:
        """Let go of the grammars that were asked for longest ago."""
        states = sum(automaton.num_states for automaton in self._automata.values())
        while len(self._automata) > 1 and (
            len(self._automata) > MAX_CACHED_GRAMMARS or states > MAX_CACHED_STATES
        ):
            states -= self._automata.popitem(last=False)[1].num_states

    def _expression(self, request_type: StructuredOutputOptions, spec: str) -> Expression | None:
        try:
            if request_type == StructuredOutputOptions.JSON:
                schema: Any = spec
                if self._close_objects:
                    schema = process_for_additional_properties(spec)
                return compile_schema(
                    schema, reading=self.reading, any_whitespace=self._any_whitespace
                )
            if request_type == StructuredOutputOptions.JSON_OBJECT:
                return compile_schema({"type": "object"}, any_whitespace=self._any_whitespace)
            if request_type == StructuredOutputOptions.REGEX:
                dfa = regex.full_match(spec)
                return None if regex.is_empty(dfa) else dfa.expression
            if request_type == StructuredOutputOptions.CHOICE:
                return _one_of(json.loads(spec))
            if request_type == StructuredOutputOptions.GRAMMAR:
                choices = choices_of_grammar(spec)
                return None if choices is None else _one_of(choices)
        except (UnsupportedSchemaError, regex.UnsupportedPatternError, TooComplexError) as error:
            logger.debug("handed on: %s", error)
        return None

    def _delegated(
        self,
        request_type: StructuredOutputOptions,
        spec: str,
        stop_token_ids: set[int] | None,
    ) -> StructuredOutputGrammar:
        """A grammar of one of stock's backends.

        xgrammar leaves out what it does not know of a schema. In the strict reading that is what
        stock answers; whoever asks for the specification gets guidance, which refuses instead.
        """
        if request_type == StructuredOutputOptions.GRAMMAR and len(spec) > MAX_GRAMMAR_CHARS:
            raise ValueError(
                f"a grammar of {len(spec):,} characters; at most {MAX_GRAMMAR_CHARS:,} are taken"
            )
        makers = [self._from_xgrammar, self._from_guidance]
        is_json = request_type == StructuredOutputOptions.JSON
        if self.stock == "guidance" or (is_json and self.reading is SchemaSemantics.SPEC):
            makers = [self._from_guidance]
        elif is_json and _xgrammar_lacks(spec):
            makers.reverse()
        for make in makers[:-1]:
            try:
                return make(request_type, spec, stop_token_ids)
            except CompilingTakesTooLongError:
                raise
            except Exception as error:
                logger.debug("handed on: %s", error)
        return makers[-1](request_type, spec, stop_token_ids)

    def _from_xgrammar(
        self, request_type: StructuredOutputOptions, spec: str, stop_token_ids: set[int] | None
    ) -> StructuredOutputGrammar:
        if len(spec) > MAX_UNTRIED_CHARS:
            self.tools.trial.compile(request_type, spec, any_whitespace=self._any_whitespace)
        grammar = within_limits(
            lambda: self.tools.xgrammar.compile_grammar(request_type, spec, stop_token_ids),
            request_type,
        )
        self.counters.xgrammar += 1
        return grammar

    def _from_guidance(
        self, request_type: StructuredOutputOptions, spec: str, stop_token_ids: set[int] | None
    ) -> StructuredOutputGrammar:
        with self._lock:
            if self._guidance is None:
                self._guidance = GuidanceBackend(
                    self.vllm_config, tokenizer=self.tokenizer, vocab_size=self.vocab_size
                )
        guidance = self._guidance
        grammar = within_limits(
            lambda: guidance.compile_grammar(request_type, spec, stop_token_ids),
            request_type,
        )
        assert isinstance(grammar, GuidanceGrammar)
        if error := grammar.ll_matcher.get_error():
            raise ValueError(error)
        self.counters.guidance += 1
        return grammar


class TokenizerResources:
    """What is made once per vocabulary: stock's default backend, which reads the tokenizer and
    takes what is not ours, and the trie of its tokens."""

    def __init__(self, config: VllmConfig, tokenizer: TokenizerLike, vocab_size: int) -> None:
        self.xgrammar = XgrammarBackend(config, tokenizer=tokenizer, vocab_size=vocab_size)
        self.trial = SandboxedCompiler(partial(tokenizer_info, self.xgrammar))
        self.token_bytes, self.end_token = bytes_of_tokens(self.xgrammar)
        self.vocabulary = Vocabulary(
            self.token_bytes, max(self.xgrammar.vocab_size, len(self.token_bytes))
        )
        self.masks = Masks(self.vocabulary)
        self._warm_up()
        self.forced = ForcedTokenizer(
            lambda text: tokenizer.encode(text, add_special_tokens=False), self.token_bytes
        )

    def _warm_up(self) -> None:
        """Have numba compile its loops, or load them, before the first request needs them."""
        schema = {
            "properties": {"a": {"type": "integer", "minimum": 1}},
            "additionalProperties": True,
        }
        automaton = Automaton(compile_schema({"type": "object", **schema}))
        row = np.zeros(self.vocabulary.num_words, np.uint32)
        for text in (b"", b'{"', b'{"a": 1'):
            state: State | None = automaton.start
            for byte in text:
                assert state is not None
                state = state.step(byte)
            assert state is not None
            self.masks.of(state).fill(row)


def tokenizer_info(xgrammar: XgrammarBackend) -> Any:
    """xgrammar's own description of the vocabulary."""
    return xgrammar.compiler.compile_grammar('root ::= "a"').tokenizer_info


def bytes_of_tokens(xgrammar: XgrammarBackend) -> tuple[list[bytes], int]:
    """The text of each token, empty for special ones, and the token that ends a text."""
    info = tokenizer_info(xgrammar)
    token_bytes = list(info.decoded_vocab)
    for token in {*info.special_token_ids, *info.stop_token_ids}:
        token_bytes[token] = b""
    return token_bytes, int(info.stop_token_ids[0])


class SglGrammar(StructuredOutputGrammar):
    """Where one request is in an automaton that many may share."""

    def __init__(self, backend: SglBackend, automaton: Automaton, stops: Iterable[int]) -> None:
        tools = backend.tools
        self._backend = backend
        self._tools = tools
        self.stops = frozenset(stops)
        """The tokens that end the text, and are legal only where it may end."""
        self._stop_bits = [(t >> 5, np.uint32(1 << (t & 31))) for t in sorted(self.stops)]
        self._path: list[State] = [automaton.start]
        self._terminated = False
        self._failed = False

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Advance; False at the first token that may not come. Tokens after the end are ignored."""
        for token in tokens:
            if self._terminated:
                return True
            if not self._accept(token):
                logger.error("the grammar of request %s refuses token %d", request_id, token)
                return False
        return True

    def _accept(self, token: int) -> bool:
        state = self._path[-1]
        if token in self.stops:
            if not state.accepting or self._failed:
                return False
            self._terminated = True
            self._path.append(state)
            return True
        following = self._after(state, token)
        if following is None:
            return False
        self._path.append(following)
        return True

    def _after(self, state: State, token: int) -> State | None:
        pieces = self._tools.token_bytes
        piece = pieces[token] if 0 <= token < len(pieces) else b""
        if not piece:
            return None
        try:
            for byte in piece:
                following = state.step(byte)
                if following is None:
                    return None
                state = following
        except Exception as error:
            self._give_up(error)
            return None
        return state

    def _give_up(self, error: Exception) -> None:
        """Nothing more is legal but the end, which is then refused: vLLM fails this request."""
        if isinstance(error, TooComplexError):
            logger.warning("a structured request fails: %s", error)
        else:
            self._backend.note_error("a grammar, whose request fails")
        self._failed = True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """The longest prefix of `tokens` that would be accepted; the grammar stays where it is."""
        path, terminated = len(self._path), self._terminated
        count = 0
        for token in tokens:
            if token < 0 or self._terminated or not self._accept(token):
                break
            count += 1
        del self._path[path:]
        self._terminated = terminated
        return list(tokens[:count])

    def rollback(self, num_tokens: int) -> None:
        if num_tokens > 0:
            del self._path[-num_tokens:]
            self._terminated = False

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        row = self._backend.row(bitmask, batch_index)
        state = self._path[-1]
        try:
            if self._failed:
                row.fill(0)
            else:
                self._tools.masks.of(state).fill(row)
        except Exception as error:
            self._give_up(error)
            row.fill(0)
        may_end = state.accepting or self._failed
        for word, bit in self._stop_bits:
            if may_end:
                row[word] |= bit
            else:
                row[word] &= ~bit

    def is_terminated(self) -> bool:
        return self._terminated

    def reset(self) -> None:
        del self._path[1:]
        self._terminated = False

    # -- for the jump -----------------------------------------------------------------------------

    def forced(self) -> tuple[bytes, int, int | None]:
        """What must come next.

        Returns: the bytes; the bytes that may follow them, as bits; and the one token that then
            ends the text, if nothing else may come.
        """
        try:
            run, end = self._path[-1].forced()
        except Exception as error:  # a jump that fails counts against jump-forward, this need not
            self._give_up(error)
            return b"", 0, None
        only_end = end.accepting and not end.first and len(self.stops) == 1
        return run, end.first, next(iter(self.stops)) if only_end else None


class GrammarExecutor(Executor):
    """Where vLLM compiles grammars: in its threads what is new, at once what is known.

    A thread would have to wait for the interpreter, which the engine's loop gives up every 5 ms.
    """

    def __init__(self, threads: Executor, backend: SglBackend) -> None:
        self._threads = threads
        self._backend = backend

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        structured = getattr(args[0], "structured_output_request", None) if args else None
        if structured is None or not self._backend.knows(*structured.structured_output_key):
            return self._threads.submit(fn, *args, **kwargs)
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._threads.shutdown(wait, cancel_futures=cancel_futures)


def _one_of(choices: Sequence[str]) -> Expression | None:
    texts = dict.fromkeys(choice.encode() for choice in choices)
    if not texts or b"" in texts:
        return None
    return Literals(tuple((text, None) for text in texts))


_STRING = r'"((?:[^"\\\n]|\\.)*)"'
_CHOICE_GRAMMAR = re.compile(rf"root ::= ({_STRING}(?: \| {_STRING})*)")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"'}


def choices_of_grammar(grammar: str) -> list[str] | None:
    """The choices behind a grammar, as stock's frontend writes them; None for other grammars."""
    match = _CHOICE_GRAMMAR.fullmatch(grammar)
    if match is None:
        return None
    return [
        re.sub(
            r"\\(?:u([0-9a-f]{4})|(.))",
            lambda m: chr(int(m[1], 16)) if m[1] else _ESCAPES.get(m[2], m[0]),
            text,
        )
        for text in re.findall(_STRING, match[1])
    ]


def _xgrammar_lacks(spec: str) -> bool:
    """Whether stock's frontend would keep this schema from xgrammar."""
    try:
        return has_xgrammar_unsupported_json_features(json.loads(spec))
    except (ValueError, RecursionError):
        return False
