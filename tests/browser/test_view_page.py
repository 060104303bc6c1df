"""The page of a program's run in a real browser, light and dark."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

import sgl_vllm as sgl
from sgl_vllm.lang.backends.requests import GenAnswer, GenRequest
from tests.unit.lang.scripted import ScriptedBackend

if TYPE_CHECKING:
    from playwright.sync_api import Page

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = sync_api.expect


HOSTILE = '<script>document.title = "taken"</script><img src=x onerror="document.title=1">'
PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAIAAAACCAIAAAD91JpzAAAAEElEQVR4nGP4z8AARAwQ"
    "CgAf7gP9i18U1AAAAABJRU5ErkJggg=="
)

# Contrast of an element's text with what is behind it: backgrounds are laid over each other,
# from the page's own up to the element's.
CONTRAST = """(elements) => elements.map((element) => {
    const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const path = [];
    for (let e = element; e; e = e.parentElement) path.unshift(e);
    for (const e of path) {
        canvas.fillStyle = getComputedStyle(e).backgroundColor;
        canvas.fillRect(0, 0, 1, 1);
    }
    const behind = [...canvas.getImageData(0, 0, 1, 1).data];
    canvas.fillStyle = getComputedStyle(element).color;
    canvas.fillRect(0, 0, 1, 1);
    const front = [...canvas.getImageData(0, 0, 1, 1).data];
    const luminance = (rgba) => {
        const [r, g, b] = rgba.map((value) =>
            value <= 10 ? value / 3294 : ((value / 255 + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const both = [luminance(front), luminance(behind)].sort((a, b) => b - a);
    return [(both[0] + 0.05) / (both[1] + 0.05), element.innerText.slice(0, 40)];
})"""


class Card(ScriptedBackend):
    """Answers with JSON whose field names are forced."""

    async def generate(self, request: GenRequest) -> GenAnswer:
        await asyncio.sleep(0.1)
        answer = await super().generate(request)
        if request.constraint is None:
            return answer
        forced = replace(answer.texts[0], text='{"name": "Hare"}', forced=((0, 10), (14, 16)))
        return replace(answer, texts=(forced,))


def count_letters() -> str:
    return "four"


@sgl.function
def everything(s):
    s += sgl.system("You are a careful writer of short texts. " * 3)
    s += sgl.user(sgl.image(PIXEL) + "What is this? " + HOSTILE)
    s.assistant_begin()
    s += "Mood:" + sgl.select("mood", [" happy", " sad"])
    s += " letters " + sgl.tool("letters", count_letters) + " again " + sgl.var("letters")
    s += " card " + sgl.gen("card", regex="x")
    forks = s.fork(2)
    forks += [" Title:", " Moral:"]
    forks += sgl.gen("ending")
    options = forks[0].fork(2)
    options += [" A", " B"]
    options += sgl.gen("option")
    options.first(lambda branch: True)
    forks[1] += sgl.gen("number", dtype=int)
    s += " and a long constant: " + "word " * 1000
    s.assistant_end()


@pytest.fixture(scope="module")
def page_text() -> str:
    """Of a run with everything in it: roles, media, every kind of text, forks, a failed branch."""
    state = everything.run(backend=Card(lambda _: " some words"), stream=True)
    state.sync()
    assert state._stream.run.check().exception(30) is not None  # that of fork[1]
    return sgl.to_page(state, "A run")


@pytest.fixture(params=["light", "dark"])
def page(browser, page_text, request) -> Iterator[Page]:
    context = browser.new_context(
        color_scheme=request.param, viewport={"width": 1000, "height": 800}
    )
    page = context.new_page()
    page.problems = []
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.on("console", lambda message: page.problems.append(message.text))
    page.on("request", lambda asked: page.problems.append(asked.url))
    page.set_content(page_text)
    page.problems[:] = [p for p in page.problems if not p.startswith(("data:", "about:"))]
    page.scheme = request.param
    yield page
    assert page.problems == []
    context.close()


def style(page, selector: str, name: str) -> str:
    return page.locator(selector).first.evaluate(f"e => getComputedStyle(e).{name}")


def test_the_page_is_as_light_or_dark_as_the_system(page) -> None:
    for selector in ("body", ".sgl-view"):
        channels = style(page, selector, "backgroundColor")[4:-1].split(",")
        is_dark = sum(map(int, channels)) < 3 * 128
        assert is_dark == (page.scheme == "dark")


def test_nothing_runs_and_nothing_is_loaded(page) -> None:
    assert page.title() == "A run"
    assert page.locator("script").count() == 0
    expect(page.locator(".sgl-text", has_text="<script>document.title")).to_be_visible()


def test_all_text_can_be_read(page) -> None:
    selectors = (".sgl-slice", ".sgl-name", ".sgl-role", ".sgl-note", ".sgl-error", ".sgl-facts li")
    for selector in selectors:
        contrasts = page.locator(f"{selector}:visible").evaluate_all(CONTRAST)
        assert contrasts, selector
        assert [shown for shown in contrasts if shown[0] < 4.5] == [], selector


def test_kinds_of_text_differ_in_more_than_colour(page) -> None:
    def looks(kind: str) -> tuple[str, ...]:
        selector = f".sgl-piece .sgl-{kind}-kind.sgl-slice"
        line = style(page, selector, "textDecorationLine")
        return (line, style(page, selector, "textDecorationStyle") if line != "none" else "")

    kinds = ["text", "gen", "select", "tool", "variable"]
    assert len({looks(kind) for kind in kinds}) == len(kinds)
    forced = ".sgl-piece .sgl-forced"
    assert style(page, forced, "fontStyle") == "italic"
    assert "gradient" in style(page, forced, "backgroundImage")
    assert style(page, ".sgl-piece .sgl-cached", "boxShadow") != "none"


def test_the_heading_and_the_timings_can_be_read(page) -> None:
    expect(page.get_by_role("heading", level=1)).to_have_text("A run")
    expect(page.get_by_role("heading", level=2)).to_have_text("everything")
    status = page.locator(".sgl-status")
    expect(status).to_have_text(re.compile(r"^done in [\d.]+ m?s, 1 branch failed$"))
    for selector in ("h1", "h2", ".sgl-status", ".sgl-timed", ".sgl-timed small", ".sgl-took"):
        contrasts = page.locator(selector).evaluate_all(CONTRAST)
        assert [shown for shown in contrasts if shown[0] < 4.5] == [], selector


def seconds(text: str) -> float:
    """The first time span in a text, of those under 100 seconds."""
    found = re.search(r"([\d.]+) (ms|s)\b", text)
    assert found is not None, text
    return float(found[1]) / (1000 if found[2] == "ms" else 1)


def test_a_bar_is_where_and_as_long_as_its_request_was(page) -> None:
    timings = page.get_by_role("list", name="timings")
    names = [" ".join(text.split()) for text in timings.locator(".sgl-timed").all_text_contents()]
    assert names[:3] == ["mood", "letters", "card"]
    assert sorted(names[3:5]) == ["ending fork[0]", "ending fork[1]"]
    bars = [bar.bounding_box() for bar in timings.locator(".sgl-bar").all()]
    card, first, second = bars[2:5]
    track = timings.locator(".sgl-track").first.bounding_box()
    whole_s = seconds(page.locator(".sgl-status").first.text_content())
    took_s = [seconds(text) for text in timings.locator(".sgl-took").all_text_contents()]
    assert took_s[2] >= 0.1  # the model's answers take as long
    for bar, one_s in zip(bars, took_s, strict=True):
        width = track["width"] * one_s / whole_s
        assert bar["width"] == pytest.approx(width, abs=0.02 * track["width"])
    assert first["x"] == pytest.approx(second["x"], abs=0.1 * track["width"])
    assert first["x"] >= card["x"] + 0.9 * card["width"]


def test_branches_are_beside_each_other_and_fold(page) -> None:
    outer = page.locator(".sgl-view > .sgl-fork > .sgl-branch")
    assert outer.count() == 2
    first, second = (box.bounding_box() for box in outer.all())
    assert abs(first["y"] - second["y"]) < 1
    assert second["x"] > first["x"] + first["width"] - 1
    title = page.get_by_text("Title:", exact=True)
    expect(title).to_be_visible()
    outer.first.locator("summary").first.click()
    expect(title).to_be_hidden()


def test_a_discarded_branch_opens_grey(page) -> None:
    branch = page.locator(".sgl-branch[data-status=discarded]")
    assert branch.get_attribute("open") is None
    branch.locator("summary").click()
    content = branch.locator(".sgl-turn").first
    expect(content).to_be_visible()
    assert float(content.evaluate("e => getComputedStyle(e).opacity")) < 1
    assert "line-through" in style(page, "[data-status=discarded] b", "textDecorationLine")


def test_the_failed_branch_says_why_in_its_place(page) -> None:
    error = page.locator(".sgl-branch[data-status=failed] .sgl-error")
    expect(error).to_contain_text("gen 'number' in fork[1] failed")


def test_the_folded_middle_of_a_long_text_opens(page) -> None:
    fold = page.locator("details.sgl-fold")
    before = page.locator(".sgl-view").bounding_box()["height"]
    fold.locator("summary").click()
    assert page.locator(".sgl-view").bounding_box()["height"] > before + 100


def test_the_image_is_a_thumbnail(page) -> None:
    image = page.locator("img.sgl-media")
    assert image.evaluate("e => e.complete && e.naturalWidth") == 2
    assert image.bounding_box()["width"] <= 182


def test_the_lanes_are_drawn_with_patterns(page) -> None:
    svg = page.locator("svg.sgl-lanes-picture")
    expect(svg).to_be_visible()
    fill = svg.locator("rect.gen-over").first.evaluate("e => getComputedStyle(e).fill")
    target = fill.split("#")[1].split('"')[0]
    assert page.locator(f"pattern[id='{target}']").count() == 1
    assert svg.locator(".cross title").first.text_content().startswith("gen 'number'")


def test_copied_text_is_the_prompt_without_labels(page) -> None:
    copied = page.locator(".sgl-turn .sgl-text").last.evaluate(
        """(element) => {
            getSelection().selectAllChildren(element);
            return getSelection().toString();
        }"""
    )
    assert "and a long constant: word word" in copied
    card = page.locator(".sgl-turn .sgl-text", has_text="letters").first.evaluate(
        """(element) => {
            getSelection().selectAllChildren(element);
            return getSelection().toString();
        }"""
    )
    assert 'letters four again four card {"name": "Hare"}' in card


def test_it_fits_a_narrow_window(page) -> None:
    page.set_viewport_size({"width": 360, "height": 700})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
