"""Views of a program's state, during a run and after it: HTML, terminal, SVG."""

from __future__ import annotations

import asyncio
import functools
import io
import queue
import sys
import threading
import time
import types
from collections.abc import Callable, Mapping
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import sgl_vllm as sgl
from sgl_vllm.lang.backends.base import GenAnswer, GenRequest, Prompt, Usage, branch_name
from sgl_vllm.lang.backends.media_requests import MediaAnswer, MediaRequest
from sgl_vllm.lang.errors import ProgramError
from sgl_vllm.lang.ir import Show
from sgl_vllm.lang.media import Media
from sgl_vllm.lang.transcript import Timing
from sgl_vllm.lang.view import picture_of
from sgl_vllm.lang.views import live as view_live
from sgl_vllm.lang.views.html import ELIDE_FROM_CHARS, KEPT_CHARS, fragment_of
from sgl_vllm.lang.views.picture import Branch, Fork, Join, Picture, Piece, Slice, Turn
from sgl_vllm.lang.views.timings import MAX_BARS, duration
from sgl_vllm.pages import visible
from tests.unit.lang.scripted import ScriptedBackend

HOSTILE = '<script>alert(1)</script><img src=x onerror="alert(2)">\'"&\x00\x1b[31m\u202e'
PIXEL = "data:image/png;base64,iVBORw0KGgo="
VOID = {"img", "meta", "link"}


class Element:
    """A tag with its attributes, and all text inside it."""

    def __init__(self, tag: str, attributes: dict[str, str | None], inside: list[Element]) -> None:
        self.tag = tag
        self.inside = inside
        self.attributes = attributes
        self.classes = (attributes.get("class") or "").split()
        self.text = ""


class Parsed(HTMLParser):
    """All elements of a fragment. Fails if a tag is not closed properly."""

    def __init__(self, fragment: str) -> None:
        super().__init__()
        self.all: list[Element] = []
        self._open: list[Element] = []
        self.feed(fragment)
        self.close()
        assert not self._open, f"left open: {[e.tag for e in self._open]}"

    def handle_starttag(self, tag, attrs):
        element = Element(tag, dict(attrs), list(self._open))
        self.all.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_startendtag(self, tag, attrs):
        self.all.append(Element(tag, dict(attrs), list(self._open)))

    def handle_endtag(self, tag):
        assert self._open.pop().tag == tag

    def handle_data(self, data):
        for element in self._open:
            element.text += data

    def of_class(self, *classes: str) -> list[Element]:
        return [element for element in self.all if set(classes) <= set(element.classes)]

    def texts(self, *classes: str) -> list[str]:
        return [element.text for element in self.of_class(*classes)]


def slices(fragment: str, *classes: str) -> list[str]:
    """The texts of the prompt with these classes, without those of the legend."""
    return [
        element.text
        for element in Parsed(fragment).of_class("sgl-slice", *classes)
        if any("sgl-piece" in outer.classes for outer in element.inside)
    ]


def printed(state: object, *, width: int = 100) -> str:
    output = io.StringIO()
    Console(file=output, width=width, color_system=None).print(state)
    return output.getvalue()


def weather() -> str:
    return "sunny"


@sgl.function
def every_kind(s):
    s += "Mood:" + sgl.select("mood", [" happy", " sad"])
    s += " today " + sgl.tool("weather", weather)
    s += " again " + sgl.var("weather")
    s += " card " + sgl.gen("card")


@sgl.function
def two_endings(s):
    s += "Once upon a time" + sgl.gen("story")
    forks = s.fork(2)
    forks += [" Title:", " Moral:"]
    forks += sgl.gen("ending")
    forks.join()
    s += " The end" + sgl.gen("last")


def branches_of(picture: Picture) -> list[str]:
    return [branch.label for branch in picture.all_branches]


# --- kinds of text -------------------------------------------------------------------------------


def test_every_kind_of_text_has_a_class_and_a_visible_label() -> None:
    fragment = every_kind.run(
        backend=ScriptedBackend(lambda _: "Hare", cached_share=0)
    )._repr_html_()
    assert slices(fragment, "sgl-select-kind") in ([" happy"], [" sad"])
    assert slices(fragment, "sgl-tool-kind") == ["sunny"]
    assert slices(fragment, "sgl-variable-kind") == ["sunny"]
    assert slices(fragment, "sgl-gen-kind") == ["Hare"]
    parsed = Parsed(fragment)
    assert parsed.texts("sgl-name") == ["mood", "weather", "weather", "card"]
    legend = parsed.texts("sgl-legend")[0]
    for word in ("generated", "selected", "tool", "variable", "constant"):
        assert word in legend
    assert "forced" not in legend


def test_the_whole_text_is_there_in_its_order() -> None:
    state = every_kind.run(backend=ScriptedBackend())
    assert "".join(slices(state._repr_html_())) == state.text()


