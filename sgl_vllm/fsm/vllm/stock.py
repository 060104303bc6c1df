"""vLLM's own backends, for the formats that the automata leave to them.

Owns which of the two is asked first, and that each compiles within limits: every format is compiled
in a process of its own before it is compiled here.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from functools import partial

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.tokenizers import TokenizerLike
from vllm.v1.structured_output.backend_guidance import (
    GuidanceBackend,
    GuidanceGrammar,
    serialize_guidance_grammar,
)
from vllm.v1.structured_output.backend_types import (
    StructuredOutputGrammar,
    StructuredOutputOptions,
)
from vllm.v1.structured_output.backend_xgrammar import (
    XgrammarBackend,
    has_xgrammar_unsupported_json_features,
)

from sgl_vllm.fsm.parsed_grammar import ParsedGrammar
from sgl_vllm.fsm.vllm.formats import FORMATS, Dialect, XgrammarCall
from sgl_vllm.fsm.vllm.limits import NotCompiledError, within_limits
from sgl_vllm.fsm.vllm.resources import TokenizerResources, tokenizer_info
from sgl_vllm.fsm.vllm.sandbox import GuidanceSandbox, XgrammarSandbox
from sgl_vllm.protocol.quoting import quoted

logger = init_logger("vllm.sgl_vllm.fsm")

_PARSED_BY = {
    "compile_json_schema": StructuredOutputOptions.JSON,
    "compile_grammar": StructuredOutputOptions.GRAMMAR,
    "compile_lark": StructuredOutputOptions.GRAMMAR,
    "compile_structural_tag": StructuredOutputOptions.STRUCTURAL_TAG,
}
"""The kind of format that a method of xgrammar's compiler is for."""

Compile = Callable[[StructuredOutputOptions, str, set[int] | None], StructuredOutputGrammar]


class StockBackends:
    """xgrammar and guidance.

    xgrammar ignores what it does not know of a schema. Where a schema means what xgrammar makes of
    it, that is stock vLLM's answer; where it means what the specification says, schemas go to
    guidance, which refuses instead.
    """

    def __init__(
        self,
        config: VllmConfig,
        tokenizer: TokenizerLike,
        vocab_size: int,
        xgrammar: XgrammarBackend,
        resources: TokenizerResources,
        dialect: Dialect,
    ) -> None:
        self._make_guidance = partial(
            GuidanceBackend, config, tokenizer=tokenizer, vocab_size=vocab_size
        )
        self._closes_objects = config.structured_outputs_config.disable_additional_properties
        self._xgrammar = xgrammar
        self._dialect = dialect
        self._xgrammar_sandbox = XgrammarSandbox(partial(tokenizer_info, xgrammar))
        self._guidance_sandbox = GuidanceSandbox(resources.token_bytes, resources.end_token)
        self._guidance: GuidanceBackend | None = None
        self._lock = threading.Lock()
        self.num_xgrammar = 0
        self.num_guidance = 0

    def compile(
        self,
        request_type: StructuredOutputOptions,
        spec: str,
        stop_token_ids: set[int] | None,
    ) -> StructuredOutputGrammar:
        """A grammar of the first backend that compiles the format.

        Raises:
            NotCompiledError: it takes too much time or memory, or others do.
            ValueError: no backend compiles it, or it is too long for them.
        """
        form = FORMATS[request_type]
        if len(spec) > form.max_stock_chars:
            raise ValueError(
                f"a {form.title} of {len(spec):,} characters; "
                f"at most {form.max_stock_chars:,} are allowed"
            )
        failure: Exception | None = None
        for attempt in self._order(request_type, spec):
            try:
                return attempt(request_type, spec, stop_token_ids)
            except NotCompiledError:
                raise
            except Exception as error:  # xgrammar's compiler raises RuntimeError
                logger.debug("a backend does not compile it: %s", quoted(str(error)))
                failure = error
        raise ValueError(f"the {form.title} cannot be compiled: {failure}") from failure

    def parsed(self, call: XgrammarCall) -> ParsedGrammar | None:
        """The grammar that xgrammar makes of a call's argument; None if it makes none.

        Raises NotCompiledError: that takes too much time or memory, or others do.
        """
        return self._xgrammar_sandbox.parsed(call, FORMATS[_PARSED_BY[call[0]]].title)

    def stop(self) -> None:
        self._xgrammar_sandbox.stop()
        self._guidance_sandbox.stop()

    def _order(self, request_type: StructuredOutputOptions, spec: str) -> list[Compile]:
        is_json = request_type == StructuredOutputOptions.JSON
        is_for_guidance = is_json and (self._dialect.by_spec or _xgrammar_lacks(spec))
        if is_for_guidance or self._dialect.prefers_guidance:
            return [self._by_guidance]
        return [self._by_xgrammar, self._by_guidance]

    def _by_xgrammar(
        self, request_type: StructuredOutputOptions, spec: str, stop_token_ids: set[int] | None
    ) -> StructuredOutputGrammar:
        form = FORMATS[request_type]
        calls = form.xgrammar_calls(spec, self._dialect)
        self._xgrammar_sandbox.check(json.dumps(calls).encode(), form.title)
        grammar = within_limits(
            lambda: self._xgrammar.compile_grammar(request_type, spec, stop_token_ids),
            form.title,
        )
        self.num_xgrammar += 1
        return grammar

    def _by_guidance(
        self, request_type: StructuredOutputOptions, spec: str, stop_token_ids: set[int] | None
    ) -> StructuredOutputGrammar:
        with self._lock:
            if self._guidance is None:
                self._guidance = self._make_guidance()
        guidance = self._guidance
        title = FORMATS[request_type].title
        self._guidance_sandbox.check(
            serialize_guidance_grammar(
                request_type,
                spec,
                not self._dialect.any_whitespace,
                self._closes_objects,
            ).encode(),
            title,
        )
        grammar = within_limits(
            lambda: guidance.compile_grammar(request_type, spec, stop_token_ids), title
        )
        assert isinstance(grammar, GuidanceGrammar)
        if error := grammar.ll_matcher.get_error():
            raise ValueError(error)
        self.num_guidance += 1
        return grammar


def _xgrammar_lacks(spec: str) -> bool:
    """Whether vLLM's API server would keep this schema from xgrammar."""
    try:
        return has_xgrammar_unsupported_json_features(json.loads(spec))
    except (ValueError, RecursionError):
        return False
