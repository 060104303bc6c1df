"""The check of formats in the process that takes requests.

Owns what happens before vLLM validates a format: what is refused, what is known to be valid, and
grammars of llama.cpp's that are written in xgrammar's dialect; and in which thread vLLM validates.
vLLM does so by compiling the format. A long format, which takes it seconds to look through, and a
count that costs gigabytes have to be refused earlier, and the compilation belongs in a thread: in
the API server's event loop, all other requests wait for it. Everything else about a format is left
to vLLM's validation and to the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import hashlib
import json
import re
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any  # Any: the JSON of a request; arguments that pass through
from weakref import WeakKeyDictionary

from vllm.config import ModelConfig, StructuredOutputsConfig
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.structured_output import backend_xgrammar
from vllm.v1.structured_output.utils import grammar_is_likely_lark

from sgl_vllm.fsm.counts import CountLimitError, check_pattern, check_schema
from sgl_vllm.fsm.gbnf import as_xgrammar_reads_it
from sgl_vllm.fsm.vllm.formats import MAX_SPEC_CHARS, MAX_STOCK_GRAMMAR_CHARS, too_long
from sgl_vllm.fsm.vllm.limits import release_freed_memory
from sgl_vllm.vllm_api.patching import wrap

MAX_THREADS = 2
"""Formats that a process validates at a time. Most of a validation runs outside the interpreter's
lock."""

MAX_VALID_FORMATS = 1_000
MAX_CHANGE_CHARS = 10_000
"""Formats that are known to be valid, and the longest change that validation has made to one, as to
a choice, which becomes a grammar. Together they take 40 MB at most, and some 0.3 MB as a rule."""

_LARK_START = re.compile(r"^[ \t]*[?!]*start\b", re.MULTILINE)
_EBNF_ROOT = re.compile(r"(?<![\w.-])root\s*(\[[^\]]*\]\s*)?::=")
_WHERE_IN_XGRAMMAR = re.compile(r"^\[[\d:]+\] \S+:\d+: ")
"""The time, and the line of xgrammar's source, with which its messages begin."""

_threads = ThreadPoolExecutor(MAX_THREADS, "sgl-vllm-validate")

_valid_formats: WeakKeyDictionary[InputProcessor, dict[bytes, dict[str, Any]]] = WeakKeyDictionary()
"""For each engine, the formats that were valid, keyed by a digest of what the client sent. A value
is what validation changed in the format: its backend, and the grammar of a choice. The oldest are
forgotten first."""

_validated: ContextVar[SamplingParams | None] = ContextVar("validated", default=None)
"""The parameters of the request that is being added, if their format has been validated."""


def install_checks() -> None:
    """Check counts before vLLM validates a format, in this process, and let it validate in threads.
    Idempotent."""
    wrap(AsyncLLM, "add_request")(_validated_in_thread)
    wrap(SamplingParams, "_validate_structured_outputs")(_validated_once)
    # The structural tag of a chat request is validated while its body is parsed.
    wrap(backend_xgrammar, "validate_xgrammar_grammar")(_checked_first)