def test_forced_text_is_marked_inside_of_its_generation() -> None:
    backend = ScriptedBackend(
        lambda _: '{"name": "Hare"}', cached_share=0, forced=((0, 10), (14, 16))
    )

    @sgl.function
    def card(s):
        s += "A card: " + sgl.gen("card")

    state = card.run(backend=backend)
    fragment = state._repr_html_()
    assert slices(fragment, "sgl-gen-kind", "sgl-forced") == ['{"name": "', '"}']
    assert slices(fragment, "sgl-gen-kind") == ['{"name": "', "Hare", '"}']
    assert "forced" in Parsed(fragment).texts("sgl-legend")[0]
    assert '[gen card][forced]{"name": "[/forced]Hare[forced]"}[/forced][/gen]' in printed(state)


def test_the_share_of_the_prompt_found_cached_is_shaded() -> None:
    @sgl.function
    def once(s):
        s += "0123456789" + sgl.gen("x")

    fragment = once.run(backend=ScriptedBackend(cached_share=0.4))._repr_html_()
    assert slices(fragment, "sgl-cached") == ["0123"]
    assert "estimated" in Parsed(fragment).texts("sgl-legend")[0]


def test_a_later_request_shades_only_what_was_new_to_it() -> None:
    """The first gen computed the 10 characters before it, so they are not shaded, although the
    second gen found them and the generated text in the cache."""

    shares = iter([0.0, 0.75])

    async def before(request) -> None:
        backend.cached_share = next(shares)

    backend = ScriptedBackend(lambda _: "abcde", before=before)

    @sgl.function
    def twice(s):
        s += "0123456789" + sgl.gen("x") + "fghij" + sgl.gen("y")

    state = twice.run(backend=backend)
    assert slices(state._repr_html_(), "sgl-cached") == ["abcde"]


def test_the_text_before_a_fork_is_shaded_by_what_every_branch_found() -> None:
    @sgl.function
    def forked(s):
        s += "0123456789"
        forks = s.fork(2)
        forks += ["ab", "cd"]
        forks += sgl.gen("x")

    picture = picture_of(forked.run(backend=ScriptedBackend(cached_share=0.5)))
    (turn, fork) = picture.root.blocks
    assert isinstance(turn, Turn) and isinstance(fork, Fork)
    assert turn.pieces[0].slices == (Slice("012345", cached=True), Slice("6789"))


def test_a_variable_tells_its_tokens_and_finish_reason() -> None:
    @sgl.function
    def once(s):
        s += "0123456789" + sgl.gen("x")

    parsed = Parsed(once.run(backend=ScriptedBackend(lambda _: "abc"))._repr_html_())
    (label,) = parsed.of_class("sgl-name")
    told = label.attributes["title"]
    assert told is not None
    assert "finish: stop" in told
    assert "generated: 3 tokens" in told
    assert "prompt: 10 tokens, 5 cached" in told


class ExplainedBackend(ScriptedBackend):
    """Knows why the first two generations were not read from the cache, and forgets the others."""

    async def generate(self, request: GenRequest) -> GenAnswer:
        answer = await super().generate(request)
        return replace(answer, request_id=f"request {len(self.requests)}")

    async def missed_tokens(self, request_id: str) -> Mapping[str, int]:
        self.asked.append(request_id)
        known = {"request 1": {"new": 10}, "request 2": {"differs": 3, "new": 1204}}
        return known.get(request_id, {})


def test_why_adds_to_a_view_what_was_not_cached() -> None:
    @sgl.function
    def program(s):
        s += "0123456789" + sgl.gen("first") + sgl.gen()
        (branch,) = s.fork(1)
        branch += "and" + sgl.gen("third")

    backend = ExplainedBackend()
    state = program.run(backend=backend)
    before = Parsed(state._repr_html_()).of_class("sgl-name")
    assert all("computed" not in str(label.attributes["title"]) for label in before)
    assert sgl.why(state) == {"new": 10}  # the second has no name, the third is forgotten
    assert backend.asked[-2:] == ["request 1", "request 3"]
    labels = Parsed(state._repr_html_()).of_class("sgl-name")
    told = [str(label.attributes["title"]) for label in labels]
    assert ["computed: 10, never cached here" in title for title in told] == [True, False, False]
    sgl.why(state)
    assert len(backend.asked) == 5  # none of them again


def test_why_is_empty_without_a_server_that_knows() -> None:
    @sgl.function
    def program(s):
        s += sgl.gen("first")

    assert sgl.why(program.run(backend=ScriptedBackend())) == {}


def test_a_select_tells_its_scores() -> None:
    state = every_kind.run(backend=ScriptedBackend())
    piece = next(p for p in picture_of(state).root.pieces if p.kind == "select")
    assert any(fact.startswith("' happy': -") for fact in piece.facts)
    assert any(fact.startswith("' sad': -") for fact in piece.facts)


def test_roles_are_turns_with_a_label() -> None:
    @sgl.function
    def chat(s):
        s += sgl.system("Be brief.")
        s += sgl.user(sgl.image(PIXEL) + "What is it?")
        s += sgl.assistant(sgl.gen("answer"))

    state = chat.run(backend=ScriptedBackend(lambda _: "A hare."))
    parsed = Parsed(state._repr_html_())
    assert parsed.texts("sgl-role") == ["system", "user", "assistant"]
    (image,) = [element for element in parsed.all if element.tag == "img"]
    assert image.attributes["src"] == PIXEL
    lines = printed(state).splitlines()
    assert lines[0] == "system:"
    assert "assistant:" in lines
    assert "  [gen answer]A hare.[/gen]" in [line.rstrip() for line in lines]


