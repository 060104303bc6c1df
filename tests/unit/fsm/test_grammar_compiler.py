"""Grammars that xgrammar parses: what is refused. The texts of the others are compared with
xgrammar's in tests/engine/test_fsm_like_stock.py."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_vllm.fsm.errors import UnsupportedGrammarError
from sgl_vllm.fsm.grammar_compiler import compile_parsed
from sgl_vllm.fsm.parsed_grammar import ParsedGrammar
from tests.unit.fsm.parsed import automaton


@pytest.mark.parametrize(
    "grammar",
    [
        "root ::= root",
        "root ::= a\na ::= root",
        'root ::= a "x" | "y"\na ::= "" | root',
        'root ::= a root "y" | "z"\na ::= "" | "x"',
    ],
)
def test_a_rule_that_may_begin_with_itself_is_refused(grammar: str) -> None:
    with pytest.raises(UnsupportedGrammarError, match="begin with itself"):
        automaton(grammar)


def test_long_repetitions_cost_what_is_visited() -> None:
    many = "\n".join(f'a{i} ::= "[" a{i + 1}{{9999}} "]"' for i in range(100))
    forced, _ = automaton(f'root ::= a0\n{many}\na100 ::= "," "x"').start.forced()
    assert forced.startswith(b"[" * 100 + b",x,x")


def test_repeated_loops_are_one_automaton() -> None:
    """As separate ones, a text could be read in a hundred ways after each character."""
    start = automaton("root ::= (([a-z] [a-z]*)*){0,100}").start
    end = start.walk(b"word")
    assert end is not None and end.accepting
    assert len(start.threads) == len(end.threads) == 1


def test_a_repetition_of_what_may_be_empty_ends() -> None:
    start = automaton('root ::= (("{" x "}")? ","?){2,4} "."\nx ::= "y"*').start
    for text in (b".", b"{},.", b"{yy}{}."):
        end = start.walk(text)
        assert end is not None and end.accepting
    assert start.walk(b"{}{}{}{}{}") is None


@pytest.mark.parametrize(
    "data",
    [
        [4, 1, 5],  # a rule that there is not
        [5, 1, 3],  # an expression that there is not
        [5, 2, 0],  # cut off
        [9, 1, 0],  # of an unknown kind
        [12, 2, 1, 97],  # a pattern that came without an automaton
        [8, 1, 0],  # a repetition without bounds
    ],
)
def test_broken_arrays_are_refused(data: list[int]) -> None:
    numbers, begins = [np.array(one, np.int32) for one in (data, [0, len(data)])]
    with pytest.raises(UnsupportedGrammarError):
        compile_parsed(ParsedGrammar(numbers, begins, [0], 0, {}))
