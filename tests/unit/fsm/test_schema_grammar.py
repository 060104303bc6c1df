"""Grammars that xgrammar prints for schemas: what is refused. The texts of the others are compared
with xgrammar's in tests/engine/test_fsm_like_stock.py."""

from __future__ import annotations

import pytest

from sgl_vllm.fsm.automaton import Automaton
from sgl_vllm.fsm.errors import TooComplexError, UnsupportedGrammarError
from sgl_vllm.fsm.schema_grammar import compile_schema_grammar


@pytest.mark.parametrize(
    "grammar, why",
    [
        ('root ::= ((a "x") | ("y"))\na ::= ("" | (root))', "begins with itself"),
        ('root ::= ((a root))\na ::= ("" | ("x"))', "begins with itself"),
        ('root ::= ((a{0, -1}))\na ::= ("" | ("{" "x"))', "may be empty"),
        ('root ::= ((TagDispatch(("a", b), excludes=("c"))))', "not understood"),
        ('root ::= ((TagDispatch(loop_after_dispatch=true, excludes=("c"))))', "not understood"),
        ('a ::= (("x"))', "no rule root"),
    ],
)
def test_what_no_walk_would_end_in_is_refused(grammar: str, why: str) -> None:
    with pytest.raises(UnsupportedGrammarError, match=why):
        compile_schema_grammar(grammar)


def test_large_grammars_are_refused_or_cost_what_is_visited() -> None:
    with pytest.raises(TooComplexError, match="10,000 times"):
        compile_schema_grammar('root ::= (("x" ","){0, 20000})')
    with pytest.raises(TooComplexError, match="characters"):
        compile_schema_grammar("root ::= " + " " * (1 << 20))
    many = "".join(f'a{i} ::= (("[" a{i + 1}{{9999, 9999}} "]"))\n' for i in range(100))
    grammar = f'root ::= ((a0))\n{many}a100 ::= (("," "x"))'
    forced, _ = Automaton(compile_schema_grammar(grammar)).start.forced()
    assert forced.startswith(b"[" * 100 + b",x,x")