def test_the_usage_line_counts_the_run() -> None:
    state = two_endings.run(backend=ScriptedBackend())
    facts = Parsed(state._repr_html_()).texts("sgl-facts")[0]
    assert f"{state.usage.calls} calls" in facts
    assert f"{state.usage.prompt_tokens:,} prompt tokens" in facts
    assert "forced" not in facts
    assert f"{state.usage.calls} calls" in printed(state)


def test_pictures_say_in_which_blocks_cached_tokens_are_counted() -> None:
    class Rounding(ScriptedBackend):
        def _usage(self, prompt: Prompt, completion_tokens: int) -> Usage:
            usage = super()._usage(prompt, completion_tokens)
            return replace(usage, cached_prompt_tokens=0, cached_block_size=128)

    state = two_endings.run(backend=Rounding())
    unit = "0 cached in whole blocks of 128 tokens"
    assert unit in Parsed(state._repr_html_()).texts("sgl-facts")[0]
    assert unit in " ".join(printed(state).split())
    assert any(unit in fact for piece in picture_of(state).root.pieces for fact in piece.facts)


def test_a_long_constant_has_its_middle_folded_and_loses_nothing() -> None:
    text = "".join(f"{number} " for number in range(ELIDE_FROM_CHARS))

    @sgl.function
    def long(s):
        s += text

    state = long.run(backend=ScriptedBackend())
    fragment = state._repr_html_()
    (fold,) = [e for e in Parsed(fragment).of_class("sgl-fold") if e.tag == "details"]
    assert f"{len(text) - 2 * KEPT_CHARS:,} characters" in fold.text
    assert "".join(slices(fragment)) == text
    terminal = printed(state)
    assert f"{len(text) - 2 * KEPT_CHARS:,} characters" in terminal.replace("\n", "")
    assert len(terminal) < len(text)


def test_only_the_ends_of_an_enormous_constant_are_on_the_page() -> None:
    @sgl.function
    def enormous(s):
        s += "x" * 1_000_000

    fragment = enormous.run(backend=ScriptedBackend())._repr_html_()
    assert len(fragment) < 100_000
    assert "more characters" in fragment


# --- hostile text --------------------------------------------------------------------------------


def test_nothing_that_a_program_or_a_model_writes_becomes_a_tag() -> None:
    @sgl.function
    def hostile(s):
        s += sgl.user(HOSTILE)
        s += sgl.assistant(sgl.gen(HOSTILE))
        s += sgl.user(sgl.select('"><script>', [HOSTILE, HOSTILE + "2"]))

    state = hostile.run(backend=ScriptedBackend(lambda _: HOSTILE), stream=True)
    state.error()  # the select's, because not every backend can begin a user turn with it
    for fragment in (state._repr_html_(), sgl.to_page(state, HOSTILE)):
        tags = {element.tag for element in Parsed(fragment).all}
        assert "script" not in tags
        assert "img" not in tags
        for element in Parsed(fragment).all:
            assert not any(name.startswith("on") for name in element.attributes)
    for shown in (sgl.to_page(state, HOSTILE), printed(state), sgl.fork_tree_svg(state)):
        assert not {"\x00", "\x1b", "\u202e"} & set(shown)


@pytest.mark.parametrize("url", ["data:text/html,<script>alert(1)</script>", 'http://x/"onerror=1'])
def test_an_image_url_cannot_leave_its_attribute_or_be_a_page(url: str) -> None:
    @sgl.function
    def look(s):
        s += sgl.user(sgl.image(url) + "?")

    parsed = Parsed(look.run(backend=ScriptedBackend())._repr_html_())
    images = [element for element in parsed.all if element.tag == "img"]
    assert [image.attributes["src"] for image in images] == ([url] if url[:4] == "http" else [])
    assert not any("onerror" in element.attributes for element in parsed.all)


@pytest.mark.parametrize("url", ["data:text/html,<script>alert(1)</script>", 'http://x/"onerror=1'])
def test_audio_at_a_url_cannot_leave_its_attribute_or_be_a_page(url: str) -> None:
    @sgl.function
    def listen(s):
        s += sgl.user("Listen: ")
        s.user_begin()
        s._stream.append(Show(Media("audio", url)))

    parsed = Parsed(listen.run(backend=ScriptedBackend())._repr_html_())
    players = [element for element in parsed.all if element.tag == "audio"]
    assert [p.attributes["src"] for p in players] == ([url] if url[:4] == "http" else [])
    assert not {"onerror", "script"} & {name for e in parsed.all for name in (*e.attributes, e.tag)}


