"""vLLM's structured-output backend: our automata where they can compile a format, else vLLM's own.

Owns vLLM's backend interface, the cache of automata, and the counters. Which texts are legal is
decided in `fsm/grammar_compiler.py`, `fsm/schema/` and `fsm/regex.py`, which tokens in
`fsm/masks.py`.

    format                   by automata                                  otherwise
    json, json_object        what xgrammar parses, if a schema means      xgrammar, guidance
                             what xgrammar makes of it; else what
                             `fsm/schema` supports
    structural_tag, grammar  what xgrammar parses                         xgrammar, guidance
    choice                   always (vLLM turns it into a grammar)
    regex                    what `fsm/regex.py` supports                 xgrammar, guidance
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Hashable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.tokenizers import TokenizerLike
from vllm.v1.structured_output.backend_types import (
    StructuredOutputBackend,
    StructuredOutputGrammar,
    StructuredOutputOptions,
)
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

from sgl_vllm.counters import counter, timer_count, timer_sum
from sgl_vllm.degrade import Guard
from sgl_vllm.fsm.automaton import Automaton
from sgl_vllm.fsm.cache import AutomatonCache, RefusedFormats
from sgl_vllm.fsm.errors import (
    RefusedFormatError,
    TooComplexError,
    UnsupportedGrammarError,
    UnsupportedPatternError,
    UnsupportedSchemaError,
)
from sgl_vllm.fsm.parsed_grammar import ParsedGrammar
from sgl_vllm.fsm.schema import compile_formats
from sgl_vllm.fsm.vllm.formats import (
    FORMATS,
    MAX_SPEC_CHARS,
    Dialect,
    XgrammarCall,
    too_long,
    without_whitespace,
)
from sgl_vllm.fsm.vllm.grammar import SglGrammar
from sgl_vllm.fsm.vllm.limits import NotCompiledError, one_of_few, within_limits
from sgl_vllm.fsm.vllm.resources import TokenizerResources, compiler_of, make_xgrammar
from sgl_vllm.fsm.vllm.stock import StockBackends
from sgl_vllm.protocol.quoting import quoted

logger = init_logger("vllm.sgl_vllm.fsm")

UNSUPPORTED = (
    TooComplexError,
    UnsupportedGrammarError,
    UnsupportedPatternError,
    UnsupportedSchemaError,
)
"""What a format raises that is left to vLLM's backends."""

Key: TypeAlias = tuple[StructuredOutputOptions, str]
"""A format: its kind and its specification (`with_whitespace`)."""


@dataclass
class BackendCounters:
    """Grammars and compilations since start."""

    ours: int = counter("Formats compiled by the plugin.", unit="formats", metric="grammars")
    ours_cached: int = counter(
        "Structured requests whose format the plugin had already compiled.",
        unit="requests",
        metric="grammars_cached",
    )
    xgrammar: int = counter(
        "Structured requests passed to xgrammar.", unit="requests", metric="grammars_xgrammar"
    )
    guidance: int = counter(
        "Structured requests passed to guidance.", unit="requests", metric="grammars_guidance"
    )
    refused: int = counter(
        "Structured requests refused: no backend takes the format, or it takes too long to "
        "compile.",
        unit="requests",
        metric="grammars_refused",
    )
    errors: int = counter(
        "Unexpected errors in a grammar. Each is in the log.",
        unit="errors",
        metric="grammar_errors",
    )
    compilations: int = timer_count(
        "Compiling a format that was not in the cache, whatever the outcome.",
        metric="compile_seconds",
    )
    compile_s: float = timer_sum("Total compile time.", metric="compile_seconds")


