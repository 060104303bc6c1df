"""Grammars that xgrammar prints for schemas -> automata. Whether they are its schemas is in
tests/engine/test_fsm_like_stock.py; here is what the automata accept, and what is refused."""

from __future__ import annotations

import re

import pytest

from sgl_vllm.fsm.automaton import Automaton
from sgl_vllm.fsm.errors import TooComplexError, UnsupportedGrammarError
from sgl_vllm.fsm.schema_grammar import compile_schema_grammar
from tests.unit.fsm import texts

STRINGS = r"""
basic_escape ::= (([\"\\/bfnrt]) | ("u" [A-Fa-f0-9] [A-Fa-f0-9] [A-Fa-f0-9] [A-Fa-f0-9]))
basic_string_sub ::= (("\"") | ([^\0-\x1f\"\\\r\n] basic_string_sub)
    | ("\\" basic_escape basic_string_sub)) (=([ \n\r\t]* [,}\]:]))
basic_string ::= (("\"" basic_string_sub))
"""


def accepts(grammar: str, text: str) -> bool:
    return texts.accepts(compile_schema_grammar(grammar), text)


@pytest.mark.parametrize(
    "rule, pattern, tried",
    [
        ('"a" [0-9]{2, 3} "b"', "a[0-9]{2,3}b", ["a1b", "a12b", "a123b", "a1234b"]),
        ('"[" item{0, -1} "]"', r"\[(x,)*\]", ["[]", "[x,]", "[x,x,]", "[x]"]),
        ('"[" item{2, -1} "]"', r"\[(x,){2,}\]", ["[x,]", "[x,x,]", "[x,x,x,]"]),
        ('"[" item{0, 2} "]"', r"\[(x,){0,2}\]", ["[]", "[x,]", "[x,x,]", "[x,x,x,]"]),
        ('(("0") | ("-" [1-9] [0-9]*)) "}"', r"(0|-[1-9][0-9]*)\}", ["0}", "-10}", "-0}", "1}"]),
        ('"\\"" Regex("^a+é$", json_string=true) "\\""', '"a+é"', ['"aé"', '"é"', '"aaé"']),
        ('"\\"" plain{1, 2} "\\""', '".{1,2}"', ['""', '"é"', '"ab"', '"abc"']),
        ('"<" text "</x>"', "<((?!</x)(?s:.))*</x>", ["<</x>", "<a\n</x>", "<</x</x>", "<</x>a"]),
        ('"<" text ">"', "<((?!</x)(?s:.))*>", ["<>", "<</x>", "<a>>", "<a"]),
    ],
)
def test_a_rule_means_what_the_pattern_means(rule: str, pattern: str, tried: list[str]) -> None:
    grammar = f'root ::= ({rule})\nitem ::= (("x" ","))\nplain ::= (([^\\"\\\\\\r\\n]))\n'
    grammar += 'text ::= TagDispatch(\n  loop_after_dispatch=false,\n  excludes=("</x")\n)'
    assert [accepts(grammar, t) for t in tried] == [bool(re.fullmatch(pattern, t)) for t in tried]


def test_rules_may_contain_themselves() -> None:
    grammar = STRINGS + 'root ::= (("[" root "]") | (basic_string))'
    assert accepts(grammar, r'[["a\"é"]]') and not accepts(grammar, '[["a"]')


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