def test_what_services_made_is_named_in_every_view() -> None:
    class Maker(ScriptedBackend):
        async def media(self, request: MediaRequest) -> MediaAnswer:
            return MediaAnswer("A hare.", sgl.Usage(7, 0, 9, 1), Media("image", PIXEL))

    @sgl.function
    def draw(s):
        s += "Here: " + sgl.picture("drawing") + sgl.transcribe("words", b"fLaC")

    state = draw.run(backend=Maker())
    parsed = Parsed(state._repr_html_())
    assert parsed.texts("sgl-name") == ["drawing", "words"]
    assert slices(state._repr_html_()) == ["Here: ", "A hare."]
    assert [e.attributes["src"] for e in parsed.all if e.tag == "img"] == [PIXEL, PIXEL]
    shown = f"[drawing: image({PIXEL})][words: image({PIXEL})]A hare."
    assert shown in printed(state, width=200)
    assert "drawing" in sgl.fork_tree_svg(state)


def test_a_request_for_a_picture_says_nothing_about_the_cache() -> None:
    """Its prompt tokens are the description's, not those of the text before it."""

    class Maker(ScriptedBackend):
        async def media(self, request: MediaRequest) -> MediaAnswer:
            return MediaAnswer("", sgl.Usage(50, 0, 1, 1), Media("image", PIXEL))

    @sgl.function
    def draw(s):
        s += "A hare." + sgl.picture("drawing") + sgl.gen("more")

    root = picture_of(draw.run(backend=Maker(cached_share=1.0))).root
    assert [
        part.cached for piece in root.pieces if piece.kind == "text" for part in piece.slices
    ] == [True]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.text(st.characters(codec="utf-8")), min_size=1, max_size=4))
def test_any_text_is_shown_character_for_character(texts: list[str]) -> None:
    @sgl.function
    def write(s):
        for text in texts:
            s += text

    state = write.run(backend=ScriptedBackend())
    fragment = state._repr_html_()
    fragment.encode()
    assert "".join(slices(fragment)) == visible("".join(texts))
    assert len(visible("".join(texts))) == len("".join(texts))
    ElementTree.fromstring(sgl.fork_tree_svg(state))


# --- forks ---------------------------------------------------------------------------------------


def test_branches_stand_where_they_were_forked_and_joins_after_them() -> None:
    picture = picture_of(two_endings.run(backend=ScriptedBackend()))
    first, fork, join, rest = picture.root.blocks
    assert isinstance(first, Turn) and isinstance(fork, Fork)
    assert isinstance(join, Join) and isinstance(rest, Turn)
    assert first.pieces[0].text == "Once upon a time"
    assert [branch.label for branch in fork.branches] == ["fork[0]", "fork[1]"]
    titles = [next(iter(branch.pieces)).text for branch in fork.branches]
    assert titles == [" Title:", " Moral:"]
    assert join == Join(("fork[0]", "fork[1]"), ("ending",), as_text=False)
    assert rest.pieces[0].text == " The end"


def test_branches_are_open_details_with_their_own_text_only() -> None:
    parsed = Parsed(two_endings.run(backend=ScriptedBackend())._repr_html_())
    branches = parsed.of_class("sgl-branch")
    assert [branch.tag for branch in branches] == ["details", "details"]
    assert all("open" in branch.attributes for branch in branches)
    assert "Title:" in branches[0].text
    assert "Once upon a time" not in branches[0].text


def test_two_forks_in_one_place_keep_their_joins_apart() -> None:
    @sgl.function
    def twice(s):
        s += "x"
        for name in ("a", "b"):
            forks = s.fork(2)
            forks += sgl.gen(name)
            forks.join()

    kinds = picture_of(twice.run(backend=ScriptedBackend())).root.blocks[1:]
    assert [type(block) for block in kinds] == [Fork, Join, Fork, Join]
    assert [block.names for block in kinds if isinstance(block, Join)] == [("a",), ("b",)]


def test_a_join_of_texts_says_so_and_the_texts_follow() -> None:
    @sgl.function
    def texts(s):
        s += "x"
        forks = s.fork(2)
        forks += [" one", " two"]
        forks.join("concate_and_append")

    state = texts.run(backend=ScriptedBackend())
    join, rest = picture_of(state).root.blocks[2:]
    assert isinstance(join, Join) and isinstance(rest, Turn)
    assert join.as_text
    assert [piece.text for piece in rest.pieces] == [" one", " two"]
    assert "join of 2 branches: their texts" in printed(state)


def test_discarded_branches_are_grey_and_folded() -> None:
    @sgl.function
    def race(s):
        s += "x"
        forks = s.fork(3)
        forks += sgl.gen("a")
        forks.first(lambda branch: True)

    state = race.run(backend=ScriptedBackend())
    branches = Parsed(state._repr_html_()).of_class("sgl-branch")
    statuses = [branch.attributes["data-status"] for branch in branches]
    assert statuses.count("discarded") == 2
    for branch in branches:
        is_discarded = branch.attributes["data-status"] == "discarded"
        assert ("open" in branch.attributes) == (not is_discarded)
    assert "✗" not in printed(state)


def test_a_turn_that_continues_in_a_branch_says_so() -> None:
    @sgl.function
    def chat(s):
        s += sgl.user("Hello")
        s.assistant_begin()
        s += "It is"
        forks = s.fork(2)
        forks += sgl.gen("x")
        forks.join()
        s += " so"
        s.assistant_end()

    parsed = Parsed(chat.run(backend=ScriptedBackend())._repr_html_())
    continued = "assistant (continued)"
    assert parsed.texts("sgl-role") == ["user", "assistant", continued, continued, continued]


