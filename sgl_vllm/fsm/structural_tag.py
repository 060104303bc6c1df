"""Structural tags whose schemas are read by the specification, as tags that xgrammar parses.

    {"type": "json_schema", ...}    is    {"type": "grammar", "grammar": a mark}

Owns these marks, for which `grammar_compiler.py` puts the texts of the schemas; and vLLM's older
form of a tag. Everything else about a tag is what xgrammar makes of it. Pure.
"""

from __future__ import annotations

from typing import Any, TypeAlias  # Any: the JSON of a tag

from sgl_vllm.fsm.errors import UnsupportedGrammarError

Json: TypeAlias = Any


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
