"""JSON schemas compiled to expressions over bytes.

Owns which schemas are compiled here, and what they mean. Any other raises `UnsupportedSchemaError`
and goes to another backend: handing a schema on is better than guessing. Pure.

    keywords      which keywords exist, and what their values look like
    values        JSON values: equality, types, spelling
    workspace     what one compilation may cost, and the schemas that it derives
    references    $ref, $id, anchors, drafts
    complements   what is invalid against a schema
    unevaluated   unevaluatedProperties, unevaluatedItems
    expansions    keywords said by others: not, if, dependentSchemas, ...
    conjunctions  one schema for what is valid against two
    siblings      keywords whose meaning depends on those beside them
    alternatives  anyOf, oneOf
    finiteness    schemas whose values would have to contain themselves
    compiler      a schema to an expression: dispatch by keyword and type
    context       what the compilers of types share
    objects, rules, members, arrays, contains, unique_items, strings, formats, numeric, enumerations
"""

from sgl_vllm.fsm.errors import UnsupportedSchemaError
from sgl_vllm.fsm.schema.compiler import compile_schema, compiled_schema
from sgl_vllm.fsm.schema.formats import compile_formats
from sgl_vllm.fsm.schema.keywords import Schema

__all__ = [
    "Schema",
    "UnsupportedSchemaError",
    "compile_formats",
    "compile_schema",
    "compiled_schema",
]
