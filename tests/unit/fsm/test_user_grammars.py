"""EBNF grammars: the texts and the bitmasks are xgrammar's."""

from __future__ import annotations

import random

import numpy as np
import pytest
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_vllm.fsm.automaton import Automaton
from sgl_vllm.fsm.errors import TooComplexError, UnsupportedGrammarError
from sgl_vllm.fsm.masks import Bitmasks
from sgl_vllm.fsm.vocabulary import Vocabulary
from tests.effort import examples
from tests.unit.fsm.parsed import automaton, compile_by
from tests.unit.fsm.test_masks import PIECES, legal_by_mask
from tests.unit.fsm.texts import after, bits_of
from tests.unit.fsm.user_grammars import GRAMMARS, LARK, NOT_OURS, random_grammar

TOKENS = [*dict.fromkeys(one for one in PIECES if len(one) < 100), b"<eos>"]
"""For longer ones xgrammar takes seconds where a grammar is ambiguous; `test_masks.py` has them."""

END = len(TOKENS) - 1
COMPILER = xgrammar.GrammarCompiler(
    xgrammar.TokenizerInfo(TOKENS, stop_token_ids=[END]), max_threads=1
)
VOCABULARY = Vocabulary([*TOKENS[:END], b""], len(TOKENS))


def stock_legal(matcher: xgrammar.GrammarMatcher) -> set[int]:
    row = xgrammar.allocate_token_bitmask(1, len(TOKENS))
    matcher.fill_next_token_bitmask(row)
    flags = np.unpackbits(row.numpy()[0].view(np.uint8), bitorder="little")
    return set(np.flatnonzero(flags[: len(TOKENS)]).tolist())


def walk_beside_xgrammar(
    grammar: str, rng: random.Random, walks: int, steps: int, method: str = "compile_grammar"
) -> None:
    """Random legal tokens; the masks of both, and whether the text may end, compared before each.
    Short tokens are preferred, so that texts come to their ends."""
    start = Automaton(compile_by(method, grammar)).start
    masks = Bitmasks(VOCABULARY)
    compiled = getattr(COMPILER, method)(grammar)
    for _ in range(walks):
        matcher, state = xgrammar.GrammarMatcher(compiled), start
        for _ in range(steps):
            legal = legal_by_mask(masks, VOCABULARY, state)
            assert legal | ({END} if state.accepting else set()) == stock_legal(matcher), grammar
            if not legal:
                break
            token = min(rng.choices(sorted(legal), k=2), key=lambda one: len(TOKENS[one]))
            following = after(state, TOKENS[token])
            assert following is not None and matcher.accept_token(token)
            state = following


@pytest.mark.parametrize("name", GRAMMARS)
def test_masks_are_those_of_xgrammar(name: str) -> None:
    walk_beside_xgrammar(GRAMMARS[name], random.Random(name), walks=3, steps=40)


@pytest.mark.parametrize("name", LARK)
def test_masks_of_a_grammar_in_larks_syntax(name: str) -> None:
    rng = random.Random(name)
    walk_beside_xgrammar(LARK[name], rng, walks=3, steps=40, method="compile_lark")


@settings(max_examples=examples(8), deadline=None)
@given(st.integers(0, 10**9))
def test_so_are_those_of_random_grammars(seed: int) -> None:
    grammar = random_grammar(random.Random(seed))
    try:
        walk_beside_xgrammar(grammar, random.Random(seed), walks=2, steps=20)
    except (UnsupportedGrammarError, TooComplexError):
        xgrammar.Grammar.from_ebnf(grammar)  # left to xgrammar, which takes it


# -- the syntax


@pytest.mark.parametrize(
    "grammar",
    [
        r'root ::= "\x41\u00e9\U0001F600" | "\x4" | "\x0041z" | "\n\r\t\\\""',
        r'root ::= "\a\b\f\v\0\e" | "\'\?\/"',
        r"root ::= [a-c\n\]\[\-] [--a] [a-] [-a] [a^] [\^a] [a-c-e]",
        r"root ::= [\x41-\x43] [!-\-] [é-ü] [\u00e9]",
        r"root ::= [^a-c\n] [^\]] [^^] [^]",
        r"root ::= [^\ud800-\udfff] [\ud7ff-\ue000] [\uffff-\U00010001] [\u0000-\U0010FFFF]",
        r"root ::= [à-\uffff] [\u0080-\u07ff] [\u0800-\uffff] [\U00010000-\U0010ffff]",
        'root ::= "a"? "b"* "c"+ "d"{2} "e"{1,3} "f"{2,} "g"{0} "h"{ 0 , 2 } ( "i" ){0,0}',
        'root ::= "" | () | ("a" | "" | "b" ()) "c"',
        'root::="a"b # comment "\n# another\n\n  b\n::=\r\n"c"|\n "d"\r\n',
        "root ::= _x -y z.1 r2\n_x ::= [a]\n-y ::= [b]\nz.1 ::= [c]\nr2 ::= [d]\nunused ::= root2\n"
        'root2 ::= "never"',
        'root ::= ("a"?)* "b" ("c"*)+ ("d"? "e"?){2,3}',
    ],
    ids=lambda grammar: grammar[:40],
)
def test_syntax_is_read_as_xgrammar_reads_it(grammar: str) -> None:
    walk_beside_xgrammar(grammar, random.Random(grammar), walks=10, steps=20)


@pytest.mark.parametrize("name", NOT_OURS)
def test_other_grammars_are_left_to_xgrammar(name: str) -> None:
    with pytest.raises((UnsupportedGrammarError, TooComplexError)):
        automaton(NOT_OURS[name])


def chain(body: str, number: int) -> str:
    """Rules that each refer to the next one or ones, in place of `N`."""
    rules = [f"r{i} ::= {body.replace('N', f'r{i + 1}')}" for i in range(number)]
    return "\n".join(["root ::= r0", *rules, f"r{number} ::= [a-z]"])


@pytest.mark.parametrize(
    "grammar",
    [chain("N N", 900), chain('"a" N', 990), chain("N", 2_000), chain('"a" N | "b" N', 990)],
    ids=["powers", "long", "rules", "choices"],
)
def test_large_grammars_cost_what_is_visited(grammar: str) -> None:
    state = automaton(grammar).start
    for _ in range(20):
        assert len(state.threads) < 4
        if not state.first:
            break
        following = state.step(state.first.bit_length() - 1)
        assert following is not None
        state = following


def test_loops_are_loops_however_they_are_written() -> None:
    for body in (
        'item ("," item)*',
        'list "," item | item',
        'item "," list | item',
        'list "," list | item',
    ):
        start = automaton(f"root ::= list\nlist ::= {body}\nitem ::= [0-9]+").start
        state = after(start, "1,22,333,4444")
        assert state is not None and state.accepting
        assert len(state.threads) == 2, "one in the item, one after it"


@pytest.mark.parametrize("name", GRAMMARS)
def test_readings_do_not_become_more_with_the_text(name: str) -> None:
    rng = random.Random(name)
    state = automaton(GRAMMARS[name]).start
    for _ in range(1_500):
        options = [*bits_of(state.first)]
        if not options:
            break
        opening = [byte for byte in options if byte in b"([{<"]
        following = state.step(rng.choice(opening if opening and rng.random() < 0.5 else options))
        assert following is not None
        state = following
        assert len(state.threads) <= 32
