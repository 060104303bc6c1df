"""The documentation site, built and in a real browser: search, phones, and no network. That its
links lead somewhere is checked by Sphinx, whose warnings are errors."""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sgl_vllm.version import __version__
from tools.site.__main__ import ROOT

if TYPE_CHECKING:
    from playwright.sync_api import Page

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytest.importorskip("sphinx", reason="sphinx is not installed")
expect = sync_api.expect

pytestmark = pytest.mark.slow

PAGES = ("docs/index.html", "docs/support.html", "docs/language.html")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The folder of this version, built by what `make site` runs."""
    output = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "tools.site", "--output", str(output)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert built.stderr == ""
    return output / __version__


@pytest.fixture(scope="module")
def address(site) -> Iterator[str]:
    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    handler = functools.partial(Handler, directory=str(site.parent))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(params=["light", "dark"])
def page(browser, address, request) -> Iterator[Page]:
    context = browser.new_context(
        color_scheme=request.param, viewport={"width": 1400, "height": 900}, base_url=address
    )
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on(
        "request",
        lambda asked: None if asked.url.startswith(address) else problems.append(asked.url),
    )
    page.on("response", lambda got: problems.append(got.url) if got.status >= 400 else None)
    page.scheme = request.param
    yield page
    assert [one for one in problems if not one.startswith((address, "data:"))] == []
    context.close()


@pytest.mark.parametrize("width", [360, 1400])
def test_pages_fit_the_window_and_are_as_light_or_dark_as_the_system(page, width) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    for name in PAGES:
        page.goto(f"{__version__}/{name}")
        expect(page.locator("h1")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        color = page.locator("body").evaluate("e => getComputedStyle(e).backgroundColor")
        assert (sum(map(int, color[4:-1].split(",")[:3])) < 3 * 128) == (page.scheme == "dark")


def test_search_finds_jump_forward(page) -> None:
    page.goto(f"{__version__}/search.html?q=jump-forward")
    found = page.locator("#search-results a", has_text="Jump-forward")
    found.first.click()
    expect(page.locator("h1")).to_contain_text("jump-forward")