class SglBackend(StructuredOutputBackend):
    """vLLM's backend interface over `sgl_vllm.fsm`. Thread-safe.

    Construction is cheap: the vocabulary is prepared with the first grammar, outside the engine's
    thread.

    Args:
        vllm_config, tokenizer, vocab_size: as for vLLM's backends.
        by_spec: whether a schema means what the specification says, or what xgrammar makes of it.
            A server should read it as the backend that it would have without the plugin.
        use_automata: if not, vLLM's backends compile everything.
        stock: which of these is asked first, "xgrammar" or "guidance".
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        tokenizer: TokenizerLike,
        vocab_size: int,
        *,
        by_spec: bool = True,
        use_automata: bool = True,
        stock: str = "xgrammar",
    ) -> None:
        super().__init__(vllm_config, tokenizer=tokenizer, vocab_size=vocab_size)
        config = vllm_config.structured_outputs_config
        self._dialect = Dialect(
            by_spec=by_spec,
            any_whitespace=not config.disable_any_whitespace,
            close_objects=config.disable_additional_properties and by_spec,
            prefers_guidance=stock == "guidance",
            parsed=self._parsed,
        )
        self._use_automata = use_automata
        self._counters = BackendCounters()
        self._guard = Guard(
            "structured output by automata", "this format goes to vLLM's own backends", logger
        )
        self._cache = AutomatonCache()
        self._without_automaton = RefusedFormats()
        self._being_compiled: dict[Hashable, Future[None]] = {}
        self._lock = threading.RLock()
        self._xgrammar: XgrammarBackend | None = None
        self._resources: dict[int, TokenizerResources] = {}
        """By the id of xgrammar's compiler for the vocabulary. The compilers live as long."""
        self._stock: StockBackends | None = None

    # -- vLLM's interface -------------------------------------------------------------------------

    def compile_grammar(
        self,
        request_type: StructuredOutputOptions,
        grammar_spec: str,
        stop_token_ids: set[int] | None = None,
    ) -> StructuredOutputGrammar:
        """The grammar of one request.

        Raises:
            ValueError: no backend compiles the format, or no text satisfies it. The client gets
                status 400 and the message (`scheduler/refusals.py`).
            CompilersBusyError: others take too long.
        """
        if len(grammar_spec) > MAX_SPEC_CHARS:
            self._counters.refused += 1
            raise ValueError(too_long(FORMATS[request_type].title, len(grammar_spec)))
        # Made here, because that takes long and must not count for the limits.
        resources = self.resources_of(request_type)
        key = request_type, grammar_spec
        known = self._known(key, resources, stop_token_ids)
        if known is not None:
            return known
        try:
            return self._compile_once(key, resources, stop_token_ids)
        except Exception:
            self._counters.refused += 1
            raise

    def allocate_token_bitmask(self, max_num_seqs: int) -> torch.Tensor:
        num_words = self.resources.vocabulary.num_words
        return torch.full((max_num_seqs, num_words), -1, dtype=torch.int32)

    def destroy(self) -> None:
        self._cache.clear()
        if self._stock is not None:
            self._stock.stop()

    # -- for the scheduler ------------------------------------------------------------------------

    @property
    def counters(self) -> BackendCounters:
        """A snapshot."""
        stock = self._stock
        return replace(
            self._counters,
            xgrammar=stock.num_xgrammar if stock is not None else 0,
            guidance=stock.num_guidance if stock is not None else 0,
            errors=self.num_errors,
        )

    @property
    def num_errors(self) -> int:
        """Unexpected errors so far. Each is in the log."""
        return self._guard.num_errors

    def leave_to_stock(self) -> None:
        """From now on, vLLM's backends compile everything."""
        self._use_automata = False

    def forget(self) -> None:
        """Forget every automaton, and what was counted."""
        self._cache.clear()
        self._without_automaton.clear()
        self._counters = BackendCounters()
        if self._stock is not None:
            self._stock.num_xgrammar = self._stock.num_guidance = 0

    @property
    def resources(self) -> TokenizerResources:
        """What is built once per vocabulary, of all formats but structural tags."""
        return self.resources_of(StructuredOutputOptions.JSON)

    def resources_of(self, request_type: StructuredOutputOptions) -> TokenizerResources:
        """The same, of the vocabulary of a kind of format."""
        compiler = compiler_of(self.xgrammar, request_type)
        with self._lock:
            resources = self._resources.get(id(compiler))
            if resources is None:
                if self._use_automata and self._dialect.by_spec:
                    compile_formats()
                resources = TokenizerResources(compiler, self.tokenizer, self.vocab_size)
                self._resources[id(compiler)] = resources
        return resources

    @property
    def xgrammar(self) -> XgrammarBackend:
        """vLLM's default backend."""
        with self._lock:
            if self._xgrammar is None:
                self._xgrammar = make_xgrammar(self.vllm_config, self.tokenizer, self.vocab_size)
        return self._xgrammar

    def knows(self, request_type: StructuredOutputOptions, spec: str) -> bool:
        """Whether `compile_grammar` would find the format in the cache."""
        return self._use_automata and (request_type, spec) in self._cache

    # -- inside -----------------------------------------------------------------------------------

    def _known(
        self, key: Key, resources: TokenizerResources, stops: set[int] | None
    ) -> SglGrammar | None:
        """A grammar of a format that is in the cache; None for others."""
        automaton = self._cache.get(key) if self._use_automata else None
        if automaton is None:
            return None
        self._counters.ours_cached += 1
        return self._grammar(key, automaton, resources, stops)

    def _grammar(
        self, key: Key, automaton: Automaton, resources: TokenizerResources, stops: set[int] | None
    ) -> SglGrammar:
        stops = stops or {resources.end_token}
        return SglGrammar(resources, automaton, stops, partial(self._has_failed, key))

    def _has_failed(self, key: Key, error: Exception) -> None:
        """A running grammar has failed with `error`, which is being handled. Later requests with
        its format get grammars of vLLM's backends."""
        if not isinstance(error, TooComplexError):
            self._guard.record(f"a running {FORMATS[key[0]].title}, whose request fails")
        self._without_automaton.add(_digest(key))
        self._cache.remove(key)

    def _compile_once(
        self, key: Key, resources: TokenizerResources, stops: set[int] | None
    ) -> StructuredOutputGrammar:
        """As `_compile`. Requests whose format is being compiled wait for it, and get its error."""
        digest = _digest(key)
        with self._lock:
            others = self._being_compiled.get(key)
            is_first = others is None and key not in self._cache
            if is_first:
                mine = self._being_compiled[key] = Future()
        if not is_first:
            if others is not None:
                others.result()
            known = self._known(key, resources, stops)
            return known or self._compile(key, digest, resources, stops)
        is_known = digest in self._without_automaton
        started = time.monotonic()
        try:
            grammar = self._compile(key, digest, resources, stops)
        except BaseException as error:
            mine.set_exception(error)
            raise
        else:
            mine.set_result(None)
            return grammar
        finally:
            with self._lock:
                del self._being_compiled[key]
                if not is_known:
                    self._counters.compilations += 1
                    self._counters.compile_s += time.monotonic() - started

    def _compile(
        self, key: Key, digest: Hashable, resources: TokenizerResources, stops: set[int] | None
    ) -> StructuredOutputGrammar:
        title = FORMATS[key[0]].title
        if self._use_automata and digest not in self._without_automaton:
            automaton = None
            try:
                with one_of_few(title):
                    automaton = self._automaton(key)
            except (NotCompiledError, RefusedFormatError):
                raise
            except Exception:
                self._guard.record(f"the compilation of a {title}")
            if automaton is not None:
                return self._grammar(key, automaton, resources, stops)
            self._without_automaton.add(digest)
        grammar = self._stock_backends().compile(key[0], without_whitespace(key[1])[1], stops)
        bitmask = self.allocate_token_bitmask(1).zero_()
        within_limits(lambda: grammar.fill_bitmask(bitmask, 0), title)
        if not bitmask.any():  # vLLM would sample token 0, and fail the request for it
            raise ValueError(f"no text satisfies the {title}")
        return grammar

    def _parsed(self, call: XgrammarCall) -> ParsedGrammar | None:
        return self._stock_backends().parsed(call)

    def _stock_backends(self) -> StockBackends:
        with self._lock:
            if self._stock is None:
                self._stock = StockBackends(
                    self.vllm_config,
                    self.tokenizer,
                    self.vocab_size,
                    self.xgrammar,
                    self.resources,
                    self._dialect,
                )
        return self._stock

    def _automaton(self, key: Key) -> Automaton | None:
        """The automaton of a format; None if vLLM's backends compile it."""
        whitespace, spec = without_whitespace(key[1])
        try:
            compiled = FORMATS[key[0]].compiled(spec, self._dialect.of(whitespace))
            if compiled is None:
                return None
            table_bytes = compiled.table_bytes
            automaton = Automaton(compiled.expression, counts_tables=table_bytes is None)
        except UNSUPPORTED as error:
            logger.debug("left to vLLM's backends: %s", quoted(str(error)))
            return None
        if not (automaton.start.first or automaton.start.accepting):
            return None
        self._cache.insert(key, automaton, len(spec), table_bytes or 0)
        with self._lock:
            self._counters.ours += 1
        return automaton


def _digest(key: Key) -> Hashable:
    """What a format is remembered by that may be large and has no automaton."""
    data = key[1].encode(errors="surrogatepass")
    return key[0], hashlib.blake2b(data, digest_size=16).digest()
