"""Patterns -> byte DFAs: compared with `re`, with sets, and held within their limits."""

import contextlib
import itertools
import json
import re
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_vllm.fsm.byte_dfa import ByteDfa, combined
from sgl_vllm.fsm.errors import RefusedFormatError, TooComplexError, UnsupportedPatternError
from sgl_vllm.fsm.regex import full_match, json_string_search
from tests.effort import examples

ALPHABET = 'abA1_ "\\\n\x01/é€😀'
WIDE = "".join(map(chr, range(0, 127, 2)))
MANY_SETS = "|".join("[ab]" * i + "a" + "[ab]" * (12 - i) for i in range(13))
BOMBS = [
    "(a|b)*a(a|b){40}",
    "(.{0,500}){0,500}",
    "(?:[ab](?:(?:|){10000}){4})*a[ab]{13}",  # long ways without text
    f"(?:{MANY_SETS})" + f"[{re.escape(WIDE)}]" * 900,
    f"(?:[{re.escape(WIDE)}]{{10}}){{9000}}",  # many transitions
]

characters = st.sampled_from([re.escape(c) for c in ALPHABET])
CLASSES = r"""
. \d \D \w \W \s \S [ab] [^a] [a-z1] [^é-€] [^\W_] ["\\] [\x00-\x1f] [😀é] [^\s\d] [\]\-^]
"""
classes = st.sampled_from(CLASSES.split())
patterns = st.recursive(
    characters | classes | st.just(""),
    lambda inner: st.one_of(
        st.lists(inner, min_size=2, max_size=4).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda options: f"({'|'.join(options)})"),
        st.tuples(
            inner, st.sampled_from(["*", "+", "?", "{2}", "{0,2}", "{1,}", "*?", "{1,2}?"])
        ).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
    ),
    max_leaves=8,
)
strings = st.text(ALPHABET, max_size=6)


def compiled(pattern: str, compile_) -> ByteDfa | None:
    """The DFA, None if no text at all matches."""
    try:
        return compile_(pattern)
    except UnsupportedPatternError as error:
        assert "nothing matches" in str(error)
        return None


@settings(max_examples=examples(30), deadline=None)
@given(patterns, st.lists(strings, min_size=1, max_size=8))
def test_a_whole_text_matches_where_re_says_so(pattern, texts):
    dfa = compiled(pattern, full_match)
    matches = re.compile(pattern, re.ASCII | re.DOTALL).fullmatch
    for text in texts:
        accepted = dfa is not None and dfa.accepts(text.encode())
        assert accepted == bool(matches(text)), text


@settings(max_examples=examples(30), deadline=None)
@given(patterns, st.sampled_from(["", "^"]), st.sampled_from(["", "$"]), st.lists(strings))
def test_a_json_string_matches_where_re_finds_the_pattern_in_its_value(pattern, begin, end, texts):
    pattern = begin + (f"(?:{pattern})" if begin or end else pattern) + end
    dfa = compiled(pattern, json_string_search)
    found = re.compile(pattern.replace("$", r"\Z"), re.ASCII).search
    for text in texts:
        accepted = dfa is not None and dfa.accepts(json.dumps(text, ensure_ascii=False).encode())
        assert accepted == bool(found(text)), text


ECMA_SPACE = "\t\n\v\f\r \xa0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff" + "".join(
    map(chr, range(0x2000, 0x200B))
)
ECMA_LINE_ENDS = "\n\r\u2028\u2029"


@pytest.mark.parametrize(
    "pattern, inside",
    [
        ("^.$", lambda c: c not in ECMA_LINE_ENDS),
        (r"^\s$", lambda c: c in ECMA_SPACE),
        (r"^\S$", lambda c: c not in ECMA_SPACE),
        (r"^[^\S]$", lambda c: c in ECMA_SPACE),
        (r"^\d$", lambda c: c in "0123456789"),
        (r"^\W$", lambda c: not (c.isascii() and (c.isalnum() or c == "_"))),
    ],
)
def test_classes_in_json_strings_are_those_of_ecma_262(pattern, inside):
    dfa = json_string_search(pattern)
    for code in (*range(0x20, 0x3100), 9, 10, 11, 12, 13, 0xFEFF, 0xFFFD, 0x1D7D9):
        text = json.dumps(chr(code), ensure_ascii=False)
        assert dfa.accepts(text.encode()) == inside(chr(code)), hex(code)


