"""`stop_regex`: the same cut, however the text is split into pieces."""

from __future__ import annotations

import pytest

import sgl_vllm as sgl
from tests.unit.lang.conftest import seen_to_go

pytestmark = [pytest.mark.usefixtures("backend"), pytest.mark.timeout(20)]


@sgl.function
def ask(s, pattern):
    s += "x" + sgl.gen("answer", stop_regex=pattern)


@pytest.mark.parametrize("tokens_per_chunk", [1, 3, 100])
@pytest.mark.parametrize(
    ("pattern", "text", "cut"),
    [
        (r"\bEND\b", "say ENDING or END now", "say ENDING or "),
        (r"\n(?! )", "a:\n  b\n  c\nd", "a:\n  b\n  c"),
        (r"\bEND\b", "the END", "the "),
        (r"[.!]", "one. two", "one"),
        ("never", "one. two", "one. two"),
    ],
)
def test_the_text_is_cut_before_the_match(server, pattern, text, cut, tokens_per_chunk):
    server.reply = lambda prompt: text
    server.tokens_per_chunk = tokens_per_chunk
    assert ask.run(pattern)["answer"] == cut


def test_the_request_ends_with_the_match(server):
    server.reply = lambda prompt: "one. " + "more " * 2000
    server.chunk_s = 0.001
    assert ask.run(r"\.")["answer"] == "one"
    assert seen_to_go(server, 1) == 1


@pytest.mark.parametrize(
    "make", [lambda p: sgl.gen("a", stop_regex=p), lambda p: ask.run("x", stop_regex=p)]
)
def test_what_is_no_pattern_is_refused_at_once(server, make):
    with pytest.raises(ValueError, match=r"stop_regex '\[' is not a pattern"):
        make("[")
    assert server.calls == []


def test_a_stop_that_cannot_be_sent_is_refused_at_once(server):
    with pytest.raises(ValueError, match="half of a surrogate pair"):
        sgl.gen("a", stop="\ud83d")
