"""Grammars as llama.cpp's users write them, in xgrammar's dialect: the texts that xgrammar's own
parser takes are those that the grammar allows."""

from __future__ import annotations

import pytest
from xgrammar import Grammar
from xgrammar.testing import _is_grammar_accept_string as accepts

from sgl_vllm.fsm.gbnf import as_xgrammar_reads_it
from tests.unit.fsm.parsed import automaton

JSON = r"""
# A document, and optional white space wherever a token has ended
root   ::= thing
thing  ::= map | list | text | digits | ("true" | "false" | "null") gap
map    ::= "{" gap ( text ":" gap thing ("," gap text ":" gap thing)* )? "}" gap
list   ::= "[" gap ( thing ("," gap thing)* )? "]" gap
text   ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" gap
digits ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? gap
gap    ::= | " " | "\n" [ \t]{0,20}
"""


@pytest.mark.parametrize(
    ("grammar", "allowed", "others"),
    [
        (JSON, ["{}", '{ "a":\n  [1,-2e3, true] }', '"\\u00e9" ', "null"], ['{"a"}', "[1,]", ""]),
        ('root ::= .* "!"', ["!", "a\né!", "!!"], ["a"]),
        ('root ::= "a" | ', ["a", ""], ["b"]),
        ('root ::= ("a" | ) "b"', ["ab", "b"], ["a"]),
        ('root ::= (|"a"|) "b" x\nx ::=\ny ::= "z"', ["ab", "b"], ["bz"]),
        ('root ::= () "a"', ["a"], [""]),
        ('root ::= "." [.] "|" # . |\n', ["..|"], ["a.|"]),
        ('root.a ::= "x"\nroot ::= root.a .', ["xy"], ["x"]),
        ('x ::= "x"\nroot ::= ..x.', ["abxc"], ["xc"]),
        ('. ::= "x"\nroot ::= .', ["x"], ["y"]),
    ],
)
def test_an_empty_alternative_and_any_character_are_taken(grammar, allowed, others):
    read = as_xgrammar_reads_it(grammar)
    compiled = Grammar.from_ebnf(read)
    assert [text for text in (*allowed, *others) if accepts(compiled, text)] == allowed
    automaton(read)
    assert as_xgrammar_reads_it(read) == read


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= "a" [.b]',
        'root ::= "a" # |\n',
        'root ::= "a\n| )',
        "",
        "?",
        "a.b.",
        'root: "a" | \n',
        ".",
    ],
)
def test_all_else_is_left_as_it_is(grammar):
    assert as_xgrammar_reads_it(grammar).replace("[^]", ".").replace("b .", "b.") == grammar
