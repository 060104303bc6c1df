"""What views of a program's state show, during a run and after it: HTML, terminal, SVG."""

from __future__ import annotations

import asyncio
import io
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import sgl_vllm as sgl
from sgl_vllm.lang.backends.requests import GenAnswer, GenRequest, MediaAnswer, MediaRequest
from sgl_vllm.lang.ir import Show
from sgl_vllm.lang.media import Media
from sgl_vllm.lang.views.html import ELIDE_FROM_CHARS, KEPT_CHARS
from sgl_vllm.lang.views.picture import DrawnFork, DrawnJoin, DrawnTurn
from sgl_vllm.pages import visible
from tests.unit.lang.parsed_html import Parsed, slices
from tests.unit.lang.scripted import ScriptedBackend

HOSTILE = '<script>alert(1)</script><img src=x onerror="alert(2)">\'"&\x00\x1b[31m\u202e'
PIXEL = "data:image/png;base64,iVBORw0KGgo="


def printed(state: object, *, width: int = 100) -> str:
    output = io.StringIO()
    Console(file=output, width=width, color_system=None).print(state)
    return output.getvalue()


def ran(body: Callable[..., Any], backend: ScriptedBackend | None = None, **options: Any) -> Any:
    """The state of a program with this body."""
    return sgl.function(body).run(backend=backend or ScriptedBackend(), **options)


def writing(value: Any) -> Callable[..., None]:
    """A program's body that only appends this."""

    def body(s):
        s += value

    return body


def weather() -> str:
    return "sunny"


def every_kind(s):
    s += "Mood:" + sgl.select("mood", [" happy", " sad"])
    s += " today " + sgl.tool("weather", weather)
    s += " again " + sgl.var("weather")
    s += " card " + sgl.gen("card")


def two_endings(s):
    s += "Once upon a time" + sgl.gen("story")
    forks = s.fork(2)
    forks += [" Title:", " Moral:"]
    forks += sgl.gen("ending")
    forks.join()
    s += " The end" + sgl.gen("last")


# --- kinds of text -------------------------------------------------------------------------------


def test_every_kind_of_text_is_told_apart_and_nothing_is_lost() -> None:
    state = ran(every_kind, ScriptedBackend(lambda _: "Hare", cached_share=0))
    fragment = state._repr_html_()
    for kind, text in (("tool", "sunny"), ("variable", "sunny"), ("gen", "Hare")):
        assert slices(fragment, f"sgl-{kind}-kind") == [text]
        assert f"]{text}[/{kind}]" in printed(state, width=200)
    assert slices(fragment, "sgl-select-kind") in ([" happy"], [" sad"])
    assert "".join(slices(fragment)) == state.text()
    parsed = Parsed(fragment)
    assert parsed.texts("sgl-name") == ["mood", "weather", "weather", "card"]
    facts = {one.text: str(one.attributes["title"]) for one in parsed.of_class("sgl-name")}
    assert "finish: stop" in facts["card"] and "generated: 4 tokens" in facts["card"]
    assert " cached" in facts["card"] and "' happy': -" in facts["mood"]
    legend = parsed.texts("sgl-legend")[0]
    assert all(word in legend for word in ("generated", "selected", "tool", "constant"))
    assert "forced" not in legend


def test_forced_text_is_marked_inside_of_its_generation() -> None:
    backend = ScriptedBackend(
        lambda _: '{"name": "Hare"}', cached_share=0, forced=((0, 10), (14, 16))
    )
    state = ran(writing("A card: " + sgl.gen("card")), backend)
    fragment = state._repr_html_()
    assert slices(fragment, "sgl-gen-kind", "sgl-forced") == ['{"name": "', '"}']
    assert slices(fragment, "sgl-gen-kind") == ['{"name": "', "Hare", '"}']
    assert "forced" in Parsed(fragment).texts("sgl-legend")[0]
    assert '[gen card][forced]{"name": "[/forced]Hare[forced]"}[/forced][/gen]' in printed(state)


def test_the_share_of_the_prompt_found_cached_is_shaded_if_it_was_new_to_the_request() -> None:
    shares = iter([0.4, 0.75])

    async def before(request) -> None:
        backend.cached_share = next(shares)

    backend = ScriptedBackend(lambda _: "abcde", before=before)
    state = ran(writing("0123456789" + sgl.gen("x") + "fghij" + sgl.gen("y")), backend)
    fragment = state._repr_html_()
    # Of the 20 characters of the second prompt, the first request had computed 10.
    assert slices(fragment, "sgl-cached") == ["0123", "abcde"]
    assert "estimated" in Parsed(fragment).texts("sgl-legend")[0]


