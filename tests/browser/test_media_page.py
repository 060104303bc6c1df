"""A run with speech and a picture in a real browser, light and dark: from the official client and a
strict local service to what can be seen and played."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

import sgl_vllm as sgl
from tests.unit.lang.media_server import MediaService, serving, spoken

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

LOADED = """element => new Promise((resolve, reject) => {
    if (element.readyState >= 1) resolve(element.duration);
    element.onloadedmetadata = () => resolve(element.duration);
    element.onerror = () => reject(element.error.message);
})"""


@sgl.function
def storybook(s, question):
    s += sgl.user("A child asks: " + sgl.audio(question))
    s += sgl.assistant(sgl.speech("reply", voice="alloy"))
    s += sgl.picture("drawing", "A hare under a tree", size="96x64", model="painter")
    s += sgl.speech("narration", "Once upon a time", voice="alloy", model="speaker")
    s += sgl.user(
        "Grandfather said: " + sgl.transcribe("words", sgl.var("narration"), model="listener")
    )


@pytest.fixture(scope="module")
def state() -> Iterator[sgl.ProgramState]:
    with serving(MediaService(answer="It is a hare, because its ears are long.")) as service:
        backend = sgl.OpenAI("chatter", base_url=f"{service.url}/v1", max_retries=0)
        yield storybook.run(spoken("what is it"), backend=backend)


@pytest.fixture
def page(blank, state) -> Page:
    blank.set_content(sgl.to_page(state, "A storybook"))
    return blank


def test_audio_can_be_played_and_is_as_long_as_it_was_made(page) -> None:
    lengths = [element.evaluate(LOADED) for element in page.locator("audio.sgl-media").all()]
    assert lengths == pytest.approx([0.10, 0.40, 0.16, 0.16], abs=0.001)


def test_the_picture_is_seen_with_its_name(page) -> None:
    picture = page.locator("img.sgl-media")
    assert picture.evaluate("e => [e.naturalWidth, e.naturalHeight]") == [96, 64]
    assert picture.evaluate("e => e.parentElement.innerText") == "drawing"
