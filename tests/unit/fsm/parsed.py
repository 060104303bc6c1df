"""What xgrammar makes of a format, asked in this process instead of its worker."""

from __future__ import annotations

import json
from typing import Any

from sgl_vllm.fsm.automaton import Automaton
from sgl_vllm.fsm.errors import UnsupportedGrammarError
from sgl_vllm.fsm.expressions import Expression
from sgl_vllm.fsm.grammar_compiler import compile_parsed
from sgl_vllm.fsm.parsed_grammar import ParsedGrammar
from sgl_vllm.fsm.vllm import xgrammar_worker


def parsed(method: str, argument: str, **options: Any) -> ParsedGrammar:
    """What xgrammar's parser for a method of its compiler makes of a format."""
    question = {"parse": [method, argument, options]}
    xgrammar_worker._compilers = xgrammar_worker._compilers or [None]  # it needs no vocabulary
    _, packed = xgrammar_worker.answer(json.dumps(question).encode())
    if not packed:
        raise UnsupportedGrammarError("xgrammar does not parse it")
    return ParsedGrammar.of(packed)


def compile_by(method: str, argument: str, **options: Any) -> Expression:
    """The expression of that."""
    return compile_parsed(parsed(method, argument, **options))


def automaton(grammar: str) -> Automaton:
    """That of a grammar."""
    return Automaton(compile_by("compile_grammar", grammar))
