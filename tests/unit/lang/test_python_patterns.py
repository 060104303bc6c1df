"""Patterns that the language sends mean on a server what they mean in Python.

The plugin's automata stand in for a server. What they do with a pattern is compared with
Python's `re.fullmatch` of the pattern as it was given.
"""

from __future__ import annotations

import itertools
import random
import re
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_vllm.fsm import regex
from sgl_vllm.fsm.errors import UnsupportedPatternError
from sgl_vllm.lang.python_patterns import rewritten
from tests.effort import examples

WITHOUT_SPACE = r"""
\d{4}-\d{2}-\d{2} \d{1,2}:\d{2}(:\d{2})?\s?([AaPp][Mm])? [+-]?\d+
[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)? 0[xX][0-9a-fA-F]+ (?P<year>\d{4})/(?P<month>0[1-9]|1[0-2])
[A-Z]{2}\d{6}[A-D]? \w+@\w+\.(com|org|net) [\w.+-]+@[\w-]+(\.[\w-]+)+ https?://[^\s/]+(/[^\s]*)?
(25[0-5]|2[0-4]\d|1?\d?\d)(\.(25[0-5]|2[0-4]\d|1?\d?\d)){3} #[0-9a-f]{6} (?i)#[0-9a-f]{3}
\$\d{1,3}(,\d{3})*\.\d{2} (yes|no|maybe) (?i)(yes|no) (?i:straße) (?i)[k-m]+ ^(red|green|blue)$
\A[a-z]+\Z \Aabc\Z ^abc$ (a|b$)c? (^a|b)c a(b|$c?) (?:(?:^|,)\d+)+ (a$|b)+ a$\n? ^$ $ (^|a)b \s*
\S+ \s\S\s [^\W\d_]+ \w{1,8} \W+ [\w\s]{2,5} \D\d\D [^\d] . .* .+?x ..? (?s). (?s)<b>.*</b>
(?s:.)\. [^]a] []a]+ [^\]] [\]\[] [\^a] [^\^] [\^-`] [a\-z] [-a] [a-] [.] [$^] [|()] \.\*\+\? \\
\x41\x42 \x41b [\x41b] \u00e9a [\u00e9a] \U0001f600 \101\060 [\101-\103] \0 [\0\1] \t\n\r\f\v\a
[\t-\r] a{,2} a{2,} a{2} a{0} (ab){,3}? (ab)*?c a??b (a|ab)(c|bcd) (a*)* (|a)b (a|)b () (?:)
(?a)\w+ (?a:\d)\d (?#note)a (a+b?)+c [é-ü]{1,3} [日本語]+ 😀+ café|naïve a{1,3}b{1,3} (?P<q>['"])x
(?i)ß|ſ|K x{,} {a} a{b [^\s\S]|a (?:[^\s\S])*a (?:a|\n$)* (?:b|a$|\n\Z)+
"""
PATTERNS = [
    *WITHOUT_SPACE.split(),
    r"\(\d{3}\) \d{3}-\d{4}",
    r"[^\s,]+(, ?[^\s,]+)*",
    r"\N{DIGIT ONE}\N{GREEK SMALL LETTER ALPHA}",
    r"(?x) a  b # twice",
    r"(?x)[ ]a",
]

TEXTS = [
    *("", "a", "b", "c", "ab", "abc", "ac", "bc", "aab", "aaa", "abab", "ababc", "x", "axx", "ax"),
    *("AabcZ", "ABC", "Abc", "abcd", "abbcd", "aa", "aaab", "aabb", "b1", "1", "12", "٣", "١٢"),
    *("2024-01-31", "٢٠٢٤-٠١-٣١", "12:30", "9:05:01 PM", "1:00am", "-7", "+12", "1.5e-3", ".5"),
    *("0xFf", "2024/12", "2024/13", "AB123456C", "me@x.com", "mé@x.org", "a.b+c@d-e.f.g", "a@b"),
    *("STRASSE", "STRAẞE", "klm", "KLM", "\u212aL", "red", "green", "1,2,3", ",1", "1,", "a\n"),
    *("\n", "\r", "a\n", "a\n\n", " ", "\t", "\xa0", "\u2003", "\x1c", " a ", "éa", "é", "É", "ü"),
    *("http://a.b/c", "https://x", "http:// x", "127.0.0.1", "256.1.1.1", "#a0f", "#A0F"),
    *("#a0f0ff", "$1,234.50", "$12.5", "(123) 456-7890", "yes", "YES", "no", "maybe", "straße"),
    *(
        "üé",
        "日本",
        "😀",
        "😀😀",
        "café",
        "naïve",
        "_",
        "a_b",
        "ab cd",
        "!?",
        "a1b",
        "x, y,z",
        "x,",
    ),
    *("<b>a\nb</b>", "]", "[", "^", "`", "_^", "-", "a-", "z", ".", "$", "|", "(", ".*+?", "\\"),
    *("AB", "Ab", "A", "AAb", "A0", "\x00", "\x01", "1α", "\t\n\r\x0c\x0b\x07", "\x0b", "'x", '"x'),
    *("ss", "ſ", "S", "s", "k", "K", "\u212a", "twice", " a", "a{b", "{a}", "x{,}", "a]", "b]"),
    *("&]", "a5", "٣5", "5٣", "٢٣", "ǅ", "²", "Ⅷ", "\u0345", "á"),
]


