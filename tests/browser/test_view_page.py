"""The page of a program's run in a real browser, light and dark."""

from __future__ import annotations

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
    run = state._stream.run
    with pytest.raises(sgl.ProgramError):  # that of fork[1]
        run.background.run_blocking(run.all_ended)
    return sgl.to_page(state, "A run")


@pytest.fixture
def page(blank, page_text) -> Page:
    blank.set_content(page_text)
    return blank


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