def test_a_group_shows_its_branches() -> None:
    seen = []

    @sgl.function
    def forked(s):
        s += "before"
        forks = s.fork(2)
        forks += [" one", " two"]
        for fork in forks:
            fork.sync()
        seen.extend([forks._repr_html_(), printed(forks)])

    forked.run(backend=ScriptedBackend())
    fragment, terminal = seen
    assert [branch.text for branch in Parsed(fragment).of_class("sgl-branch")] != []
    assert slices(fragment) == [" one", " two"]
    assert "fork[1]" in terminal


def test_a_branch_shows_itself_only() -> None:
    seen = []

    @sgl.function
    def forked(s):
        s += "before"
        forks = s.fork(2)
        forks += [" one", " two"]
        forks[1].sync()
        seen.append(forks[1]._repr_html_())

    forked.run(backend=ScriptedBackend())
    assert slices(seen[0]) == [" two"]


def test_many_branches_are_counted_instead_of_drawn() -> None:
    @sgl.function
    def wide(s):
        s += "x"
        forks = s.fork(100)
        forks += lambda index: str(index)

    state = wide.run(backend=ScriptedBackend())
    fragment = state._repr_html_()
    assert len(Parsed(fragment).of_class("sgl-branch")) == 64
    assert "and 36 more branches" in fragment
    assert "and 36 more" in sgl.fork_tree_svg(state)


def test_forks_inside_of_forks_are_looked_into_as_far_as_they_can_be_drawn() -> None:
    @sgl.function
    def deep(s):
        for _ in range(300):
            s += "x"
            s = s.copy()

    state = deep.run(backend=ScriptedBackend())
    assert "260 branches below" in state._repr_html_()
    assert "260 branches below" in printed(state, width=600)
    ElementTree.fromstring(sgl.fork_tree_svg(state))


def test_the_lanes_are_well_formed_with_a_block_and_a_title_per_operation() -> None:
    state = two_endings.run(backend=ScriptedBackend())
    svg = ElementTree.fromstring(sgl.fork_tree_svg(state))
    namespace = "{http://www.w3.org/2000/svg}"
    labels = [e.text for e in svg.iter(f"{namespace}text") if e.get("class") == "lane-label"]
    assert labels == ["main", "fork[0]", "fork[1]"]
    boxes = [e.get("class") for e in svg.iter(f"{namespace}rect")]
    assert boxes.count("text") == 4
    assert boxes.count("gen") == boxes.count("gen-over") == 4
    titles = [e.text or "" for e in svg.iter(f"{namespace}title")]
    assert sum(title.startswith("gen ending") for title in titles) == 2
    assert all(0 < float(e.get("width") or 0) < 300 for e in svg.iter(f"{namespace}rect"))


# --- not only at the end -------------------------------------------------------------------------


def test_an_empty_program_can_be_looked_at() -> None:
    @sgl.function
    def nothing(s):
        pass

    state = nothing.run(backend=ScriptedBackend())
    assert "nothing written yet" in state._repr_html_()
    ElementTree.fromstring(sgl.fork_tree_svg(state))
    assert "0 calls" in printed(state)


def test_an_error_stands_where_it_happened() -> None:
    @sgl.function
    def failing(s):
        s += "before"
        forks = s.fork(2)
        forks[0] += " fine" + sgl.gen("a")
        forks[1] += " number " + sgl.gen("b", dtype=int)
        forks.join()
        s += " after"

    state = failing.run(backend=ScriptedBackend(lambda _: "word"), stream=True)
    error = state.error()
    assert error is not None
    parsed = Parsed(state._repr_html_())
    good, bad = parsed.of_class("sgl-branch")
    assert good.attributes["data-status"] == "done"
    assert bad.attributes["data-status"] == "failed"
    assert str(error) in bad.text
    assert parsed.texts("sgl-error") == [f"✗ {error}", "✗ stopped by the error of fork[1]"]
    assert " after" not in slices(state._repr_html_())
    terminal = printed(state, width=200)
    assert f"✗ {error}" in terminal


def test_what_the_function_itself_raises_is_shown() -> None:
    @sgl.function
    def broken(s):
        s += "before"
        s.sync()
        raise RuntimeError("no <luck>")

    state = broken.run(backend=ScriptedBackend(), stream=True)
    with pytest.raises(RuntimeError):
        state.sync()
    assert "RuntimeError: no <luck>" in Parsed(state._repr_html_()).texts("sgl-error")[0]
    assert "RuntimeError: no <luck>" in printed(state)


