"""When masks by automata are off, and how the backend gets into an engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING

from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

from sgl_vllm import jit
from sgl_vllm.fsm.vllm.backend import SglBackend
from sgl_vllm.fsm.vllm.executor import GrammarExecutor
from sgl_vllm.fsm.vllm.resources import bytes_of_tokens
from sgl_vllm.fsm.warm_up import compile_loops
from sgl_vllm.part import EngineView, Part
from sgl_vllm.protocol.quoting import quoted

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.structured_output import StructuredOutputManager


def _unsupported(engine: EngineView) -> str | None:
    stock = engine.vllm_config.structured_outputs_config.backend
    if stock == "guidance" and engine.options.schema_reading == "stock":
        return "the structured-output backend is guidance, which needs schema_reading=spec"
    return why_no_backend(engine.vllm_config)


PART = Part("fsm", _unsupported)


def why_no_backend(vllm_config: VllmConfig) -> str | None:
    """Why `SglBackend` cannot be the structured-output backend; None if it can."""
    if not jit.HAS_NUMBA:
        return "numba cannot be imported (pip install numba)"
    backend = vllm_config.structured_outputs_config.backend
    if backend not in ("auto", "xgrammar", "guidance"):
        return f"the structured-output backend is {backend!r}"
    if vllm_config.model_config.skip_tokenizer_init:
        return "the server has no tokenizer (--skip-tokenizer-init)"
    return None


def install_backend(engine: EngineView, manager: StructuredOutputManager) -> SglBackend:
    """Put our backend where vLLM would create its own at the first structured request.

    Cost: half a second; 15 at the first start after an installation (`compile_loops`).
    """
    compile_loops()
    stock = engine.vllm_config.structured_outputs_config.backend
    by_spec = engine.options.schema_reading == "spec" or stock == "guidance"
    manager.backend = backend = SglBackend(
        engine.vllm_config,
        tokenizer=manager.tokenizer,
        vocab_size=engine.vllm_config.model_config.get_vocab_size(),
        by_spec=by_spec,
        use_automata=PART.name not in engine.off,
        stock="guidance" if stock == "guidance" else "xgrammar",
    )
    whitespace = engine.options.json_whitespace
    manager.executor = GrammarExecutor(manager.executor, backend, whitespace)
    logging.getLogger(type(manager).__module__).addFilter(_in_one_line)
    return backend


def _in_one_line(record: logging.LogRecord) -> bool:
    """Makes vLLM log a refused format without a traceback: the request is at fault, not vLLM."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, ValueError):
        record.msg, record.args = f"{record.getMessage()}: {quoted(str(error))}", ()
        record.exc_info = None
    return True


def token_bytes_reader(
    engine: EngineView, manager: StructuredOutputManager, backend: SglBackend | None
) -> Callable[[], tuple[Sequence[bytes], int]]:
    """A function that returns the bytes of each token, and the token that ends a text.

    `backend` has read them. Without one (`jump_mode=exact`, and `fsm` off) the first call reads
    the tokenizer, which takes about a second for 131,000 tokens.
    """

    @cache
    def token_bytes() -> tuple[Sequence[bytes], int]:
        if backend is not None:
            return backend.resources.token_bytes, backend.resources.end_token
        vocab_size = engine.vllm_config.model_config.get_vocab_size()
        xgrammar = XgrammarBackend(
            engine.vllm_config, tokenizer=manager.tokenizer, vocab_size=vocab_size
        )
        return bytes_of_tokens(xgrammar.compiler)

    return token_bytes
