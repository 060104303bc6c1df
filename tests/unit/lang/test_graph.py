"""A graph as text, as a picture, and as a page."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

import sgl_vllm as sgl


@sgl.function
def shown(s, topic):
    s += f"<b>&{topic}</b>\x00"
    forks = s.fork(2)
    forks += sgl.gen("tip]]><script>")
    forks.join()
    s += s["tip]]><script>"][0]


def test_the_text_names_every_operation_and_where_it_reads():
    words = str(shown.trace())
    assert words.splitlines()[0] == "program shown(topic)"
    for part in ("fork(2) -> streams 1, 2", "<- streams 1, 2", "[tip]]><script> of 2]"):
        assert part in words
    assert "stream 2 (fork[1] of stream 0)" in words


def test_the_picture_has_a_block_for_each_operation_and_escapes_what_programs_say(tmp_path):
    svg = shown.trace().to_svg()
    root = ElementTree.fromstring(svg)
    assert "<script>" not in svg
    titles = [str(e.text) for e in root.iter() if e.tag.endswith("title")]
    assert titles[0].startswith("variable\nline 14\n<b>&{topic}</b>")
    assert [title.splitlines()[0] for title in titles[1:3]] == ["gen tip]]><script>"] * 2
    assert "reads tip]]><script> of 2" in titles[3]
    assert len(titles) == 4
    page = shown.trace().to_html(tmp_path / "graph.html")
    assert (tmp_path / "graph.html").read_text(encoding="utf-8") == page
    assert "<script>" not in page and "http" not in page.replace("http://www.w3.org/2000/svg", "")


def test_a_graph_of_very_many_branches_is_drawn_in_part():
    @sgl.function
    def program(s):
        forks = s.fork(500)
        forks += sgl.gen("a")

    svg = program.trace().to_svg()
    assert "and 436 more" in svg
    ElementTree.fromstring(svg)


def test_a_graph_that_stops_shows_why():
    @sgl.function
    def program(s, x):
        s += sgl.gen("a", stop=x)
        len(s["a"])

    with pytest.raises(sgl.TraceError) as stopped:
        program.trace()
    graph = stopped.value.graph
    assert "asks s[&#39;a&#39;] for its value" in graph.to_svg()
    assert "gen 'a' gen('a', stop=x)" in str(graph)