class ExplainedBackend(ScriptedBackend):
    """Knows why the first two generations were not read from the cache, and forgets the others."""

    async def generate(self, request: GenRequest) -> GenAnswer:
        answer = await super().generate(request)
        return replace(answer, request_id=f"request {len(self.requests)}")

    async def missed_tokens(self, request_id: str) -> Mapping[str, int]:
        self.asked.append(request_id)
        return {"request 1": {"new": 10}, "request 2": {"new": 1204}}.get(request_id, {})


def test_why_adds_to_a_view_what_was_not_cached() -> None:
    def program(s):
        s += "0123456789" + sgl.gen("first") + sgl.gen()
        (branch,) = s.fork(1)
        branch += "and" + sgl.gen("third")

    backend = ExplainedBackend()
    state = ran(program, backend)
    assert "computed" not in state._repr_html_()
    assert sgl.why(state) == {"new": 10}  # the second has no name, the third is forgotten
    assert backend.asked[-2:] == ["request 1", "request 3"]
    labels = Parsed(state._repr_html_()).of_class("sgl-name")
    told = ["computed: 10, never cached here" in str(one.attributes["title"]) for one in labels]
    assert told == [True, False, False]
    sgl.why(state)
    assert len(backend.asked) == 5  # none of them again
    assert sgl.why(ran(every_kind)) == {}


def test_a_long_constant_has_its_middle_folded_and_loses_nothing() -> None:
    text = "".join(f"{number} " for number in range(ELIDE_FROM_CHARS))
    state = ran(writing(text))
    fragment = state._repr_html_()
    (fold,) = [e for e in Parsed(fragment).of_class("sgl-fold") if e.tag == "details"]
    folded = f"{len(text) - 2 * KEPT_CHARS:,} characters"
    assert folded in fold.text and folded in printed(state).replace("\n", "")
    assert "".join(slices(fragment)) == text
    assert len(printed(state)) < len(text)
    enormous = ran(writing("x" * 1_000_000))._repr_html_()
    assert len(enormous) < 100_000 and "more characters" in enormous


# --- hostile text --------------------------------------------------------------------------------


def test_nothing_that_a_program_or_a_model_writes_becomes_a_tag() -> None:
    def hostile(s):
        s += sgl.user(HOSTILE)
        s += sgl.assistant(sgl.gen(HOSTILE))
        s += sgl.user(sgl.select('"><script>', [HOSTILE, HOSTILE + "2"]))

    state = ran(hostile, ScriptedBackend(lambda _: HOSTILE), stream=True)
    state.error()  # the select's, because not every backend can begin a user turn with it
    page = sgl.to_page(state, HOSTILE)
    for fragment in (state._repr_html_(), page, sgl.fork_tree_svg(state)):
        for element in Parsed(fragment).all:
            assert element.tag not in ("script", "img")
            assert not any(name.startswith("on") for name in element.attributes)
    for shown in (page, printed(state), sgl.fork_tree_svg(state)):
        assert not {"\x00", "\x1b", "\u202e"} & set(shown)


@pytest.mark.parametrize(("kind", "tag"), [("image", "img"), ("audio", "audio")])
@pytest.mark.parametrize("url", ["data:text/html,<script>alert(1)</script>", 'http://x/"onerror=1'])
def test_a_url_cannot_leave_its_attribute_or_be_a_page(url: str, kind: Any, tag: str) -> None:
    def look(s):
        s.user_begin()
        s._stream.append(Show(Media(kind, url)))

    parsed = Parsed(ran(look)._repr_html_())
    shown = [element.attributes["src"] for element in parsed.all if element.tag == tag]
    assert shown == ([url] if url[:4] == "http" else [])
    assert not {"onerror", "script"} & {name for e in parsed.all for name in (*e.attributes, e.tag)}


def test_what_services_made_is_named_in_every_view_and_is_not_in_the_cache() -> None:
    class Maker(ScriptedBackend):
        async def media(self, request: MediaRequest) -> MediaAnswer:
            return MediaAnswer("A hare.", sgl.Usage(50, 0, 9, 1), Media("image", PIXEL))

    def draw(s):
        s += "Here: " + sgl.picture("drawing") + sgl.transcribe("words", b"fLaC") + sgl.gen("more")

    state = ran(draw, Maker(lambda _: "end", cached_share=1.0))
    parsed = Parsed(state._repr_html_())
    assert parsed.texts("sgl-name") == ["drawing", "words", "more"]
    assert slices(state._repr_html_()) == ["Here: ", "A hare.", "end"]
    assert [e.attributes["src"] for e in parsed.all if e.tag == "img"] == [PIXEL, PIXEL]
    assert f"[drawing: image({PIXEL})][words: image({PIXEL})]" in printed(state, width=200)
    assert "drawing" in sgl.fork_tree_svg(state)
    # The picture's prompt tokens are the description's, not those of the text before it.
    assert "Here: " in slices(state._repr_html_(), "sgl-cached")


