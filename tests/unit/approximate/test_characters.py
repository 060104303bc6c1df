"""Which tokens lie inside an interval of characters."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_vllm.approximate.characters import TokenTexts
from tests.effort import examples

WORDS = ["a", "of ", "\u00e9", "\u00e9t\u00e9", "\U0001f431", "\n\n"]
PARTS = [b"\xc3", b"\xa9", b"\xf0\x9f", b"\x90\xb1"]
PIECES = [b"", b"a", b"of ", "\u00e9t\u00e9".encode(), *PARTS, b"\n\n"]


def tokenized(text: str) -> list[int]:
    """The longest piece first."""
    rest, tokens = text.encode(), []
    while rest:
        best = max((p for p in PIECES if p and rest.startswith(p)), key=len)
        tokens.append(PIECES.index(best))
        rest = rest[len(best) :]
    return tokens


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.sampled_from(WORDS)), st.data())
def test_the_tokens_of_whole_texts_are_found(words, data) -> None:
    """Texts that are tokenized by themselves, with special tokens anywhere between them, of which
    the tokenizer has put the first one there."""
    special = data.draw(st.sampled_from(["", "<s>"]))
    token_ids, wanted, intervals, num_chars = [0], [], [], 0
    for word in words:
        if data.draw(st.booleans()):
            token_ids.append(0)
            num_chars += len(special)
        tokens = tokenized(word)
        wanted.append((len(token_ids), len(token_ids) + len(tokens)))
        intervals.append((num_chars, num_chars + len(word)))
        token_ids += tokens
        num_chars += len(word)
    token_ids.append(0)
    num_chars += len(special)
    texts = TokenTexts(PIECES, {0: special})
    assert texts.token_intervals(token_ids, intervals) == wanted
    assert texts.token_intervals(token_ids, intervals, num_chars) == wanted
    moved = [(start + len(special), end + len(special)) for start, end in intervals]
    assert texts.token_intervals(token_ids, moved, num_chars + len(special)) == wanted


@pytest.mark.parametrize(
    ("token_ids", "intervals", "num_chars", "expected"),
    [
        ([0, 1, 2, 0, 1], [(1, 14)], None, [(1, 3)]),  # the whole tokens inside
        ([0, 1, 2, 0, 1], [(0, 4), (4, 12)], None, [(0, 1), (2, 3)]),
        ([0, 1], [(1, 2), (4, 6)], None, []),
        ([0, 99, 0], [(3, 500)], None, [(2, 3)]),  # out of range
        ([0], [(3, 9), (700, 900)], None, []),
        ([], [(0, 9)], None, []),
        ([1, 2], [(0, 3), (3, 8)], 12, [(0, 1)]),  # a prompt cut at its start
    ],
)
def test_an_interval_is_cut_to_the_whole_tokens_inside_it(
    token_ids, intervals, num_chars, expected
) -> None:
    texts = TokenTexts([b"of ", b"foxes", b" and"], {})
    assert texts.token_intervals(token_ids, intervals, num_chars) == expected
