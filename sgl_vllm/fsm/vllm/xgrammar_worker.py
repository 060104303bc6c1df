"""The process that compiles with xgrammar (`worker.py`), to see that it comes to an end, and that
parses with it.

The first question is the vocabulary, as xgrammar serializes it. Each other question is a list of
calls of its compiler, `[[method, argument, options], ...]`, or one such call in an object,
`{"parse": [method, argument, options]}`, whose answer is the grammar that xgrammar makes of the
argument, in the form of `parsed_grammar.py`. All other answers are empty: what is wrong with a
format is reported by the backend that compiles it next.
"""

from __future__ import annotations

import importlib
import json
import sys
from functools import cache
from itertools import pairwise
from typing import Any  # Any: what is imported by name

import numpy as np
from numpy.typing import NDArray

from sgl_vllm.fsm.vllm.xgrammar_alone import import_alone
from sgl_vllm.fsm.worker import serve

# Tests ask it in their own process, where other modules use torch.
xgrammar: Any = import_alone() if __name__ == "__main__" else importlib.import_module("xgrammar")

NUM_THREADS = 4
_PARSED = {
    "compile_json_schema": xgrammar.Grammar.from_json_schema,
    "compile_structural_tag": xgrammar.Grammar.from_structural_tag,
    "compile_grammar": xgrammar.Grammar.from_ebnf,
    "compile_lark": xgrammar.Grammar.from_lark,
}
_REGEX = 12
"""The kind of a pattern among a grammar's expressions."""

_PROBE = r"""
root ::= "\u00e9" x{2,} (y t)
x ::= [a] | [^b-c]* p
y ::= "" | x
p ::= Regex("a+")
t ::= TagDispatch(("<a", x), excludes=("zz"), loop_after_dispatch=true)
"""
_PARSED_PROBE = [
    *([0], [5, 11, 15, 16, 20]),
    [0, 4, 9, 12, 15, 21, 24, 27, 30, 35, 38, 42, 46, 49, 52, 54, 58, 63, 67, 71, 74, 80],
    [
        *(0, 2, 195, 169, 8, 3, 1, 2, -1, 4, 1, 2, 4, 1, 4, 5, 4, 0, 1, 2, 3, 6, 1, 4, 0, 1, 97),
        *(5, 1, 6, 2, 3, 1, 98, 99, 4, 1, 3, 5, 2, 8, 9, 6, 2, 7, 10, 4, 1, 1, 5, 1, 12, 3, 0),
        *(6, 2, 14, 13, 12, 3, 0, 97, 43, 0, 2, 60, 97, 0, 2, 122, 122, 6, 1, 18),
        *(7, 4, 17, 1, 1, 19),
    ],
    *([16, 0], [1], [0, 97, 97, 1, 1, -1, 0, 0]),
]
"""Its sections. Where they are others, this version of xgrammar writes grammars differently, and
none is handed over."""

_compilers: list[xgrammar.GrammarCompiler] = []
_pattern_compiler = xgrammar.GrammarCompiler(
    xgrammar.TokenizerInfo(["a", "b"], stop_token_ids=[1]), max_threads=1, cache_enabled=False
)


def answer(question: bytes) -> tuple[int, bytes]:
    if not _compilers:
        vocabulary = xgrammar.TokenizerInfo.deserialize_json(question.decode())
        _compilers.append(
            xgrammar.GrammarCompiler(vocabulary, max_threads=NUM_THREADS, cache_enabled=False)
        )
        return 0, b""
    asked = json.loads(question)
    try:
        if isinstance(asked, dict):
            method, argument, options = asked["parse"]
            if not _is_understood():
                return 0, b""
            return 0, _packed(_sections(_PARSED[method](argument, **options)))
        for method, argument, options in asked:
            getattr(_compilers[0], method)(argument, **options)
    except Exception as error:
        if isinstance(error, MemoryError) or "bad_alloc" in str(error):
            sys.exit(1)  # the asker sees that the process has ended
    return 0, b""


@cache
def _is_understood() -> bool:
    sections = _sections(xgrammar.Grammar.from_ebnf(_PROBE))
    return [one.tolist() for one in sections] == _PARSED_PROBE


def _sections(grammar: xgrammar.Grammar) -> list[NDArray[np.int32]]:
    """What `ParsedGrammar.of` reads. ValueError for limits on a rule, such as `[max_tokens=3]`."""
    parsed = json.loads(grammar.serialize_json())
    for _name, _body, _lookahead, _is_exact, *attributes in parsed["rules"]:
        # A capture's name or a temperature is no limit: neither changes the allowed text.
        if any(isinstance(one, int) and one is not False and one != -1 for one in attributes):
            raise ValueError("the arrays cannot express limits on rules")
    data = np.array(parsed["grammar_expr_data"], np.int32)
    begins = np.array([*parsed["grammar_expr_indptr"], len(data)], np.int32)
    bodies = np.array([rule[1] for rule in parsed["rules"]], np.int32)
    sections = [np.array([parsed["root_rule_id"]], np.int32), bodies, begins, data]
    for number in np.flatnonzero(data[begins[:-1]] == _REGEX).tolist():
        in_json, *pattern = data[begins[number] + 2 : begins[number + 1]].tolist()
        sections += _automaton(number, bytes(pattern).decode(), in_json)
    return sections


def _automaton(number: int, pattern: str, in_json: int) -> list[NDArray[np.int32]]:
    """The sections of a pattern that is the expression `number`."""
    flag = "true" if in_json else "false"
    rule = f"root ::= Regex({json.dumps(pattern, ensure_ascii=False)}, json_string={flag})"
    compiled = _pattern_compiler.compile_grammar(xgrammar.Grammar.from_ebnf(rule))
    ((fsm, start, ends, *_), *_), *_ = json.loads(compiled.serialize_json())["grammar"][
        "per_rule_fsms"
    ]
    edges, begins = fsm["edges"]["data_"], fsm["edges"]["indptr_"]
    rows = [
        (source, *edge)
        for source, (begin, end) in enumerate(pairwise(begins))
        for edge in edges[begin:end]
    ]
    return [np.array(one, np.int32).ravel() for one in ([number, start], ends, rows)]


def _packed(sections: list[NDArray[np.int32]]) -> bytes:
    return b"".join([np.int32(len(one)).tobytes() + one.tobytes() for one in sections])


if __name__ == "__main__":
    serve(answer)
