"""The kinds of constraints that a request can have, each declared once.

Owns, for each kind: its name in messages, how it becomes an automaton of ours, what xgrammar's
compiler is called with, and how long it may be. A new kind is one entry of `FORMATS`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any  # Any: the JSON of a request

from vllm.v1.structured_output.backend_guidance import (
    has_guidance_unsupported_json_features,
    process_for_additional_properties,
)
from vllm.v1.structured_output.backend_types import StructuredOutputOptions
from vllm.v1.structured_output.backend_xgrammar import has_xgrammar_unsupported_json_features
from vllm.v1.structured_output.utils import grammar_is_likely_lark

from sgl_vllm.fsm import regex
from sgl_vllm.fsm.byte_dfa import CompiledFormat
from sgl_vllm.fsm.errors import UnsupportedSchemaError
from sgl_vllm.fsm.expressions import Literals
from sgl_vllm.fsm.grammar_compiler import compile_parsed
from sgl_vllm.fsm.json_whitespace import PLACES, styled, with_places
from sgl_vllm.fsm.parsed_grammar import ParsedGrammar
from sgl_vllm.fsm.schema import compiled_schema
from sgl_vllm.fsm.structural_tag import in_one_format, marked
from sgl_vllm.protocol.request_keys import ANY, COMPACT
from sgl_vllm.vllm_api.vllm_source import installed_source

MAX_SPEC_CHARS = 4 << 20
"""A longer schema, pattern or grammar is refused."""

MAX_STOCK_GRAMMAR_CHARS = 32 << 10
"""The limit of grammars, which vLLM's backends compile. A chain of rules of 36 kB costs xgrammar
0.8 GB; one of 1 MB costs more than 21 GB, in a compilation that cannot be interrupted."""


XgrammarCall = tuple[str, str, dict[str, Any]]  # Any: keyword arguments, as JSON
"""A method of xgrammar's compiler, its argument, and its keyword arguments."""


@dataclass(frozen=True)
class Dialect:
    """What the server's options say about JSON.

    Attributes:
        by_spec: whether a schema means what the specification says, or what xgrammar makes of it.
        any_whitespace: whether whitespace may stand between tokens, as vLLM's option says.
        whitespace: one of `WHITESPACES`, which overrides that option; empty to follow it.
        close_objects: `disable_additional_properties`, which guidance applies to schemas.
        prefers_guidance: whether guidance compiles what the automata leave, before xgrammar.
        parsed: the grammar that xgrammar makes of a format, given the call that compiles it; None
            if it makes none.
    """

    by_spec: bool
    any_whitespace: bool
    close_objects: bool
    prefers_guidance: bool
    parsed: Callable[[XgrammarCall], ParsedGrammar | None]
    whitespace: str = ""

    def of(self, whitespace: str) -> Dialect:
        """The dialect of a request with this whitespace; the same one if it is empty."""
        return replace(self, any_whitespace=True, whitespace=whitespace) if whitespace else self


_source = installed_source()
COMPACT_HAS_NO_SPACES = _source is None or _source.release >= (0, 32)
"""Without any whitespace, vLLM 0.31 has xgrammar write a space after each separator. There, such
JSON is left to vLLM's backends."""


@dataclass(frozen=True)
class Format:
    """One kind of constraint.

    Attributes:
        title: its name in messages.
        compiled: compiles a specification of this kind; None if it is left to vLLM's backends. May
            raise any error of `sgl_vllm.fsm.errors`.
        xgrammar_calls: what vLLM's xgrammar backend calls to compile it.
        max_stock_chars: the longest specification that vLLM's backends are given.
    """

    title: str
    compiled: Callable[[str, Dialect], CompiledFormat | None]
    xgrammar_calls: Callable[[str, Dialect], list[XgrammarCall]]
    max_stock_chars: int = MAX_SPEC_CHARS


def with_whitespace(spec: str, whitespace: str) -> str:
    """A specification with the whitespace of its request. No client sends one that begins so."""
    return f"\0{whitespace}\0{spec}" if whitespace else spec


def without_whitespace(spec: str) -> tuple[str, str]:
    """The whitespace and the specification; the whitespace is empty if the request has none."""
    if not spec.startswith("\0"):
        return "", spec
    whitespace, _, rest = spec[1:].partition("\0")
    return whitespace, rest


def too_long(title: str, num_chars: int) -> str:
    """The message for a format beyond `MAX_SPEC_CHARS`."""
    return f"a {title} of {num_chars:,} characters; at most {MAX_SPEC_CHARS:,} are allowed"


def _compiled_json(spec: str, dialect: Dialect) -> CompiledFormat | None:
    schema = _parsed(spec)
    if dialect.close_objects:
        schema = process_for_additional_properties(schema)
    if dialect.by_spec:
        return _compiled_schema(schema, dialect)
    if has_xgrammar_unsupported_json_features(schema):
        # vLLM hands it to guidance, or, if that has not these features either, to outlines, which
        # reads it by the specification.
        is_for_outlines = has_guidance_unsupported_json_features(schema)
        return _compiled_schema(schema, dialect) if is_for_outlines else None
    return _as_xgrammar_reads_it(_json_calls(spec, dialect)[0], dialect, dialect.whitespace or ANY)


def _compiled_schema(schema: Any, dialect: Dialect) -> CompiledFormat:
    if not isinstance(schema, dict | bool):
        raise UnsupportedSchemaError("a schema must be an object, true or false")
    if not (dialect.any_whitespace or COMPACT_HAS_NO_SPACES):
        raise UnsupportedSchemaError("compact JSON has spaces after separators")
    by_option = ANY if dialect.any_whitespace else COMPACT
    return compiled_schema(schema, dialect.whitespace or by_option)


