"""Tools and a JSON `response_format` in one grammar: an answer is calls of tools, or a document.

For `tool_choice: "auto"`, vLLM's grammar allows no calls unless a function is strict, and its
parsers look for calls in the strings of a document. Owns which requests get the combined grammar,
and which of the two an answer is read as: its first character tells. What calls look like, and how
they are parsed, is vLLM's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias  # Any: JSON, and arguments that pass through
from weakref import WeakKeyDictionary

from vllm.entrypoints.generate.base.protocol import DeltaMessage, ExtractedToolCallInformation
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.exceptions import VLLMValidationError
from vllm.parser.abstract_parser import DelegatingParser
from vllm.sampling_params import StructuredOutputsParams
from vllm.tool_parsers.abstract_tool_parser import ToolParser
from vllm.tool_parsers.tool_strict_level import ToolStrictLevel
from vllm.v1.structured_output.backend_xgrammar import has_xgrammar_unsupported_json_features

from sgl_vllm.config import Options
from sgl_vllm.fsm.structural_tag import beginnings, only_calls
from sgl_vllm.protocol.request_keys import TOOLS_AND_FORMAT
from sgl_vllm.vllm_api.patching import wrap

ToolRequest: TypeAlias = ChatCompletionRequest | ResponsesRequest

_JSON_STARTS = frozenset('{["-0123456789tfn')
_ALONE = f"or send vllm_xargs.{TOOLS_AND_FORMAT}=0 for a grammar without the tools"


class CallsOrDocument(StructuredOutputsParams):
    """The combined grammar. Its type marks the requests whose answers are read as one or the
    other."""


_options = Options()
"""Those of this process's server."""

_are_documents: WeakKeyDictionary[DelegatingParser, bool] = WeakKeyDictionary()
"""Whether the stream that a parser reads is a document, once it has begun."""


def combine_tools_and_formats(options: Options) -> None:
    """Serve requests that ask for it with one grammar, from now on. With `tools_and_format`, all
    ask for it that do not say otherwise. Idempotent."""
    global _options
    _options = options
    wrap(DelegatingParser, "_apply_structural_tag")(_apply_structural_tag)
    wrap(DelegatingParser, "extract_tool_calls")(_extract_tool_calls)
    wrap(DelegatingParser, "extract_tool_calls_streaming")(_extract_tool_calls_streaming)


def _apply_structural_tag(
    original: Callable[[DelegatingParser, ToolRequest], ToolRequest],
    parser: DelegatingParser,
    request: ToolRequest,
) -> ToolRequest:
    tools = parser.tool_parser
    asked = (request.vllm_xargs or {}).get(TOOLS_AND_FORMAT, _options.tools_and_format)
    if not asked or tools is None or not tools.tools or request.tool_choice not in ("auto", None):
        return original(parser, request)
    wanted = request.extract_structured_outputs()
    if wanted is None:
        return original(parser, request)
    if wanted.structural_tag is not None:  # the client's, or a parser's own, as for gpt-oss
        parser.tool_strict_level = ToolStrictLevel.PARAMETER
        return original(parser, request)
    try:
        elements = [_calls(tools, request), _document(wanted)]
        tag = {"type": "structural_tag", "format": {"type": "or", "elements": elements}}
        request.structured_outputs = CallsOrDocument(structural_tag=json.dumps(tag))
    except RecursionError:
        raise VLLMValidationError(
            "the schema of a tool or of response_format is nested too deeply: use fewer levels"
        ) from None
    if isinstance(request, ResponsesRequest):
        request.text = None
    else:
        request.response_format = None
    return request


def _calls(tools: ToolParser, request: ToolRequest) -> Any:
    """The format of one or more calls, or of one call, in a parser's notation."""
    try:
        tag = tools.get_structural_tag(
            request.model_copy(update={"tool_choice": "required"}),
            reasoning=False,
            strict_level=ToolStrictLevel.PARAMETER,
        )
    except VLLMValidationError:
        raise
    except ValueError:  # a notation without a tag
        tag = None
    if tag is not None:
        is_single = request.parallel_tool_calls is False
        form = only_calls(tag.model_dump()["format"], is_single=is_single)
        if all(_JSON_STARTS.isdisjoint(text.lstrip()[:1] or "{") for text in beginnings(form)):
            return form
    raise VLLMValidationError(
        f"{type(tools).__name__} has no grammar of its calls, or they begin like JSON, so tools "
        f"and response_format cannot be combined: send one of them, {_ALONE}"
    )


def _document(wanted: StructuredOutputsParams) -> Any:
    """The format of a document. A schema that is a text may be no JSON, which vLLM refuses."""
    schema = {"type": "object"} if wanted.json_object else wanted.json
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError:
            raise VLLMValidationError("structured_outputs.json is not JSON: correct it") from None
    if schema is None:
        raise VLLMValidationError(
            "tools can be combined only with a response_format of type json_schema or json_object: "
            f"use one of these, {_ALONE}"
        )
    if _options.schema_reading == "stock" and has_xgrammar_unsupported_json_features(schema):
        raise VLLMValidationError(
            "the schema of response_format has keywords that cannot be enforced beside tools, such "
            "as uniqueItems or multipleOf: remove them, start the server with schema_reading=spec, "
            f"{_ALONE}"
        )
    return {"type": "json_schema", "json_schema": schema}


def _is_document(request: ToolRequest, text: str) -> bool | None:
    """Whether an answer that begins with `text` is a document; None if that cannot be told yet."""
    if not isinstance(request.structured_outputs, CallsOrDocument):
        return False
    start = text.lstrip()[:1]
    return start in _JSON_STARTS if start else None


def _extract_tool_calls(
    original: Callable[[DelegatingParser, str, ToolRequest], ExtractedToolCallInformation],
    parser: DelegatingParser,
    model_output: str,
    request: ToolRequest,
) -> ExtractedToolCallInformation:
    if _is_document(request, model_output):
        return ExtractedToolCallInformation(tools_called=False, tool_calls=[], content=model_output)
    return original(parser, model_output, request)


def _extract_tool_calls_streaming(
    original: Callable[..., DeltaMessage | None],
    parser: DelegatingParser,
    previous_text: str,
    current_text: str,
    delta_text: str,
    previous_token_ids: Sequence[int],
    current_token_ids: Sequence[int],
    delta_token_ids: Sequence[int],
    request: ToolRequest,
) -> DeltaMessage | None:
    is_document = _are_documents.get(parser)
    if is_document is None:
        is_document = _is_document(request, delta_text)
        if is_document is not None:
            _are_documents[parser] = is_document
    if is_document:
        return DeltaMessage(content=delta_text) if delta_text else None
    texts = previous_text, current_text, delta_text
    token_ids = previous_token_ids, current_token_ids, delta_token_ids
    return original(parser, *texts, *token_ids, request)
