"""Where the segments of a chat are in its rendered prompt."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_vllm.protocol.segments import marks_in, with_length
from tests.effort import examples

TEXTS = st.text("ab \n", max_size=8)


def rendered(contents: list[str], strips: bool) -> str:
    return "<s>" + "".join(
        f"<|{place}|>\n{content.strip() if strips else content}<|end|>\n"
        for place, content in enumerate(contents)
    )


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(TEXTS, max_size=4), st.booleans(), st.data())
def test_marks_show_the_same_text_without_what_the_template_strips(contents, strips, data) -> None:
    whole = "".join(contents)
    ends = data.draw(st.sets(st.integers(0, len(whole)), max_size=8).map(sorted))
    intervals = list(itertools.pairwise(ends))
    prompt = rendered(contents, strips)
    moved = marks_in(prompt, contents, intervals)
    places = [*zip(moved[::2], moved[1::2], strict=True)]
    assert places == sorted(places) and all(start < end for start, end in places)
    wanted, begin = [], 0
    for content in contents:
        shown = range(len(content) - len(content.lstrip()), len(content.rstrip()))
        for start, end in intervals:
            if begin <= start < begin + len(content):
                cut = content[max(start - begin, shown.start) : min(end - begin, shown.stop)]
                wanted += [cut] if cut else []
        begin += len(content)
    assert [prompt[start:end] for start, end in places] == wanted


@pytest.mark.parametrize(
    ("prompt", "contents", "expected"),
    [
        (None, ["abcd"], []),
        ("<|user|>abcd", ["abcd"], [9, 11]),
        ("<|user|>abcd", [None, [{"type": "text", "text": "xy"}], "abcd"], [9, 11]),
        ("<|user|>something else", ["abcd"], []),
        ("<|user|>yz", ["wabc", "yz"], []),
    ],
)
def test_what_is_not_in_the_prompt_has_no_marks(prompt, contents, expected) -> None:
    assert marks_in(prompt, contents, [(1, 3)]) == expected


def test_a_client_cannot_say_how_long_its_prompt_is() -> None:
    extra = {"sgl_prompt_chars": 7, "sgl_segments": [0, 2]}
    assert with_length(extra, "abc") == {"sgl_prompt_chars": 3, "sgl_segments": [0, 2]}
    assert with_length(extra, None) == {"sgl_segments": [0, 2]}
