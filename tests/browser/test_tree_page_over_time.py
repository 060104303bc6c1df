"""The tree page in a real browser, over time: refreshes, keys, zoom, and servers of every kind."""

from __future__ import annotations

import pytest

from sgl_vllm.scheduler.stats import EngineStats
from tests.browser.tree_tab import REFRESH_MS, Serve, Tab
from tests.fake_engines import FakeEngine, node, tree_answer

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect

API_KEY = "a-key"


def test_a_refresh_shows_the_changed_tree_and_keeps_zoom_and_pointer(tab: Tab) -> None:
    tab.node(300).click()
    assert tab.width(300) == pytest.approx(tab.width(600))
    # One more request came in before it, another prefix was evicted, and time has passed.
    shared, used = node(None, 600, hits=14), node(1, 300, hits=1, age_s=0.1)
    tab.refresh(node(None, 50), shared, used, node(2, 40))
    expect(tab.node(40)).to_be_visible()
    expect(tab.node(100)).to_have_count(0)
    assert tab.width(300) == pytest.approx(tab.width(600))
    tab.has("#details", "Positions600 to 900", "Hits1")
    tab.refresh(node(None, 70))  # what was zoomed into is gone
    expect(tab.node(70)).to_be_visible()
    expect(tab.page.get_by_role("button", name="Zoom out")).to_be_hidden()


def test_the_keyboard_goes_everywhere(tab: Tab) -> None:
    tab.page.locator('[role="treeitem"][tabindex="0"]').focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
        tab.page.keyboard.press(key)
    expect(tab.node(100)).to_be_focused()
    tab.page.keyboard.press("Enter")
    assert tab.width(100) == pytest.approx(tab.width(600))
    expect(tab.node(100)).to_be_focused()
    tab.page.keyboard.press("Escape")
    expect(tab.node(600)).to_be_focused()
    assert tab.width(100) < tab.width(600)


def test_no_request_is_sent_from_a_paused_or_hidden_tab(tab: Tab) -> None:
    expect(tab.node(600)).to_be_visible()
    asked = tab.engines[0].asked
    hide = """(hidden) => {
        Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    tab.page.get_by_role("button", name="Pause").click()
    before = len(asked)
    tab.page.clock.fast_forward(5 * REFRESH_MS)
    assert len(asked) == before
    tab.page.get_by_role("button", name="Resume").click()
    tab.has("#status", "Live")
    tab.page.evaluate(hide, True)
    before = len(asked)
    tab.page.clock.fast_forward(5 * REFRESH_MS)
    assert len(asked) == before
    with tab.page.expect_response("**/v1/sgl/tree"):
        tab.page.evaluate(hide, False)


@pytest.mark.parametrize("width", [360, 800, 1900])
def test_a_window_of_any_width_needs_no_sideways_scrolling(tab: Tab, width: int) -> None:
    tab.page.set_viewport_size({"width": width, "height": 800})
    expect(tab.node(600)).to_be_visible()
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= width


# -- servers of every kind ------------------------------------------------------------------------


def test_a_server_with_an_api_key_is_asked_with_it_and_the_key_stays_in_the_tab(
    serve: Serve,
) -> None:
    engine = FakeEngine(tree=tree_answer([node(None, 600)]))
    tab = serve(engine, api_key=API_KEY)
    field = tab.page.get_by_label("API key")
    expect(field).to_have_attribute("type", "password")
    field.fill("wrong")
    field.press("Enter")
    expect(tab.page.get_by_text("The server refused this key.")).to_be_visible()
    assert engine.asked == []
    field.fill(API_KEY)
    tab.page.get_by_role("button", name="Show the tree").click()
    expect(tab.node(600)).to_be_visible()
    expect(field).to_be_hidden()
    tab.refresh()
    tab.page.reload()
    expect(tab.node(600)).to_be_visible()
    stores = "[Object.values(sessionStorage), localStorage.length, document.cookie]"
    assert tab.page.evaluate(stores) == [[API_KEY], 0, ""]
    tab.forgive("401 (Unauthorized)")


def test_a_tree_that_is_off_says_why(serve: Serve) -> None:
    tab = serve(FakeEngine(stats=EngineStats(parts={"radix": "by option"})))
    expect(tab.page.get_by_role("heading", name="The tree is off")).to_be_visible()
    tab.has("#notice-text", "by option")


def test_a_server_without_the_plugin_says_so(tab: Tab) -> None:
    tab.page.route("**/v1/sgl/tree", lambda route: route.fulfill(status=404))
    tab.open()
    expect(tab.page.get_by_role("heading", name="No prefix tree here")).to_be_visible()
    tab.has("#notice-text", "--plugin sgl_vllm")
    tab.page.unroute("**/v1/sgl/tree")
    tab.page.clock.fast_forward(2 * REFRESH_MS)
    expect(tab.node(600)).to_be_visible()
    tab.forgive("404 (Not Found)")


def test_a_server_that_is_gone_leaves_the_last_picture_and_may_come_back(tab: Tab) -> None:
    expect(tab.node(600)).to_be_visible()
    tab.page.route("**/v1/sgl/tree", lambda route: route.abort())
    tab.page.clock.fast_forward(REFRESH_MS)
    tab.has("#status", "No answer since")
    expect(tab.node(600)).to_be_visible()
    tab.page.unroute("**/v1/sgl/tree")
    tab.page.clock.fast_forward(2 * REFRESH_MS)
    tab.has("#status", "Live")
    tab.forgive("ERR_FAILED")


def test_fields_that_an_engine_does_not_tell_are_unknown(serve: Serve) -> None:
    bare = {"parent": None, "namespace": 0, "num_tokens": 70, "num_blocks": 5, "hits": 2}
    answer = {"num_tokens": 70, "num_blocks": 5, "num_nodes": 1, "nodes": [bare]}
    tab = serve(FakeEngine(tree=answer))
    expect(tab.node(70)).to_be_visible()
    tab.has("#space-total", "the size of the cache is not known")
    shown = tab.page.inner_text("body")
    assert "NaN" not in shown and "undefined" not in shown


def test_more_nodes_are_asked_for_when_some_are_left_out(serve: Serve) -> None:
    def tree(max_nodes: int = 1) -> dict:
        nodes = [node(None, 70), node(None, 80)][:max_nodes]
        return tree_answer(nodes, num_nodes=2, nodes_left_out=2 - len(nodes))

    tab = serve(FakeEngine(tree=tree))
    expect(tab.page.get_by_text("1 node further from the root is left out")).to_be_visible()
    tab.page.get_by_role("button", name="Show more").click()
    expect(tab.node(80)).to_be_visible()
    expect(tab.page.locator("#left-out")).to_be_hidden()


def test_behind_a_prefix_it_finds_its_data(serve: Serve) -> None:
    tab = serve(FakeEngine(tree=tree_answer([node(None, 600)])), prefix="/models/a")
    expect(tab.node(600)).to_be_visible()
    tab.page.goto(f"{tab.url}/v1/sgl/tree")
    assert tab.page.url == f"{tab.url}/sgl/tree"
