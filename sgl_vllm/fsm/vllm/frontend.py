"""The check of formats in the process that takes requests, before vLLM's own.

Owns what is refused there. vLLM validates a format by compiling it, in the API server's event loop,
so a count that costs gigabytes has to be refused earlier. Everything else about a format is left to
vLLM's check and to the engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any  # Any: the JSON of a request

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.structured_output import backend_xgrammar

from sgl_vllm.fsm.counts import CountLimitError, check_pattern, check_schema
from sgl_vllm.vllm_api.patching import wrap


def install_checks() -> None:
    """Check counts before vLLM validates a format, in this process. Idempotent."""
    wrap(SamplingParams, "_validate_structured_outputs")(_checked_first)
    # The structural tag of a chat request is validated while its body is parsed.
    wrap(backend_xgrammar, "validate_xgrammar_grammar")(_checked_first)


def _checked_first(
    original: Callable[..., None], sampling_params: SamplingParams, *args: Any, **kwargs: Any
) -> None:
    if sampling_params.structured_outputs is not None:
        check_format(sampling_params.structured_outputs)
    original(sampling_params, *args, **kwargs)


def check_format(structured: StructuredOutputsParams) -> None:
    """Refuse a format that counts too far.

    Raises:
        VLLMValidationError: the client gets status 400 and the message.
    """
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


def _parsed(document: str | dict[str, Any]) -> Any:
    """A JSON document; None for what is not JSON, which vLLM refuses."""
    if not isinstance(document, str):
        return document
    try:
        return json.loads(document)
    except (ValueError, RecursionError):
        return None