# Which reading counts is not clear, so vLLM's default backend gets them.
HANDED_ON = {
    "Python reads it differently from ECMA-262": (
        json_string_search,
        r"a{,2} (?#a)b \a [\a] \Aa a\Z \U0001f600 (?P<n>a)",
    ),
    "it is no named group": (json_string_search, r"(?<=a)b (?<!a)b (?<a>b)\k<a> (?<1>a)"),
    # Python reads the bracket as a member, vLLM's default backend as the end of the class.
    "it has an empty class of ECMA-262": (full_match, r"[^]a]x []a]x a[^] (b|[^]a])+ \\[]a]"),
    # There, `[\^a]` is `[^a]`, `[\1]` is `1`, `\01` is NUL and `1`, `\x41b` is U+041B, and
    # `[\u00e9a]` is U+0E9A.
    "vLLM's default backend reads it differently": (
        full_match,
        r"[\^a]x [\^-z] x[a\1] [^\8] a\01 [\\\00] [\x5e] [\u005ea] [\u00c0-\u00ffa-z] [^\u00e9\d]"
        r" \x41b [a\x41F]",
    ),
}


@pytest.mark.parametrize(
    ("compile_", "pattern"),
    [(compile_, one) for compile_, patterns in HANDED_ON.values() for one in patterns.split()],
)
def test_what_may_be_read_in_two_ways_is_handed_on(compile_, pattern):
    with pytest.raises(UnsupportedPatternError):
        compile_(pattern)


@pytest.mark.parametrize(
    ("pattern", "in_python"),
    [
        (r"^[^]a]$", r"^[\s\S]a\]$"),
        (r"^[^][^]?$", r"^[\s\S][\s\S]?$"),
        (r"^([]|b)[^]a$", r"^b[\s\S]a$"),
        (r"^[\]^]$", r"^[\]^]$"),
    ],
)
def test_a_class_without_members_in_a_json_string_is_that_of_ecma_262(pattern, in_python):
    dfa = json_string_search(pattern)
    for letters in itertools.product("[]^ab\n", repeat=3):
        for size in range(1, 4):
            text = "".join(letters[:size])
            accepted = dfa.accepts(json.dumps(text).encode())
            assert accepted == bool(re.fullmatch(in_python, text)), text


@pytest.mark.parametrize(
    ("pattern", "without_names"),
    [
        (r"^(?<y>\d{2})-(?<m>\d)$", r"^(\d{2})-(\d)$"),
        ("^(?<a>b(?<c>d)*|e)+$", "^(b(d)*|e)+$"),
        (r"^\(?<y>$", r"^\(?<y>$"),
        ("^[(?<y>]$", "^[(?<y>]$"),
    ],
)
def test_names_of_groups_change_nothing(pattern, without_names):
    texts = map("".join, itertools.product("bde-1(?<y>", repeat=4))
    for text in [*texts, "11-1", "(", "?", "<y>", "(<y>"]:
        expected = bool(re.search(without_names, text))
        assert json_string_search(pattern).accepts(json.dumps(text).encode()) == expected
        assert full_match(pattern).accepts(text.encode()) == expected


ANCHORED = "^a|b$ ^a$|^b$ (^a|b) ^(?:ab|ba)$ ^|a a|$ ^$|^a $ ^ (?:^a$|b)|aa$ ^(a|b$)"


@pytest.mark.parametrize("pattern", ANCHORED.split())
def test_anchors_hold_for_their_branch_only(pattern):
    dfa = json_string_search(pattern)
    for size in range(4):
        for letters in itertools.product("abé", repeat=size):
            text = "".join(letters)
            accepted = dfa.accepts(json.dumps(text, ensure_ascii=False).encode())
            assert accepted == bool(re.search(pattern, text)), text


INSIDE = r"(a|b$)c? \Aab?\Z a?^b b(a|$) (^a|b)+ (?:(?:^|b)a)* (a|b$){2} ((^|a)b|$)+ \A\A^a$\Z"


@pytest.mark.parametrize("pattern", INSIDE.split())
def test_an_anchor_holds_where_it_stands(pattern):
    dfa, matches = full_match(pattern), re.compile(pattern.replace("$", r"\Z")).fullmatch
    for size in range(5):
        for letters in itertools.product("abc", repeat=size):
            text = "".join(letters)
            assert dfa.accepts(text.encode()) == bool(matches(text)), text


