"""A graph as text, as a picture, as a page, and as plain data."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import sgl_vllm as sgl
from sgl_vllm.lang.tracing.nodes import TracedJoin


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


def test_the_picture_is_well_formed_and_escapes_what_programs_say(tmp_path):
    graph = shown.trace()
    svg = graph.to_svg()
    root = ElementTree.fromstring(svg)
    assert "<script>" not in svg
    boxes = [e for e in root.iter() if e.tag.endswith("rect") and e.get("rx")]
    assert len(boxes) == len(graph.nodes)
    curves = [e for e in root.iter() if e.get("class") == "edge"]
    reads = [len(n.reads) for n in graph.nodes if not isinstance(n.operation, TracedJoin)]
    assert len(curves) == sum(reads)
    places = [tuple(int(e.attrib[k]) for k in ("x", "y", "width", "height")) for e in boxes]
    width, height = int(root.attrib["width"]), int(root.attrib["height"])
    for i, (x, y, w, h) in enumerate(places):
        assert x + w <= width and y + h <= height
        for x2, y2, w2, h2 in places[i + 1 :]:
            assert x + w <= x2 or x2 + w2 <= x or y + h <= y2 or y2 + h2 <= y
    page = graph.to_html(tmp_path / "graph.html")
    assert (tmp_path / "graph.html").read_text(encoding="utf-8") == page
    assert "<script>" not in page and "http" not in page.replace("http://www.w3.org/2000/svg", "")


def test_a_graph_of_very_many_branches_is_drawn_in_part():
    @sgl.function
    def program(s):
        forks = s.fork(500)
        forks += sgl.gen("a")

    svg = program.trace().to_svg()
    assert "and 461 more streams" in svg
    ElementTree.fromstring(svg)
