"""Tools and a JSON `response_format` in one grammar: an answer is tool calls or a document.

Owns which requests get this grammar, and whether an answer is read as calls or as a document: its
first character decides. vLLM owns the notation of calls and their parsing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any  # Any: JSON, and what passes through
from weakref import WeakKeyDictionary

from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm.parser.abstract_parser import DelegatingParser
from vllm.sampling_params import StructuredOutputsParams
from vllm.tool_parsers.abstract_tool_parser import ToolParser, ToolStrictLevel
from vllm.v1.structured_output.backend_xgrammar import has_xgrammar_unsupported_json_features

from sgl_vllm.config import Options
from sgl_vllm.fsm.structural_tag import beginning, only_calls
from sgl_vllm.protocol.request_keys import TOOLS_AND_FORMAT
from sgl_vllm.vllm_api.patching import wrap

_JSON_STARTS = '{["-0123456789tfn'
_ALONE = f"or send vllm_xargs.{TOOLS_AND_FORMAT}=0 for a grammar without the tools"


class CallsOrDocument(StructuredOutputsParams):
    """The combined grammar. Its type marks requests whose answers are one or the other."""


_options = Options()
"""The options of this process's server."""

_are_documents: WeakKeyDictionary[DelegatingParser, bool | None] = WeakKeyDictionary()
"""Whether the stream that a parser reads is a document, once it has begun."""


def combine_tools_and_formats(options: Options) -> None:
    """From now on, serve requests that ask for it with one grammar. With `tools_and_format`, all
    requests ask for it unless they opt out. Idempotent."""
    global _options
    _options = options
    wrap(DelegatingParser, "_apply_structural_tag")(_apply_structural_tag)
    wrap(DelegatingParser, "_extract_tool_calls")(_extract_tool_calls)
    wrap(DelegatingParser, "extract_tool_calls_streaming")(_extract_tool_calls_streaming)


def _apply_structural_tag(
    original: Callable[[DelegatingParser, ChatCompletionRequest], Any],
    parser: DelegatingParser,
    request: ChatCompletionRequest,
) -> Any:
    """`request` may be one of the Responses API."""
    tools, xargs = parser.tool_parser, request.vllm_xargs or {}
    may_call = request.tools and request.tool_choice in ("auto", None)
    if tools is None or not may_call or not xargs.get(TOOLS_AND_FORMAT, _options.tools_and_format):
        return original(parser, request)
    wanted = request.extract_structured_outputs()
    if wanted is None or wanted.structural_tag is not None:
        if wanted is not None:  # a client's tag, or gpt-oss', to which vLLM itself adds the calls
            parser.tool_strict_level = ToolStrictLevel.PARAMETER
        return original(parser, request)
    try:
        elements = [_calls(tools, request), _document(wanted)]
        tag = {"type": "structural_tag", "format": {"type": "or", "elements": elements}}
        request.structured_outputs = CallsOrDocument(structural_tag=json.dumps(tag))
    except RecursionError:
        raise VLLMValidationError("a schema is nested too deeply: use fewer levels") from None
    is_chat = "response_format" in type(request).model_fields
    vars(request)["response_format" if is_chat else "text"] = None
    return request


def _calls(tools: ToolParser, request: ChatCompletionRequest) -> Any:
    """The format of one or more calls, or of one call, in a parser's notation."""
    required = request.model_copy(update={"tool_choice": "required"})
    tag = tools.get_structural_tag(required, strict_level=ToolStrictLevel.PARAMETER)
    if tag is not None:
        form = only_calls(tag.model_dump()["format"], request.parallel_tool_calls is False)
        if (start := beginning(form).lstrip()[:1]) and start not in _JSON_STARTS:
            return form
    raise VLLMValidationError(
        f"{type(tools).__name__} has no grammar for its calls, or they begin like JSON, so tools "
        f"and response_format cannot be combined: send one of them, {_ALONE}"
    )


def _document(wanted: StructuredOutputsParams) -> Any:
    schema: Any = {"type": "object"} if wanted.json_object else wanted.json
    is_read = isinstance(schema, dict | bool)
    if is_read and _options.schema_reading != "spec":
        is_read = not has_xgrammar_unsupported_json_features(schema)
    if not is_read:
        raise VLLMValidationError(
            "tools can be combined only with a response_format of type json_object or json_schema, "
            "and without schema_reading=spec only with keywords that xgrammar enforces (not with "
            f"uniqueItems or multipleOf): use one of these, {_ALONE}"
        )
    return {"type": "json_schema", "json_schema": schema}


def _is_document(request: ChatCompletionRequest, text: str | None) -> bool | None:
    """Whether an answer that begins with `text` is a document; None if that cannot be told yet."""
    if not isinstance(request.structured_outputs, CallsOrDocument):
        return False
    start = (text or "").lstrip()[:1]
    return start in _JSON_STARTS if start else None


def _extract_tool_calls(
    original: Callable[..., tuple[Any, str | None]],
    parser: DelegatingParser,
    content: str | None,
    request: ChatCompletionRequest,
    enable_auto_tools: bool = False,
) -> tuple[Any, str | None]:
    if _is_document(request, content):
        return None, content
    return original(parser, content, request, enable_auto_tools)


def _extract_tool_calls_streaming(
    original: Callable[..., DeltaMessage | None],
    parser: DelegatingParser,
    previous_text: str,
    current_text: str,
    delta_text: str,
    previous_token_ids: Sequence[int],
    current_token_ids: Sequence[int],
    delta_token_ids: Sequence[int],
    request: ChatCompletionRequest,
) -> DeltaMessage | None:
    is_document = _are_documents.get(parser)
    if is_document is None:
        is_document = _are_documents[parser] = _is_document(request, delta_text)
    if is_document:
        return DeltaMessage(content=delta_text) if delta_text else None
    texts = previous_text, current_text, delta_text
    token_ids = previous_token_ids, current_token_ids, delta_token_ids
    return original(parser, *texts, *token_ids, request)
