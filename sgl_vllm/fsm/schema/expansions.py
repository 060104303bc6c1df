"""Keywords said by others: `not`, `if`, `dependentSchemas`, `unevaluatedItems`, ...

    {"if": A, "then": B}                  anyOf   A and B, not A
    {"dependentRequired": {"a": ["b"]}}   anyOf   no "a", "b" and "a"

What remains is `allOf`, `anyOf`, `oneOf`, and the keywords that the compilers of single types read.
Owns these rewritings. Does not own complements, nor `unevaluatedItems` (`unevaluated.py`). Pure.
"""

from __future__ import annotations

from typing import Any  # Any: JSON of a user's schema

from sgl_vllm.fsm.errors import UnsupportedSchemaError
from sgl_vllm.fsm.schema.complements import Complements
from sgl_vllm.fsm.schema.keywords import CONSTRAINTS, Schema, Several
from sgl_vllm.fsm.schema.references import References
from sgl_vllm.fsm.schema.siblings import DEPENDENCIES, contained_in, dependencies_of
from sgl_vllm.fsm.schema.unevaluated import UNEVALUATED, Unevaluated
from sgl_vllm.fsm.schema.workspace import Workspace

_CONDITIONAL = frozenset({"if", "then", "else"})
_COUNTED = frozenset({"contains", "minContains", "maxContains"})
_REFERENCES = frozenset({"$ref", "$dynamicRef", "$recursiveRef"})
_EXPANDED = DEPENDENCIES | UNEVALUATED | _CONDITIONAL | _COUNTED | _REFERENCES | {"not"}


class Expansions:
    """Rewrites the schemas of one compilation. The same schema gives the same result."""

    def __init__(
        self, references: References, complements: Complements, workspace: Workspace
    ) -> None:
        self._references = references
        self._complement = complements.of
        self._workspace = workspace
        self._unevaluated = Unevaluated(references, complements, workspace)
        self._made: dict[int, Schema] = {}

    def of(self, schema: dict[str, Any]) -> Schema:
        """The same values as `schema`, without the keywords that this module rewrites."""
        if _EXPANDED.isdisjoint(schema):
            return schema
        known = self._made.get(id(schema))
        if known is None:
            if all(isinstance(schema[name], Several) for name in schema.keys() & _EXPANDED):
                return schema
            self._workspace.keep(schema)
            known = self._made[id(schema)] = self._workspace.keep(self._expanded(schema))
            if known is schema:
                raise UnsupportedSchemaError("a reference to itself")
        return known

    def _expanded(self, schema: dict[str, Any]) -> Schema:
        if "$ref" in schema and not self._references.siblings_count:
            return self._references.resolve(schema)
        # Many schemas of newer drafts still have `dependencies`: it is read in all of them.
        if unknown := schema.keys() & self._references.unknown - {"dependencies"}:
            return self.of({k: v for k, v in schema.items() if k not in unknown})
        if schema.keys() & UNEVALUATED:
            return self._unevaluated.without(schema)
        parts = self._references.targets(schema)
        num_targets = len(parts)
        rest = {k: v for k, v in schema.items() if k in CONSTRAINTS and k not in _EXPANDED}
        negated = schema.get("not")
        if isinstance(negated, Several):
            rest["not"] = negated
        elif negated is not None:
            parts.append(self._complement(negated))
        if "contains" in schema:
            counted = [c for c in contained_in(schema) if c.low or c.high is not None]
            rest |= {"contains": Several(tuple(counted))} if counted else {}
        if "if" in schema:
            parts.append(self._conditional(schema))
        for name in sorted(schema.keys() & DEPENDENCIES):
            parts += [_dependency(one, n) for one, n in dependencies_of(schema[name]).items()]
        if rest:
            parts.insert(num_targets, rest)
        return {"allOf": parts} if len(parts) != 1 else parts[0]

    def _conditional(self, schema: dict[str, Any]) -> Schema:
        condition, unmet = schema["if"], self._complement(schema["if"])
        return {
            "anyOf": [
                {"allOf": [condition, schema.get("then", True)]},
                {"allOf": [unmet, schema.get("else", True)]},
            ]
        }


def _dependency(name: str, needed: Schema) -> Schema:
    present = {"type": "object", "allOf": [needed, {"required": [name]}]}
    return {"anyOf": [{"properties": {name: False}}, present]}
