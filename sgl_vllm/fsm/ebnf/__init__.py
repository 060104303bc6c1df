"""EBNF grammars compiled to expressions over bytes.

Owns which grammars are compiled here, and what they mean, which is what xgrammar takes them for.
Any other raises `UnsupportedGrammarError` or `TooComplexError`, and goes to another backend. Pure.

    gbnf         llama.cpp's grammars, in xgrammar's dialect
    syntax       the text of a grammar: rules
    machine      the automaton of one rule, over bytes and calls of rules
    network      which rules are called, and which become part of their callers
    ambiguity    that the readings of a text do not become more and more
    compiler     a network to an expression
"""

from sgl_vllm.fsm.ebnf.compiler import compile_grammar
from sgl_vllm.fsm.errors import UnsupportedGrammarError

__all__ = ["UnsupportedGrammarError", "compile_grammar"]