def _as_xgrammar_reads_it(
    call: XgrammarCall, dialect: Dialect, whitespace: str = ANY
) -> CompiledFormat | None:
    grammar = dialect.parsed(call)
    if grammar is None:
        return None
    if whitespace == ANY:
        return CompiledFormat(compile_parsed(grammar))
    return CompiledFormat(styled(compile_parsed(with_places(grammar), PLACES), whitespace))


def _parsed(spec: str) -> Any:
    try:
        return json.loads(spec)
    except (RecursionError, ValueError):  # no JSON comes only from frontends that do not look
        raise UnsupportedSchemaError("the format is nested too deeply, or not JSON") from None


def _json_calls(spec: str, dialect: Dialect) -> list[XgrammarCall]:
    has_separators = not dialect.any_whitespace and COMPACT_HAS_NO_SPACES
    options = {
        "any_whitespace": dialect.any_whitespace,
        "separators": (",", ":") if has_separators else None,
    }
    return [("compile_json_schema", spec, options)]


def _compiled_regex(spec: str, dialect: Dialect) -> CompiledFormat | None:
    dfa = regex.full_match(spec)
    return None if dfa.is_empty else CompiledFormat(dfa.expression, dfa.table_bytes)


def _compiled_choice(spec: str, dialect: Dialect) -> CompiledFormat | None:
    return _one_of(json.loads(spec))


def _compiled_grammar(spec: str, dialect: Dialect) -> CompiledFormat | None:
    choices = choices_of_grammar(spec)
    if choices is not None:
        return _one_of(choices)
    if dialect.prefers_guidance:  # what guidance makes of a grammar is its own
        return None
    return _as_xgrammar_reads_it(_grammar_calls(spec, dialect)[0], dialect)


def _grammar_calls(spec: str, dialect: Dialect) -> list[XgrammarCall]:
    return [("compile_lark" if grammar_is_likely_lark(spec) else "compile_grammar", spec, {})]


def _compiled_structural_tag(spec: str, dialect: Dialect) -> CompiledFormat | None:
    # vLLM has xgrammar compile a tag as a whole, without the option that forbids whitespace.
    dialect = replace(dialect, any_whitespace=True, close_objects=False)
    tag = in_one_format(_parsed(spec))
    schemas: dict[bytes, Any] = {}
    try:
        if dialect.by_spec or dialect.whitespace not in ("", ANY):
            tag, schemas = marked(tag)
        text = json.dumps(tag)
    except RecursionError:
        raise UnsupportedSchemaError("the format is nested too deeply") from None
    grammar = dialect.parsed(("compile_structural_tag", text, {}))
    if grammar is None:
        return None
    compiled = {mark: _compiled_json(json.dumps(one), dialect) for mark, one in schemas.items()}
    marks = {mark: one.expression for mark, one in compiled.items() if one is not None}
    if len(marks) < len(schemas):
        return None
    return CompiledFormat(compile_parsed(grammar, marks))


def _structural_tag_calls(spec: str, dialect: Dialect) -> list[XgrammarCall]:
    tag = json.loads(spec)
    if "structures" not in tag:
        return [("compile_structural_tag", spec, {})]
    return [("compile_json_schema", json.dumps(one["schema"]), {}) for one in tag["structures"]]


_ANY_OBJECT = '{"type": "object"}'

FORMATS: dict[StructuredOutputOptions, Format] = {
    StructuredOutputOptions.JSON: Format("JSON schema", _compiled_json, _json_calls),
    StructuredOutputOptions.JSON_OBJECT: Format(
        "JSON object",
        lambda spec, dialect: _compiled_json(_ANY_OBJECT, dialect),
        lambda spec, dialect: _json_calls(_ANY_OBJECT, dialect),
    ),
    StructuredOutputOptions.REGEX: Format(
        "regex",
        _compiled_regex,
        lambda spec, dialect: [("compile_regex", spec, {})],
    ),
    StructuredOutputOptions.CHOICE: Format("choice", _compiled_choice, _grammar_calls),
    StructuredOutputOptions.GRAMMAR: Format(
        "grammar", _compiled_grammar, _grammar_calls, MAX_STOCK_GRAMMAR_CHARS
    ),
    StructuredOutputOptions.STRUCTURAL_TAG: Format(
        "structural tag", _compiled_structural_tag, _structural_tag_calls
    ),
}


def _one_of(choices: Sequence[str]) -> CompiledFormat | None:
    try:
        texts = dict.fromkeys(choice.encode() for choice in choices)
    except UnicodeEncodeError:  # half of a surrogate pair
        return None
    if not texts or b"" in texts:
        return None
    return CompiledFormat(Literals(tuple((text, None) for text in texts)))


_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"'}
_CONTROL = "00[01][0-9a-f]|007f"
_MARK = r'[nrt\\"]'
_ESCAPE = re.compile(rf"\\(?:u({_CONTROL})|({_MARK}))")
_STRING = rf'"((?:[^"\\\x00-\x1f\x7f]|\\u(?:{_CONTROL})|\\{_MARK})*)"'
_CHOICE_GRAMMAR = re.compile(rf"root ::= ({_STRING}(?: \| {_STRING})*)")


def choices_of_grammar(grammar: str) -> list[str] | None:
    """The choices in a grammar that vLLM's API server makes of them; None for other grammars. vLLM
    writes these escapes only: a grammar with others is a client's own."""
    match = _CHOICE_GRAMMAR.fullmatch(grammar)
    if match is None:
        return None
    return [
        _ESCAPE.sub(lambda m: chr(int(m[1], 16)) if m[1] else _ESCAPES[m[2]], text)
        for text in re.findall(_STRING, match[1])
    ]
