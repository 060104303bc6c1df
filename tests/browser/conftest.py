"""The browser that the pages are looked at in; without it these tests are skipped."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.browser.tree_tab import Serve, Tab, served
from tests.fake_engines import FakeEngine, node, tree_answer

CHROMIUM_OPTIONS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no chromium (Debian: apt install chromium)")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_OPTIONS)
        yield started
        started.close()


@pytest.fixture(params=["light", "dark"])
def blank(browser, request) -> Iterator[Any]:
    """An empty page in each color scheme. Whatever it logs, or asks the network for, is a fault."""
    context = browser.new_context(
        color_scheme=request.param, viewport={"width": 1100, "height": 800}
    )
    page = context.new_page()
    page.scheme = request.param
    page.problems = []
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.on("console", lambda message: page.problems.append(message.text))
    page.on("request", lambda asked: page.problems.append(asked.url))
    yield page
    assert [one for one in page.problems if not one.startswith(("data:", "about:"))] == []
    context.close()


@pytest.fixture
def serve(browser) -> Iterator[Serve]:
    """Serves these engines, and opens the page."""
    with ExitStack() as stack:

        def serve(*engines: FakeEngine, **options: Any) -> Tab:
            tab = stack.enter_context(served(browser, *engines, **options))
            tab.open()
            return tab

        yield serve


@pytest.fixture
def look_at(serve: Serve) -> Serve:
    """Serves an engine with these nodes, and opens the page."""
    return lambda *nodes, **fields: serve(FakeEngine(tree=tree_answer([*nodes], **fields)))


@pytest.fixture
def tab(look_at: Serve) -> Tab:
    """A tree of 1000 tokens: 600 that two others, of 300 and 100, go on from."""
    return look_at(
        node(None, 600, hits=12, num_pinned_blocks=10, num_locked_blocks=10),
        node(0, 300, num_locked_blocks=2, age_s=180),
        node(0, 100, wanted=True),
        num_nodes=3,
    )