async def _validated_in_thread(
    original: Callable[..., Awaitable[Any]],
    engine: AsyncLLM,
    request_id: str,
    prompt: Any,
    params: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """`AsyncLLM.add_request`. Costs 0.1 ms for a request with a format, nothing for others."""
    if not isinstance(params, SamplingParams) or params.structured_outputs is None:
        return await original(engine, request_id, prompt, params, *args, **kwargs)
    # The prompts of a batch share one format, and vLLM's validation changes it.
    params = copy.copy(params)
    params.structured_outputs = copy.copy(params.structured_outputs)
    await asyncio.get_running_loop().run_in_executor(
        _threads, _validate, params, engine.input_processor
    )
    outer = _validated.set(params)
    try:
        return await original(engine, request_id, prompt, params, *args, **kwargs)
    finally:
        _validated.reset(outer)


def _validate(params: SamplingParams, inputs: InputProcessor) -> None:
    """Validate the format of a request, unless an equal one was valid before. What vLLM has handed
    to another backend is validated each time: that may have been for lack of time."""
    structured = params.structured_outputs
    assert structured is not None
    digest, before = _digest(structured), {**vars(structured)}
    known = _valid_formats.setdefault(inputs, {})
    if digest is not None and (changes := known.get(digest)) is not None:
        vars(structured).update(changes)
        return
    started = time.monotonic()
    try:
        params._validate_structured_outputs(
            inputs.model_config, inputs.structured_outputs_config, inputs.tokenizer
        )
    finally:
        release_freed_memory(time.monotonic() - started)
    changes = {name: value for name, value in vars(structured).items() if value != before[name]}
    was_auto = vars(structured).get("_backend_was_auto")
    is_as_usual = structured._backend == "xgrammar" or not was_auto
    if digest is not None and is_as_usual and len(str(changes)) <= MAX_CHANGE_CHARS:
        known[digest] = changes
        with contextlib.suppress(KeyError, RuntimeError):  # another thread does the same
            while len(known) > MAX_VALID_FORMATS:
                del known[next(iter(known))]


def _digest(structured: StructuredOutputsParams) -> bytes | None:
    """A digest of a format as the client sent it; None if it cannot be written as JSON."""
    try:
        text = json.dumps(vars(structured), ensure_ascii=False)
        return hashlib.sha256(text.encode(errors="surrogatepass")).digest()
    except (TypeError, ValueError, RecursionError):
        return None


def _validated_once(
    original: Callable[..., None],
    params: SamplingParams,
    model_config: ModelConfig,
    structured_outputs_config: StructuredOutputsConfig | None,
    *args: Any,
    **kwargs: Any,
) -> None:
    if _validated.get() is params:
        return
    structured = params.structured_outputs
    grammar = structured.grammar if structured is not None else None
    if (
        structured is not None
        and grammar
        and len(grammar) <= MAX_STOCK_GRAMMAR_CHARS
        and structured_outputs_config is not None
        and not structured_outputs_config.backend.startswith("guidance")  # which reads both
        and not grammar_is_likely_lark(grammar)
    ):
        structured.grammar = as_xgrammar_reads_it(grammar)
    _checked_first(original, params, model_config, structured_outputs_config, *args, **kwargs)


def _checked_first(
    original: Callable[..., None], sampling_params: SamplingParams, *args: Any, **kwargs: Any
) -> None:
    if sampling_params.structured_outputs is not None:
        check_format(sampling_params.structured_outputs)
    try:
        original(sampling_params, *args, **kwargs)
    except VLLMValidationError as error:
        if error.__cause__ is None or str(error) != "Invalid grammar specification.":
            raise
        reason = _WHERE_IN_XGRAMMAR.sub("", str(error.__cause__))
        raise VLLMValidationError(f"Invalid grammar specification: {reason}") from None


def check_format(structured: StructuredOutputsParams) -> None:
    """Refuse a format that is too long or counts too far, and a grammar without a first rule.

    Raises:
        VLLMValidationError: the client gets status 400 and the message.
    """
    for title, spec in (
        ("JSON schema", structured.json),
        ("structural tag", structured.structural_tag),
        ("regex", structured.regex),
        ("grammar", structured.grammar),
        ("choice", structured.choice),
    ):
        num_chars = _num_chars(spec)
        if num_chars > MAX_SPEC_CHARS:
            raise VLLMValidationError(too_long(title, num_chars))
    try:
        for document in (structured.json, structured.structural_tag):
            if document:
                check_schema(_parsed(document))
        if structured.regex:
            check_pattern(structured.regex, "regex")
        if structured.grammar:
            check_pattern(structured.grammar, "grammar")
    except CountLimitError as error:
        raise VLLMValidationError(str(error)) from None
    if structured.grammar and len(structured.grammar) <= MAX_STOCK_GRAMMAR_CHARS:
        _check_first_rule(structured.grammar)


def _check_first_rule(grammar: str) -> None:
    if grammar_is_likely_lark(grammar):
        syntax, name, rule = "Lark's syntax (it has no `::=`)", "start", _LARK_START
    else:
        syntax, name, rule = "EBNF", "root", _EBNF_ROOT
    if not rule.search(grammar):
        raise VLLMValidationError(f"the grammar is read as {syntax}, and has no rule `{name}`")


def _num_chars(spec: str | dict[str, Any] | list[str] | None) -> int:
    """As JSON, if it is no text. vLLM refuses what is nested too deeply to be written."""
    if spec is None or isinstance(spec, str):
        return len(spec or "")
    try:
        return len(json.dumps(spec, ensure_ascii=False))
    except RecursionError:
        return 0


def _parsed(document: str | dict[str, Any]) -> Any:
    """A JSON document; None for what is not JSON, which vLLM refuses."""
    if not isinstance(document, str):
        return document
    try:
        return json.loads(document)
    except (ValueError, RecursionError):
        return None
