"""Formats that are meant to harm, each with the status that a server answers with."""

from __future__ import annotations

import json
from typing import Any

TRIPLED = [f"r{n} ::= r{n + 1} r{n + 1} r{n + 1}" for n in range(20)]
CHAIN = [f'r{n} ::= "x{n}" | r{(n + 1) % 28_000}' for n in range(28_000)]
DEEP = '{"properties":{"a":' * 10_000 + "{}" + "}}" * 10_000
WRONG = {"type": 5, "properties": [], "required": "a", "items": "x", "enum": {}, "$ref": 3}
TAG_OF_ITEMS = json.dumps(
    {
        "structures": [
            {"begin": "<a>", "schema": {"type": "array", "minItems": 60_000_000}, "end": "</a>"}
        ],
        "triggers": ["<a>"],
    }
)
LENGTHS = [{"type": "string", "minLength": 10**6, "maxLength": 10**6 + n} for n in range(60)]
REFERENCES = {
    f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{(n * step + 1) % 200}"} for step in (1, 2, 3)]}
    for n in range(200)
}
RULES = [f'r{n} ::= "a" r{(7 * n + 1) % 999} | r{(11 * n + 3) % 999}' for n in range(999)]
# Each part may end at almost any character, and the next one may begin there.
PART = {"type": "star", "content": {"type": "regex", "pattern": r"[^\n]+"}}
PARTS = {"type": "repeat", "min": 0, "max": 100, "content": PART}
WIDE = json.dumps(
    {"type": "structural_tag", "format": {"type": "sequence", "elements": [PARTS] * 8}}
)
FORMATS: dict[str, tuple[dict[str, Any], int]] = {
    "exponential states": ({"regex": "(a|b)*a(a|b){40}"}, 200),
    "a million of one letter": ({"regex": "a{1000000}"}, 200),
    "a million, nested": ({"regex": "((a{100}){100}){100}"}, 200),
    "100 kB of options": ({"regex": "(a?)" * 25_000}, 400),
    "100 kB of parentheses": ({"regex": "(" * 100_000}, 400),
    "60 million items": ({"json": {"type": "array", "minItems": 60_000_000}}, 400),
    "a billion items": ({"json": {"type": "array", "maxItems": 10**9}}, 400),
    "a billion, nested": ({"regex": "(a{1000}){1000000}"}, 400),
    "items of a tag": ({"structural_tag": TAG_OF_ITEMS}, 400),
    "look-ahead": ({"regex": "(?=a)b"}, 400),
    "not a regex": ({"regex": "[a-"}, 400),
    "half a character": ({"regex": "\ud800a"}, 400),
    "nothing matches": ({"regex": r"[^\s\S]"}, 400),
    "a schema that is only itself": ({"json": {"$ref": "#"}}, 400),
    "a reference to nothing": ({"json": {"$ref": "#/$defs/none"}}, 400),
    "a deep schema": ({"json": DEEP}, 400),
    "wrong types": ({"json": WRONG}, 400),
    "a contradiction": ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, 400),
    "100,000 values": ({"json": {"enum": [f"value {n}" for n in range(100_000)]}}, 200),
    "60 ranges of lengths": ({"json": {"anyOf": LENGTHS}}, 200),
    "references without end": ({"json": {"$ref": "#/$defs/d0", "$defs": REFERENCES}}, 400),
    "no choice": ({"choice": []}, 400),
    "10,000 choices": ({"choice": [f"choice {n}" for n in range(10_000)]}, 200),
    "an empty choice": ({"choice": [""]}, 200),
    "left recursion": ({"grammar": 'root ::= root "a" | "b"'}, 200),
    "only left recursion": ({"grammar": 'root ::= root "a"'}, 400),
    "forced without end": ({"grammar": 'root ::= "a" root'}, 200),
    "gigabytes forced": ({"grammar": "\n".join(["root ::= r0", *TRIPLED, 'r20 ::= "a"'])}, 200),
    "a chain of rules": ({"grammar": "\n".join(["root ::= r0", *CHAIN])}, 400),
    "rules without end": ({"grammar": "\n".join(["root ::= r0", *RULES])}, 200),
    "no such rule": ({"grammar": "root ::= missing"}, 400),
    "wide parts of a tag": ({"structural_tag": WIDE}, 200),
    "no tag": ({"structural_tag": "garbage"}, 400),
}