class Gate:
    """Holds a backend in the middle of an answer until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._open = threading.Event()

    async def __call__(self, request: object) -> None:
        self.reached.set()
        while not self._open.is_set():
            await asyncio.sleep(0.002)

    def open(self) -> None:
        self._open.set()


def test_a_running_program_is_shown_as_it_is_without_waiting() -> None:
    gate = Gate()
    branches: list[sgl.ProgramState] = []

    @sgl.function
    def asking(s):
        s += "Question?" + sgl.gen("answer")
        forks = s.fork(2)
        forks += sgl.gen("more")
        branches.extend(forks)

    state = asking.run(backend=ScriptedBackend(before=gate), stream=True)
    assert gate.reached.wait(10)
    try:
        parsed = Parsed(state._repr_html_())
        assert parsed.texts("sgl-heading")[0].startswith("askingrunning for ")
        assert "running: gen 'answer'" in parsed.texts("sgl-view")[0]
        statuses = [b.attributes["data-status"] for b in parsed.of_class("sgl-branch")]
        assert statuses in ([], ["waiting", "waiting"])
        assert "running" in printed(state)
        ElementTree.fromstring(sgl.fork_tree_svg(state))
    finally:
        gate.open()
    state.sync()
    for branch in branches:
        branch.sync()
    parsed = Parsed(state._repr_html_())
    assert parsed.texts("sgl-heading")[0].startswith("askingdone in ")
    names = [" ".join(text.split()) for text in parsed.texts("sgl-timed")]
    assert names == ["answer", "more fork[0]", "more fork[1]"]
    assert picture_of(state).elapsed_s == picture_of(state).elapsed_s, (
        "the time goes on after the end"
    )


def test_the_time_of_a_failed_run_is_that_of_its_failure() -> None:
    @sgl.function
    def failing(s):
        s += sgl.tool("pause", lambda: time.sleep(0.05)) + sgl.tool("broken", lambda: 1 / 0)

    state = failing.run(backend=ScriptedBackend(), stream=True)
    with pytest.raises(ProgramError):
        state.sync()
    assert Parsed(state._repr_html_()).texts("sgl-heading")[0].startswith("failingfailed after ")
    picture = picture_of(state)
    (pause,) = (piece.timing for piece in picture.root.pieces if piece.name == "pause")
    assert pause is not None and picture.elapsed_s is not None
    assert 0 <= pause.begin_s <= pause.end_s - 0.05 < pause.end_s <= picture.elapsed_s


def test_a_run_that_waited_for_nothing_has_no_times() -> None:
    @sgl.function
    def constant(s):
        s += "Once upon a time"

    parsed = Parsed(constant.run(backend=ScriptedBackend())._repr_html_())
    assert parsed.texts("sgl-heading") == ["constantdone"]
    assert not parsed.of_class("sgl-timings")


def test_many_timings_are_the_longest_in_their_order() -> None:
    pieces = tuple(
        Piece("gen", (), f"g{n}", timing=Timing(n, n + 1 + n % 7)) for n in range(MAX_BARS + 6)
    )
    root = Branch("", "done", (Turn(None, pieces),), 0)
    parsed = Parsed(fragment_of(Picture(root, Usage(), program="x.many", elapsed_s=80)))
    shown = [int(text.strip()[1:]) for text in parsed.texts("sgl-timed")]
    shortest = [n for n in range(MAX_BARS + 6) if n % 7 == 0][-6:]
    assert shown == [n for n in range(MAX_BARS + 6) if n not in shortest]
    assert "and 6 shorter ones" in parsed.texts("sgl-timings")[0]
    assert "manydone in 80.0 s" in parsed.texts("sgl-heading")


def test_a_request_of_a_branch_that_the_prompt_goes_on_as_is_shown_once() -> None:
    @sgl.function
    def best(s):
        forks = s.fork(2)
        forks += sgl.gen("draft")
        s += sgl.gen("rest")

    state = best.run(backend=ScriptedBackend())
    root = picture_of(state).root
    (fork,) = root.forks
    continued = Turn(None, tuple(fork.branches[1].pieces))
    picture = Picture(replace(root, blocks=(*root.blocks, continued)), Usage())
    texts = Parsed(fragment_of(picture)).texts("sgl-timed")
    names = sorted(" ".join(text.split()) for text in texts)
    assert names == ["draft fork[0]", "draft fork[1]", "rest"]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.0004, "0 ms"), (0.45, "450 ms"), (2.314, "2.31 s"), (75.25, "75.2 s"), (744, "12.4 min")],
)
def test_durations_are_in_a_unit_that_fits(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_what_has_come_of_a_generation_is_shown() -> None:
    halfway, on = threading.Event(), threading.Event()

    class Halting(ScriptedBackend):
        async def generate(self, request):
            assert request.watch is not None
            request.watch("half", 1)
            halfway.set()
            while not on.is_set():
                await asyncio.sleep(0.002)
            return await super().generate(request)

    @sgl.function
    def asking(s):
        s += sgl.user("Question?") + sgl.assistant(sgl.gen("answer"))

    state = asking.run(backend=Halting(lambda _: " done"), stream=True)
    assert halfway.wait(10)
    try:
        fragment = state._repr_html_()
        assert slices(fragment, "sgl-gen-kind") == ["half"]
        assert Parsed(fragment).texts("sgl-name") == ["answer …"]
        assert Parsed(fragment).texts("sgl-role") == ["user", "assistant"]
        assert "[gen answer …]half" in printed(state)
    finally:
        on.set()
    state.sync()
    assert "half" not in slices(state._repr_html_(), "sgl-gen-kind")


def test_every_moment_of_a_run_can_be_drawn() -> None:
    async def shortly(request) -> None:
        await asyncio.sleep(0.05)

    @sgl.function
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
        state = busy.run(backend=ScriptedBackend(before=shortly), stream=True)
        lengths = []
        while not view_live._has_ended(state._stream):
            picture = picture_of(state)
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
    root = picture_of(state).root
    assert sum(isinstance(block, Fork) for block in root.blocks) == 12
    assert "".join(piece.text for piece in root.pieces) == state.text()


# --- live ----------------------------------------------------------------------------------------


def followed(state: sgl.ProgramState) -> list[Picture]:
    drawn: list[Picture] = []
    view_live.follow(state._stream, drawn.append)
    return drawn


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.002)


def is_generating(picture: Picture, label: str) -> bool:
    return any(
        branch.label == label and branch.status == "running" and "gen" in (branch.busy or "")
        for branch in picture.all_branches
    )


def nothing_in(drawn: queue.Queue[Picture]) -> bool:
    """Whether no picture is drawn now, or in the next moment."""
    try:
        drawn.get(timeout=0.05)
    except queue.Empty:
        return True
    return False


class ManualClock:
    """A clock that stands still until it is advanced, or until it runs: then sleeping ends at
    once, at a later time."""

    def __init__(self) -> None:
        self.asleep = threading.Event()
        self._now_s = 0.0
        self._is_running = False
        self._changed = threading.Condition()

    def monotonic(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        with self._changed:
            end_s = self._now_s + seconds
            self.asleep.set()
            assert self._changed.wait_for(lambda: self._is_running or self._now_s >= end_s, 20)
            self.asleep.clear()
            self._now_s = max(self._now_s, end_s)

    def advance(self, seconds: float) -> None:
        with self._changed:
            self._now_s += seconds
            self._changed.notify_all()

    def run(self) -> None:
        with self._changed:
            self._is_running = True
            self._changed.notify_all()


def test_following_draws_all_branches_and_ends_with_the_end() -> None:
    drawn: list[Picture] = []

    async def once_drawn(request) -> None:
        label = branch_name.get()
        await until(lambda: any(is_generating(picture, label) for picture in list(drawn)))

    state = two_endings.run(backend=ScriptedBackend(before=once_drawn), stream=True)
    view_live.follow(state._stream, drawn.append)
    last = drawn[-1]
    assert last == picture_of(state)
    assert branches_of(last) == ["", "fork[0]", "fork[1]"]
    assert last.root.status == "done"
    for label in ("", "fork[0]", "fork[1]"):
        assert any(is_generating(picture, label) for picture in drawn[:-1])


def test_following_shows_new_text_of_one_branch_while_all_others_wait() -> None:
    shown: list[str] = []

    def is_shown(text: str) -> bool:
        return text in list(shown)

    class Halting(ScriptedBackend):
        async def generate(self, request):
            for piece, text in (("ha", "ha"), ("lf", "half")):
                request.watch(piece, None)
                await until(functools.partial(is_shown, text))
            return await super().generate(request)

    @sgl.function
    def forked(s):
        s += "x"
        forks = s.fork(1)
        forks += sgl.gen("a")
        forks.join()

    def draw(picture: Picture) -> None:
        shown.extend(piece.text for branch in picture.all_branches for piece in branch.pieces)

    state = forked.run(backend=Halting(), stream=True)
    view_live.follow(state._stream, draw)
    state.sync()
    assert {"ha", "half"} <= set(shown)


def test_following_draws_at_most_eight_times_a_second_and_not_while_nothing_happens() -> None:
    gate = Gate()

    class Chatty(ScriptedBackend):
        async def generate(self, request):
            for _ in range(300):
                request.watch("x", None)
                await asyncio.sleep(0)
            await gate(request)
            return await super().generate(request)

    @sgl.function
    def asking(s):
        s += "?" + sgl.gen("answer")

    state = asking.run(backend=Chatty(), stream=True)
    clock = ManualClock()
    drawn: queue.Queue[Picture] = queue.Queue()
    follow = functools.partial(view_live.follow, state._stream, drawn.put, clock)
    thread = threading.Thread(target=follow)
    thread.start()
    drawn.get(timeout=20)  # the first picture, at 0 s
    assert gate.reached.wait(20) and clock.asleep.wait(20)
    clock.advance(0.124)
    assert nothing_in(drawn)  # although 300 pieces of text have arrived
    clock.advance(0.001)
    assert drawn.get(timeout=20).root.num_chars == 1 + 300
    assert nothing_in(drawn)
    clock.advance(60)
    assert nothing_in(drawn)  # because no more text has arrived
    gate.open()
    clock.run()
    thread.join(20)
    assert drawn.get(timeout=20) is not None


def test_following_an_ended_run_draws_it_and_returns() -> None:
    state = two_endings.run(backend=ScriptedBackend())
    assert followed(state)[-1] == picture_of(state)


def test_following_a_failed_run_ends(capsys: pytest.CaptureFixture[str]) -> None:
    @sgl.function
    def failing(s):
        s += "?" + sgl.gen("number", dtype=int)
        raise RuntimeError("never mind")

    state = failing.run(backend=ScriptedBackend(lambda _: "word"), stream=True)
    sgl.live(state)
    assert "RuntimeError: never mind" in capsys.readouterr().out


@pytest.fixture
def capable_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """rich redraws nothing in a dumb terminal, such as a CI job may have."""
    monkeypatch.setenv("TERM", "xterm")


@pytest.mark.usefixtures("capable_terminal")
def test_live_in_a_terminal_redraws_in_place_and_leaves_the_end() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=80, height=50)

    async def once_drawn(request) -> None:
        await until(lambda: "running" in output.getvalue())

    state = two_endings.run(backend=ScriptedBackend(before=once_drawn), stream=True)
    sgl.live(state, console)
    written = output.getvalue()
    assert "running" in written
    assert "\x1b[2K" in written  # lines are overwritten
    assert "The end" in written.split("running")[-1]


@pytest.mark.usefixtures("capable_terminal")
def test_live_shows_the_last_lines_of_what_is_longer_than_the_terminal() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=80, height=10)
    while_running = ""

    async def once_drawn(request) -> None:
        nonlocal while_running
        await until(lambda: "line 99" in output.getvalue())
        while_running = output.getvalue()

    @sgl.function
    def long(s):
        s += "".join(f"line {number}\n" for number in range(100))
        s += sgl.gen("x")

    backend = ScriptedBackend(before=once_drawn, cached_share=0)
    state = long.run(backend=backend, stream=True)
    sgl.live(state, console)
    assert "line 99" in while_running
    assert "line 5\n" not in while_running
    at_the_end = output.getvalue()[len(while_running) :]
    assert "line 5\n" in at_the_end and "line 99" in at_the_end


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What a kernel's display would show: (how, HTML)."""
    shown: list[tuple[str, str]] = []

    class Handle:
        def update(self, drawn: str) -> None:
            shown.append(("update", drawn))

    def display(drawn: str, display_id: bool) -> Handle:
        shown.append(("display", drawn))
        return Handle()

    module = types.ModuleType("IPython")
    module.get_ipython = lambda: types.SimpleNamespace(kernel=object())  # type: ignore[attr-defined]
    displays = types.ModuleType("IPython.display")
    displays.HTML, displays.display = str, display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", module)
    monkeypatch.setitem(sys.modules, "IPython.display", displays)
    return shown


