"""What programs import of `sglang.srt.constrained.outlines_backend`: patterns of JSON schemas."""

from __future__ import annotations

from sgl_vllm.lang.constraints import JsonSchema, schema_constraint


def build_regex_from_object(schema: JsonSchema, whitespace_pattern: str | None = None) -> str:
    """A pattern for the documents of a JSON schema, given as for `gen(json_schema=)`, which needs
    no pattern. Needs the package outlines-core."""
    from outlines_core.json_schema import build_regex_from_schema

    constraint, _ = schema_constraint(schema)
    return str(build_regex_from_schema(constraint.text, whitespace_pattern))
