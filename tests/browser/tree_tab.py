"""A server whose engines are fake, and a browser tab that looks at its tree page."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount

from tests.fake_engines import FakeEngine, fake_server, tree_answer

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

REFRESH_MS = 3000


@dataclass
class Tab:
    """A server whose engines' answers a test may change, and a browser tab that looks at it."""

    engines: list[FakeEngine]
    url: str
    page: Page
    problems: list[str] = field(default_factory=list)
    """What went to the console as an error: at the end of a test, none."""

    def open(self) -> None:
        self.page.goto(f"{self.url}/sgl/tree")

    def refresh(self, *nodes: dict[str, Any]) -> None:
        """Lets the page ask again; the engine answers with these nodes, if any are given."""
        if nodes:
            self.engines[0].answers["tree"] = tree_answer([*nodes])
        with self.page.expect_response("**/v1/sgl/tree*"):
            self.page.clock.fast_forward(REFRESH_MS)

    def node(self, num_tokens: int) -> Locator:
        """The node of so many tokens, by what a screen reader says of it."""
        return self.page.locator(f'[data-kind="node"][aria-label*="Tokens {num_tokens:,},"]')

    def width(self, num_tokens: int) -> float:
        box = self.node(num_tokens).bounding_box()
        assert box is not None
        return box["width"]

    def has(self, selector: str, *texts: str) -> None:
        for text in texts:
            _expect(self.page.locator(selector)).to_contain_text(text)

    def await_samples(self, number: int) -> None:
        """Waits until the page has so many samples of the server's counters."""
        for _ in range(500):  # the page's policy forbids Playwright's own way to wait for this
            if self.page.evaluate("state.history.samples.length") >= number:
                return
            self.page.wait_for_timeout(10)
        pytest.fail("no sample came")

    def forgive(self, problem: str) -> None:
        """Problems with this text were to come."""
        self.problems[:] = [one for one in self.problems if problem not in one]

    def details(self, num_tokens: int, *texts: str) -> None:
        """Points at a node, and expects these texts in the details."""
        self.node(num_tokens).hover()
        self.has("#details", *texts)


@contextmanager
def served(browser, *engines, prefix="", **options) -> Iterator[Tab]:
    app: Starlette = fake_server(*engines, **options)
    if prefix:
        app = Starlette(routes=[Mount(prefix, app)])
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    # Without motion a size is final as soon as it is drawn.
    context = browser.new_context(reduced_motion="reduce", viewport={"width": 1300, "height": 900})
    page = context.new_page()
    page.clock.install()
    tab = Tab(list(engines), f"http://127.0.0.1:{port}{prefix}", page)
    page.on("pageerror", lambda error: tab.problems.append(str(error)))
    page.on(
        "console",
        lambda message: tab.problems.append(message.text) if message.type == "error" else None,
    )
    try:
        yield tab
        assert tab.problems == []
    finally:
        context.close()
        server.should_exit = True
        thread.join()


Serve = Callable[..., Tab]


def _expect(locator: Locator) -> Any:
    return pytest.importorskip("playwright.sync_api").expect(locator)
