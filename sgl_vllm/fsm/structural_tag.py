"""Structural tags whose schemas are read by the specification, as tags that xgrammar parses.

    {"type": "json_schema", ...}    is    {"type": "grammar", "grammar": a mark}

Owns these marks, for which `grammar_compiler.py` puts the texts of the schemas; and vLLM's older
form of a tag. Everything else about a tag is what xgrammar makes of it. Pure.
"""

from __future__ import annotations

from typing import Any, TypeAlias  # Any: the JSON of a tag

from sgl_vllm.fsm.errors import UnsupportedGrammarError

Json: TypeAlias = Any

_NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
"""The schema of the arguments of a tool without parameters."""


def in_one_format(tag: Json) -> Json:
    """A tag with `format`, also if it has `structures` and `triggers`, which is vLLM's older form.

    Raises UnsupportedGrammarError: it is no tag.
    """
    try:
        if "structures" not in tag:
            return tag
        tags = [
            {
                "type": "tag",
                "begin": one["begin"],
                "content": {"type": "json_schema", "json_schema": one["schema"]},
                "end": one["end"],
            }
            for one in tag["structures"]
        ]
        form = {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}
        return {"type": "structural_tag", "format": form}
    except (LookupError, TypeError):
        raise UnsupportedGrammarError("not a structural tag") from None


def marked(tag: Json) -> tuple[Json, dict[bytes, Json]]:
    """The tag with a mark in place of each JSON schema, and a dictionary from marks to schemas.

    Raises RecursionError: it is nested too deeply.
    """
    schemas: dict[bytes, Json] = {}
    return _marked(tag, schemas), schemas


def _marked(part: Json, schemas: dict[bytes, Json]) -> Json:
    if isinstance(part, list):
        return [_marked(one, schemas) for one in part]
    if not isinstance(part, dict):
        return part
    if part.get("type") == "json_schema" and part.get("style", "json") == "json":
        number = len(schemas)
        schemas[b'"schema %d"' % number] = part.get("json_schema")
        return {"type": "grammar", "grammar": rf'root ::= "\"schema {number}\""'}
    return {name: _marked(value, schemas) for name, value in part.items()}


def only_calls(form: Json, is_single: bool) -> Json:
    """A format of required tool calls without text between them; only one call if `is_single`."""
    if isinstance(form, list):
        return [only_calls(one, is_single) for one in form]
    if not isinstance(form, dict):
        return form
    if form.get("type") == "json_schema":
        return {**form, "json_schema": _NOTHING} if form["json_schema"] is True else form
    form = {name: only_calls(value, is_single) for name, value in form.items()}
    if form.get("type") == "triggered_tags":
        # Notations with lines put each call on a line of its own.
        separator = "\n" if "\n" in form["tags"][0]["begin"] else ""
        kept = {name: form[name] for name in ("tags", "at_least_one", "stop_after_first")}
        form = {"type": "tags_with_separator", "separator": separator, **kept}
    if form.get("type") == "tags_with_separator" and is_single:
        form["stop_after_first"] = True
    return form


def beginning(form: Json) -> str:
    """The text that a format of tool calls begins with; empty if it may begin with anything."""
    while parts := form.get("elements" if form["type"] == "sequence" else "tags"):
        form = parts[0]
    text = form.get("begin") or form.get("value")
    return text if isinstance(text, str) else ""