def test_live_in_a_notebook_updates_one_output(notebook: list[tuple[str, str]]) -> None:
    state = two_endings.run(backend=ScriptedBackend(), stream=True)
    sgl.live(state)
    assert [how for how, _ in notebook] == ["display"] + ["update"] * (len(notebook) - 1)
    assert notebook[-1][1] == state._repr_html_()


def test_live_leaves_ipython_alone_outside_of_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    sgl.live(every_kind.run(backend=ScriptedBackend()), Console(file=io.StringIO()))
    assert "IPython" not in sys.modules


def test_following_leaves_no_listener_behind() -> None:
    state = two_endings.run(backend=ScriptedBackend(), stream=True)
    followed(state)
    assert all(not stream._listeners for stream in state._stream.run.streams)


def test_live_on_the_languages_own_loop_is_refused() -> None:
    @sgl.function
    async def inside(s):
        s += "x"
        sgl.live(s)

    with pytest.raises(RuntimeError, match="event loop"):
        inside.run(backend=ScriptedBackend())


# --- in the terminal -----------------------------------------------------------------------------


def test_without_color_the_marks_are_words() -> None:
    state = every_kind.run(backend=ScriptedBackend(lambda _: "Hare", cached_share=0))
    line = printed(state, width=200).splitlines()[0]
    for part in ("[tool weather]sunny[/tool]", "[variable weather]sunny[/variable]"):
        assert part in line
    assert "[gen card]Hare[/gen]" in line