@settings(deadline=None, max_examples=60)
@given(st.lists(st.text(st.characters(codec="utf-8")), min_size=1, max_size=4))
def test_any_text_is_shown_character_for_character(texts: list[str]) -> None:
    def write(s):
        for text in texts:
            s += text

    state = ran(write)
    assert "[bold]a[/b]" in printed(ran(writing("[bold]a[/b]")))  # no markup
    fragment = state._repr_html_()
    fragment.encode()
    assert "".join(slices(fragment)) == visible("".join(texts))
    assert len(visible("".join(texts))) == len("".join(texts))
    ElementTree.fromstring(sgl.fork_tree_svg(state))


# --- forks ---------------------------------------------------------------------------------------


def test_branches_stand_where_they_were_forked_and_joins_after_them() -> None:
    state = ran(two_endings)
    first, fork, join, rest = state._picture().root.blocks
    assert isinstance(fork, DrawnFork)
    assert isinstance(first, DrawnTurn) and isinstance(rest, DrawnTurn)
    assert [branch.label for branch in fork.branches] == ["fork[0]", "fork[1]"]
    titles = [next(iter(branch.pieces)).text for branch in fork.branches]
    assert titles == [" Title:", " Moral:"]
    assert join == DrawnJoin(("fork[0]", "fork[1]"), ("ending",), as_text=False)
    assert rest.pieces[0].text == " The end"
    branches = Parsed(state._repr_html_()).of_class("sgl-branch")
    assert all("open" in branch.attributes for branch in branches)
    assert "Title:" in branches[0].text and "Once upon a time" not in branches[0].text
    assert "fork[1]  done" in printed(state)


def test_discarded_branches_are_folded() -> None:
    def race(s):
        s += "x"
        forks = s.fork(3)
        forks += sgl.gen("a")
        forks.first(lambda branch: True)

    state = ran(race)
    branches = Parsed(state._repr_html_()).of_class("sgl-branch")
    statuses = [branch.attributes["data-status"] for branch in branches]
    assert sorted(map(str, statuses)) == ["discarded", "discarded", "done"]
    assert ["open" in one.attributes for one in branches] == [one == "done" for one in statuses]
    assert "✗" not in printed(state)


def test_a_group_and_a_branch_show_themselves_only() -> None:
    seen = []

    def forked(s):
        s += "before"
        forks = s.fork(2)
        forks += [" one", " two"]
        for fork in forks:
            fork.sync()
        seen.extend([forks._repr_html_(), forks[1]._repr_html_(), printed(forks)])

    ran(forked)
    assert slices(seen[0]) == [" one", " two"] and slices(seen[1]) == [" two"]
    assert "fork[1]" in seen[2]


def test_many_or_deep_branches_are_counted_instead_of_drawn() -> None:
    def wide(s):
        s += "x"
        forks = s.fork(100)
        forks += lambda index: str(index)

    def deep(s):
        for _ in range(300):
            s += "x"
            s = s.copy()

    state = ran(wide)
    assert len(Parsed(state._repr_html_()).of_class("sgl-branch")) == 64
    assert "and 36 more branches" in state._repr_html_()
    assert "and 36 more" in sgl.fork_tree_svg(state)
    state = ran(deep)
    for shown in (state._repr_html_(), printed(state, width=600)):
        assert "260 branches below" in shown
    ElementTree.fromstring(sgl.fork_tree_svg(state))


def test_the_lanes_have_a_block_and_a_title_per_operation() -> None:
    svg = ElementTree.fromstring(sgl.fork_tree_svg(ran(two_endings)))
    namespace = "{http://www.w3.org/2000/svg}"
    labels = [e.text for e in svg.iter(f"{namespace}text") if e.get("class") == "lane-label"]
    assert labels == ["main", "fork[0]", "fork[1]"]
    boxes = [e.get("class") for e in svg.iter(f"{namespace}rect")]
    assert boxes.count("text") == boxes.count("gen") == boxes.count("gen-over") == 4
    titles = [e.text or "" for e in svg.iter(f"{namespace}title")]
    assert sum(title.startswith("gen ending") for title in titles) == 2
    assert all(0 < float(e.get("width") or 0) < 300 for e in svg.iter(f"{namespace}rect"))


