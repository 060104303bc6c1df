"""A graph as text, as a picture, as a page, and as plain data."""

from __future__ import annotations

import json
import threading
import xml.etree.ElementTree as ElementTree

import pytest

import sgl_vllm as sgl
from sgl_vllm.lang.tracing.nodes import Join


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


def test_the_picture_is_well_formed_and_escapes_what_programs_say():
    graph = shown.trace()
    svg = graph.to_svg()
    root = ElementTree.fromstring(svg)
    assert "<script>" not in svg and graph._repr_svg_() == svg
    boxes = [e for e in root.iter() if e.tag.endswith("rect") and e.get("rx")]
    assert len(boxes) == len(graph.nodes)
    curves = [e for e in root.iter() if e.get("class") == "edge"]
    reads = [len(n.reads) for n in graph.nodes if not isinstance(n.operation, Join)]
    assert len(curves) == sum(reads)
    places = [tuple(int(e.attrib[k]) for k in ("x", "y", "width", "height")) for e in boxes]
    width, height = int(root.attrib["width"]), int(root.attrib["height"])
    for i, (x, y, w, h) in enumerate(places):
        assert x + w <= width and y + h <= height
        for x2, y2, w2, h2 in places[i + 1 :]:
            assert x + w <= x2 or x2 + w2 <= x or y + h <= y2 or y2 + h2 <= y


def test_the_page_stands_alone_and_can_be_written(tmp_path):
    path = tmp_path / "graph.html"
    page = shown.trace().to_html(path)
    assert path.read_text(encoding="utf-8") == page
    assert "<script>" not in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")


def test_a_graph_of_very_many_branches_is_drawn_in_part():
    @sgl.function
    def program(s):
        forks = s.fork(500)
        forks += sgl.gen("a")

    svg = program.trace().to_svg()
    assert "and 461 more streams" in svg
    ElementTree.fromstring(svg)


def test_a_graph_is_described_as_plain_data():
    @sgl.function
    def program(s, topic):
        s += f"About {topic:>8}" + sgl.tool("found", len, sgl.var("x") if "x" in s else topic)
        return {"k": s["found"]}

    description = program.trace().as_dict()
    assert json.loads(json.dumps(description)) == description
    text, tool = (node["operation"] for node in description["nodes"])
    topic = {"type": "Leaf", "aspect": "argument", "name": "topic"}
    assert text["pieces"] == ["About ", {"operation": "format", "args": [topic, ">8"]}]
    assert tool["expr"]["args"] == ["found", {"function": "builtins.len"}, topic]
    assert description["returned"]["operation"] == "dict"

    @sgl.function
    def object_in_it(s):
        s += sgl.tool("found", len, threading.Lock())

    with pytest.raises(sgl.TraceError, match="allocate_lock may have side effects"):
        object_in_it.trace()
    with pytest.raises(ValueError, match="a _Opaque in a program has no form in JSON"):
        takes_any.trace(_Opaque()).as_dict()


class _Opaque:
    pass


@sgl.function
def takes_any(s, value):
    s += sgl.tool("found", len, value)