def test_show_prints_the_state(capsys: pytest.CaptureFixture[str]) -> None:
    sgl.show(two_endings.run(backend=ScriptedBackend()))
    printed_lines = capsys.readouterr().out.splitlines()
    assert any("fork[1]  done" in line for line in printed_lines)
    assert (
        "calls" in printed_lines[-1]
        or "cached" in printed_lines[-1]
        or "[cached]" in "".join(printed_lines[-3:])
    )


def test_brackets_of_a_prompt_are_no_markup_of_rich() -> None:
    @sgl.function
    def brackets(s):
        s += "[bold]not bold[/bold] [/nothing]"

    assert "[bold]not bold[/bold] [/nothing]" in printed(brackets.run(backend=ScriptedBackend()))


WhatToDraw = Callable[[sgl.ProgramState], str]


@pytest.mark.parametrize("draw", [sgl.to_html, sgl.fork_tree_svg, printed])
def test_a_thousand_operations_are_drawn_within_a_second(draw: WhatToDraw) -> None:
    @sgl.function
    def long(s):
        for number in range(1000):
            s += f" {number}" + sgl.gen(f"x{number}")

    state = long.run(backend=ScriptedBackend(lambda _: "y"))
    started_s = time.thread_time()
    draw(state)
    assert time.thread_time() - started_s < 3