# --- not only at the end -------------------------------------------------------------------------


def test_an_error_stands_where_it_happened() -> None:
    def failing(s):
        forks = s.fork(2)
        forks[0] += " fine" + sgl.gen("a")
        forks[1] += " number " + sgl.gen("b", dtype=int)
        forks.join()
        s += " after"

    def broken(s):
        raise RuntimeError("no <luck>")

    state = ran(broken, stream=True)
    state.error()
    assert "RuntimeError: no <luck>" in Parsed(state._repr_html_()).texts("sgl-error")[0]
    assert "RuntimeError: no <luck>" in printed(state)
    assert "nothing written yet" in state._repr_html_() and "0 calls" in printed(state)
    ElementTree.fromstring(sgl.fork_tree_svg(state))

    state = ran(failing, ScriptedBackend(lambda _: "word"), stream=True)
    error = state.error()
    parsed = Parsed(state._repr_html_())
    good, bad = parsed.of_class("sgl-branch")
    assert [good.attributes["data-status"], bad.attributes["data-status"]] == ["done", "failed"]
    assert str(error) in bad.text
    assert parsed.texts("sgl-error") == [f"✗ {error}", "✗ stopped by the error of fork[1]"]
    assert " after" not in slices(state._repr_html_())
    assert f"✗ {error}" in printed(state, width=200)


@pytest.mark.parametrize("draw", [sgl.to_html, sgl.fork_tree_svg, printed])
def test_a_thousand_operations_are_drawn_within_a_second(draw: Callable[..., str]) -> None:
    def long(s):
        for number in range(1000):
            s += f" {number}" + sgl.gen(f"x{number}")

    state = ran(long, ScriptedBackend(lambda _: "y"))
    started_s = time.thread_time()
    draw(state)
    assert time.thread_time() - started_s < 3


# --- during a run --------------------------------------------------------------------------------


def test_a_running_program_is_shown_with_what_has_come() -> None:
    halfway, on = threading.Event(), threading.Event()

    class Halting(ScriptedBackend):
        async def generate(self, request):
            request.watch("half", 1)
            halfway.set()
            while not on.is_set():
                await asyncio.sleep(0.002)
            return await super().generate(request)

    state = ran(
        writing(sgl.user("Question?") + sgl.assistant(sgl.gen("answer"))),
        Halting(lambda _: " done"),
        stream=True,
    )
    assert halfway.wait(10)
    try:
        fragment = state._repr_html_()
        parsed = Parsed(fragment)
        assert "running" in parsed.texts("sgl-heading")[0]
        assert "running: gen 'answer'" in parsed.texts("sgl-view")[0]
        assert slices(fragment, "sgl-gen-kind") == ["half"]
        assert parsed.texts("sgl-name") == ["answer …"]
        assert "[gen answer …]half" in printed(state)
        ElementTree.fromstring(sgl.fork_tree_svg(state))
    finally:
        on.set()
    state.sync()
    assert "half" not in slices(state._repr_html_(), "sgl-gen-kind")
    assert "done" in Parsed(state._repr_html_()).texts("sgl-heading")[0]


def test_every_moment_of_a_run_can_be_drawn() -> None:
    async def shortly(request) -> None:
        await asyncio.sleep(0.05)

    def busy(s):
        for number in range(12):
            s += f" {number}" + sgl.gen(f"x{number}")
            forks = s.fork(3)
            forks += sgl.gen("a") + sgl.tool(f"t{number}", weather) + sgl.select("b", ["c", "d"])
            forks[0].fork(2).__iadd__(sgl.gen("e"))
            if number % 3 == 0:
                forks.first(lambda branch: True)
            forks.join("gather_variable" if number % 2 else "concate_and_append")

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        state = ran(busy, ScriptedBackend(before=shortly), stream=True)
        lengths = []
        while (picture := state._picture()).status == "running":
            lengths.append(sum(b.num_chars for b in picture.all_branches if b.label == ""))
            if len(lengths) % 10 == 1:
                Parsed(state._repr_html_())
                ElementTree.fromstring(sgl.fork_tree_svg(state))
                printed(state)
        state.sync()
    finally:
        sys.setswitchinterval(interval_s)
    assert len(set(lengths)) > 10
    assert lengths == sorted(lengths)
    root = state._picture().root
    assert sum(isinstance(block, DrawnFork) for block in root.blocks) == 12
    assert "".join(piece.text for piece in root.pieces) == state.text()
