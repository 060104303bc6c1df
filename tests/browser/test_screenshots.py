"""The screenshots in docs: `make screenshots` takes them, and without it they are compared.

Fonts differ between machines, so small copies are compared: a page that was changed differs more.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import sgl_vllm as sgl
from sgl_vllm.lang.backends.requests import GenRequest
from sgl_vllm.programs.states import ProgramGauges
from sgl_vllm.radix.stats import EvictionCounters, RadixCounters
from sgl_vllm.scheduler.stats import EngineStats
from tests.browser.tree_tab import served
from tests.fake_engines import FakeEngine, node, tokens_of, tree_answer
from tests.unit.lang.scripted import ScriptedBackend

if TYPE_CHECKING:
    from PIL.Image import Image
    from playwright.sync_api import Page

image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")

FOLDER = Path(sgl.__file__).parent.parent / "docs" / "screenshots"
IS_WANTED = "WRITE_SCREENSHOTS" in os.environ
NUM_COLORS = 128
MOST_DIFFERENCE = 6  # of 255, on average over the small copies

pytestmark = pytest.mark.nightly


def check(page: Page, name: str) -> None:
    """Compare the page with its screenshot, or take that."""
    file = FOLDER / f"{name}.png"
    shown = image.open(BytesIO(page.screenshot(full_page=True))).convert("RGB")
    if IS_WANTED:
        shown.quantize(NUM_COLORS).save(file, optimize=True)
    kept = image.open(file)
    assert kept.width == shown.width
    assert kept.height == pytest.approx(shown.height, rel=0.1)
    pairs = zip(small(kept), small(shown), strict=True)
    difference = sum(abs(a - b) for a, b in pairs) / len(small(kept))
    assert difference < MOST_DIFFERENCE, f"{name}.png is out of date: run `make screenshots`"


def small(picture: Image) -> bytes:
    return picture.convert("L").resize((60, 60)).tobytes()


# -- the tree page --------------------------------------------------------------------------------


def text(parent: int | None, num_tokens: int, words: str, **fields: Any) -> dict[str, Any]:
    return node(parent, num_tokens, tokens=tokens_of(words), **fields)


IN_USE = {"num_locked_blocks": 18, "age_s": 0.2}
NODES = [
    text(None, 1200, "You answer customers of a bookshop. These are its rules: returns are free",
         hits=420, num_pinned_blocks=75, num_locked_blocks=75),
    text(0, 700, "Customer: where is my order? Agent: let me look that up", hits=96, **IN_USE),
    text(1, 300, "Tool: order 1204 left Lyon on Monday", **IN_USE),
    text(1, 180, "Tool: no such order", hits=3, age_s=42),
    text(1, 100, "Tool: it was delivered", hits=1, age_s=300),
    text(0, 420, "Customer: I want to return a book", hits=14, age_s=95),
    text(5, 210, "Agent: that is free. Which one is it?", wanted=True, age_s=95),
    text(0, 80, "Customer: hello?", hits=2, age_s=900),
    text(None, 900, "Review the code below. Say what is wrong, and how sure you are of it",
         hits=31, age_s=12),
    text(8, 400, "def evict(self, num_blocks): heap = list(self.leaves)", **IN_USE),
    text(8, 240, "class Queue: def push(self, request)", hits=5, age_s=500),
    text(None, 160, "Translate into French: a hare", age_s=2000),
]  # fmt: skip


class Busy:
    """Statistics of a server whose load goes up and down, each time it is asked."""

    def __init__(self) -> None:
        self.radix, self.evictions = RadixCounters(), EvictionCounters()
        self.times_asked = itertools.count()

    def __call__(self) -> EngineStats:
        now = next(self.times_asked)
        requests = 4 + round(3 * math.sin(now / 7))
        self.radix.lookups += requests
        self.radix.prompt_tokens += 1500 * requests
        self.radix.hit_tokens += round(1500 * requests * (0.7 + 0.2 * math.sin(now / 11)))
        self.evictions.evicted_tokens += 4000 if now % 19 == 0 else 90 * requests
        programs = ProgramGauges(running=2 + requests // 3, in_tool=3, waiting_for_person=1)
        return EngineStats(radix=self.radix, evictions=self.evictions, programs=programs)


def test_the_tree_page(browser) -> None:
    with served(browser, FakeEngine(tree=tree_answer(NODES), stats=Busy())) as tab:
        tab.page.set_viewport_size({"width": 1200, "height": 800})
        tab.open()
        for number in range(1, 70):
            tab.await_samples(number)
            tab.refresh()
        tab.await_samples(70)
        tab.node(700).hover()
        check(tab.page, "tree")


# -- the view of a run ----------------------------------------------------------------------------


async def take_time(request: GenRequest) -> None:
    await asyncio.sleep(0.3 + 0.2 * (request.sampling.max_new_tokens or 0))


@sgl.function
def story(s):
    s += sgl.system("You write stories for children. Each has an animal and a moral.")
    s += sgl.user("Write one about a hare.")
    s.assistant_begin()
    s += sgl.gen("story", max_tokens=4) + " It ends" + sgl.select("mood", [" well.", " badly."])
    forks = s.fork(2)
    forks += [" Title:", " Moral:"]
    forks += sgl.gen("ending", max_tokens=1)
    forks.join()
    s += " The end," + sgl.tool("signed", lambda: " by Aesop")
    s.assistant_end()


ANSWERS = {"Title:": " The hare and the snail", "Moral:": " Be slow, and get there"}


def test_the_view_of_a_run(browser) -> None:
    backend = ScriptedBackend(
        lambda text: ANSWERS.get(text[-6:], "There was a hare that was late for everything."),
        before=take_time,
        cached_share=0.7,
    )
    page = browser.new_page(viewport={"width": 1000, "height": 600})
    page.set_content(sgl.to_page(story.run(backend=backend), "A story, and how it was made"))
    check(page, "run")
    page.close()