def accepts(pattern: str):
    """Which texts a server generates for the pattern."""
    try:
        return regex.full_match(rewritten(pattern)).accepts
    except UnsupportedPatternError as error:
        assert "nothing matches" in str(error)
        return lambda text: False


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_server_takes_the_texts_that_python_matches(pattern):
    given_one, taken = re.compile(pattern), accepts(pattern)
    for text in TEXTS:
        assert taken(text.encode()) == bool(given_one.fullmatch(text)), text


def test_the_texts_tell_all_patterns_from_one_that_matches_nothing():
    kinds = [[text for text in TEXTS if re.fullmatch(one, text)] for one in PATTERNS]
    assert sum(map(bool, kinds)) > 0.95 * len(kinds)


PIECES = r"""
. \. [.] [^.] [].] [^]a] [\].] \[ \\ | 1 a ^ $ \A \Z \d \w \s \W {,2} {2} * + ? *? (?i:a) (?s:.)
[\^a] [\^] [\^-b] [\^^.] [\^\^\]] [^\^a] [\x5ea] [\1\\1] \01 \x01a \0 [\0-\2] \101 [\W\d] (?P<n>a)
[\u00e9a] [^\xe9\d] \u00e9 [\x41-F] \n ( ( ) ) (?:
"""


@settings(deadline=None, max_examples=examples(150))
@given(
    st.lists(st.sampled_from(PIECES.split()), max_size=8).map("".join),
    st.lists(st.text("a.\n[]\\^_1\0\x01A\xe9 ", max_size=5), max_size=20),
)
def test_so_does_any_combination_of_pieces(pattern, texts):
    try:
        given_one = re.compile(pattern)
    except re.error:
        with pytest.raises(ValueError, match="regex: "):
            rewritten(pattern)
        return
    try:
        taken = accepts(pattern)
    except ValueError as error:
        assert re.search("anchor|no text matches|possessive", str(error))  # `{,2}+` is
        return
    for text in texts:
        assert taken(text.encode()) == bool(given_one.fullmatch(text)), (pattern, text)


@settings(deadline=None, max_examples=examples(20))
@given(st.integers())
def test_anchors_hold_anywhere(seed):
    rng = random.Random(seed)
    pattern = anchored(rng, 3)
    given_one, taken = re.compile(pattern), accepts_or_nothing(pattern)
    for size in range(5):
        for letters in itertools.product("ab\n", repeat=size):
            text = "".join(letters)
            assert taken(text.encode()) == bool(given_one.fullmatch(text)), (pattern, text)


def accepts_or_nothing(pattern: str):
    try:
        return accepts(pattern)
    except ValueError as error:
        assert "no text matches" in str(error)
        return lambda text: False


def anchored(rng: random.Random, depth: int) -> str:
    if not depth:
        return rng.choice(["a", "b", "^", "$", "[b\n]", r"\n", r"\n$", r"\A", r"\Z", "b?", ""])
    parts = [anchored(rng, depth - 1) for _ in range(3)]
    return rng.choice(
        ["".join(parts), f"(?:{'|'.join(parts)})", f"(?:{parts[0]})?", f"(?:{parts[0]})*"]
    )


@pytest.mark.parametrize(
    ("pattern", "what"),
    [
        ("a(?=b)", "look-around"),
        ("(?<!a)b", "look-around"),
        (r"(a)\1", "a back reference"),
        (r"(?P<n>a)(?P=n)", "a back reference"),
        ("(a)?(?(1)b|c)", "a condition on a group"),
        ("(?>a|ab)c", "an atomic group"),
        ("a*+", "a possessive repetition"),
        (r"\bword", r"\b"),
        ("(?m)^a$", "the flag m"),
        ("(?m:a$)b", "the flag m"),
        ("(^|a){2}", "an anchor"),
        (r"\p{L}", r"bad escape \p"),
        ("[a", "unterminated character set"),
        ("a^b", "no text matches"),
        ("\ud800", "no text matches"),
        ("(" * 3000 + ")" * 3000, "nested too deeply"),
    ],
)
def test_what_is_not_regular_is_refused_by_name(pattern, what):
    with pytest.raises(ValueError, match=f"regex: .*{re.escape(what)}"):
        rewritten(pattern)


def test_what_is_sent_has_nothing_that_servers_read_in_different_ways():
    """No class begins with a caret or a bracket, and all escapes are of punctuation."""
    for pattern in PATTERNS:
        sent = rewritten(pattern)
        assert not re.search(r"(?<!\\)\[(\^?\]|\\\^)", sent), sent
        for escape in re.findall(r"\\(u....|.)", sent, re.DOTALL):
            assert escape in {"n", "r", "t", "u0000"} or escape in string.punctuation, sent


@pytest.mark.parametrize("pattern", ["[a-z]+", "(?:ab|c)*", r"[^\n]{2,3}\.", "Yes|No", "#[0-9]?"])
def test_a_plain_pattern_is_sent_as_it_is_or_nearly(pattern):
    sent = rewritten(pattern)
    assert sent in (pattern, f"(?:{pattern})")
