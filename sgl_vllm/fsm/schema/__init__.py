"""JSON schemas compiled to expressions over bytes.

Owns which schemas are compiled here, and what they mean. Any other raises `UnsupportedSchemaError`
and goes to another backend: handing a schema on is better than guessing. Pure.

    document --parse--> nodes --algebra--> sets of values --compiler--> expression

    keywords     which keywords exist, in which draft, and their own values
    references   places in a document: $ref, $id, anchors
    parse        a document to nodes
    nodes        the types of nodes
    value_sets   sets of JSON values by type: union, intersection, complement
    algebra      the set of each node: allOf, anyOf, oneOf, not, if, unevaluatedItems, ...
    compiler     sets to expressions
    context      what the compilers of types share
    objects, members, arrays, scalars, formats
    workspace    what one compilation may cost
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
