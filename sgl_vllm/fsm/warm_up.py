"""Compiles the loops of structured output before the first request needs them.

Owns examples that call each loop with the types that grammars call it with. Pure.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from sgl_vllm.fsm.automaton import Automaton, State
from sgl_vllm.fsm.byte_dfa import combined
from sgl_vllm.fsm.expressions import Seq
from sgl_vllm.fsm.grammar_compiler import compile_parsed
from sgl_vllm.fsm.masks import Bitmasks, fill
from sgl_vllm.fsm.parsed_grammar import ParsedGrammar
from sgl_vllm.fsm.regex import of_pattern
from sgl_vllm.fsm.schema import compile_schema
from sgl_vllm.fsm.vocabulary import Vocabulary

_SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 1},
        "b": {"type": "string", "minLength": 2, "maxLength": 90},
        "d": {"format": "uri"},
    },
    "additionalProperties": True,
}
_PARSED = [
    *([0], [4], [0, 3, 6, 9, 14, 18, 21]),
    [0, 1, 91, 4, 1, 0, 0, 1, 93, 5, 3, 0, 1, 2, 6, 2, 3, 5, 12, 1, 97],
    *([5, 0], [1], [0, 97, 97, 1]),
]
"""The sections of `root ::= "[" root "]" | Regex("a")`."""


@cache
def compile_loops() -> None:
    """Have numba compile all loops of this package, or load them from its cache on disk.

    Cost: about 15 seconds of CPU the first time after an installation; later half a second per
    process, and nothing at the second call.
    """
    _automata()
    _masks()


def _automata() -> None:
    combined(of_pattern("a+"), of_pattern("aa"), minus=True)
    packed = np.array([number for one in _PARSED for number in (len(one), *one)], np.int32)
    Automaton(compile_parsed(ParsedGrammar.of(packed.tobytes())))


def _masks() -> None:
    tokens = [bytes([byte]) for byte in range(256)] + [b'{"', b'": "', b'", "', b"ab"]
    tokens += [b"%d" % number for number in range(10, 1000)]  # enough for a dense bitmask
    vocabulary = Vocabulary(tokens, len(tokens))
    bitmasks = Bitmasks(vocabulary)
    words = np.zeros(vocabulary.num_words, np.uint32)
    wide = of_pattern("[^x]*").expression
    bitmasks.of(Automaton(Seq(wide, wide, wide)).start)
    state: State | None = Automaton(compile_schema(_SCHEMA)).start
    for byte in b'{"a": 12, "b": "abc", "d": "http://a/b?c", "c": [true, 1.5]}':
        assert state is not None
        fill(bitmasks.of(state), words)
        state = state.step(byte)


if __name__ == "__main__":  # `make install` fills the cache with it
    compile_loops()