HANDED_ON_ANCHORS = (
    r"a\b \Ba (^|a){2} a^b a$b a\Zb [\^a]$b \A[\^a]b\Z \Aa{10001}\Z (a?|$)" + "(a?|$)" * 30
)


@pytest.mark.parametrize("pattern", [*HANDED_ON_ANCHORS.split(), "(?:^a|b)*" * 500])
def test_an_anchor_that_is_not_supported_is_refused_and_not_handed_on(pattern):
    """vLLM's default backend ignores anchors."""
    with pytest.raises(RefusedFormatError):
        full_match(pattern)


def test_a_long_pattern_and_a_deep_one_are_read_in_linear_time():
    started = time.process_time()
    for pattern in ("a" * 30_000, "^" + "a" * 30_000 + "$"):
        with contextlib.suppress(TooComplexError, RefusedFormatError):
            full_match(pattern)
    with pytest.raises(TooComplexError):
        full_match("(" * 3000 + "a" + ")*" * 3000)
    assert time.process_time() - started < 20


def test_space_holds_the_no_break_space_and_the_other_classes_are_of_ascii():
    assert full_match(r"\s").accepts("\xa0".encode())
    assert not full_match(r"\S").accepts("\xa0".encode())
    assert not full_match(r"\d").accepts("٣".encode())
    assert not full_match(r"\w").accepts("é".encode())


NOT_REGULAR = r"""
(a)\1 a(?=b) a(?!b) (?<=a)b (?i)a (?i:a) a^b a$b (?>a)b a*+ (?P<n>a)(?P=n) (a)(?(1)b|c) (
[z-a]
a{2,1} * \ (?# [^\s\S] x{99999999999999999999}
"""


@pytest.mark.parametrize("pattern", [*NOT_REGULAR.split(), "\ud800", r"\N{NO SUCH NAME}"])
@pytest.mark.parametrize("compile_", [full_match, json_string_search])
def test_what_is_not_regular_here_is_refused(pattern, compile_):
    with pytest.raises((UnsupportedPatternError, TooComplexError, RefusedFormatError)):
        if compile_(pattern).is_empty:
            raise UnsupportedPatternError("nothing matches")


@pytest.mark.parametrize("pattern", ["a" * 50_001, "(" * 5_000 + ")" * 5_000, "a{20000}"])
def test_what_is_too_large_is_refused(pattern):
    with pytest.raises(TooComplexError):
        full_match(pattern)


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_pattern_that_explodes_is_given_up_and_the_next_one_works(bomb):
    began = time.thread_time()
    with pytest.raises((TooComplexError, UnsupportedPatternError)):
        full_match(bomb)
    assert time.thread_time() - began < 2
    assert full_match("a{3}").accepts(b"aaa")


def test_states_that_are_told_apart_one_by_one_take_no_longer_than_others():
    began = time.thread_time()
    dfa = full_match(f"(?:a{{0,9000}}b)*a{{0,9000}}|[{re.escape(WIDE)}]")
    assert time.thread_time() - began < 2
    assert dfa.num_states == 9003


# -- algebra ----------------------------------------------------------------------------------

tables = st.integers(1, 6).flatmap(
    lambda n: st.tuples(
        st.lists(st.tuples(*[st.integers(-1, n - 1)] * 2), min_size=n, max_size=n),
        st.lists(st.booleans(), min_size=n, max_size=n),
        st.integers(0, n - 1),
    )
)
WORDS = [bytes(w) for size in range(6) for w in itertools.product(b"ab", repeat=size)]


def dfa_of(description) -> ByteDfa:
    rows, accepting, start = description
    table = np.full((len(rows), 256), -1, np.int32)
    table[:, ord("a")] = [row[0] for row in rows]
    table[:, ord("b")] = [row[1] for row in rows]
    return ByteDfa(table, np.arange(256), np.array(accepting), start)


def language(dfa: ByteDfa) -> set[bytes]:
    return {word for word in WORDS if dfa.accepts(word)}


@settings(max_examples=examples(30), deadline=None)
@given(tables, tables)
def test_combinations_are_those_of_sets(a, b):
    a, b = dfa_of(a), dfa_of(b)
    assert language(combined(a, b)) == language(a) & language(b)
    assert language(combined(a, b, minus=True)) == language(a) - language(b)
