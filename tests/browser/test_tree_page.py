"""The tree page in a real browser, over routes whose engine is fake."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount

from sgl_vllm.radix.programs import ProgramGauges
from sgl_vllm.radix.stats import EvictionCounters, RadixCounters
from sgl_vllm.scheduler.stats import EngineStats
from tests.fake_engines import FakeEngine, fake_server, keeps, node, tokens_of, tree_answer

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = sync_api.expect

API_KEY = "a-key"
REFRESH_MS = 3000


CONTRAST = """(element) => {
    const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const luminance = (colour) => {
        canvas.fillStyle = colour;
        canvas.fillRect(0, 0, 1, 1);
        const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map((value) =>
            value <= 10 ? value / 3294 : ((value / 255 + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const style = getComputedStyle(element);
    const both = [luminance(style.color), luminance(style.backgroundColor)].sort((a, b) => b - a);
    return (both[0] + 0.05) / (both[1] + 0.05);
}"""


@dataclass
class Served:
    """A server whose engines' answers a test may change, and a browser tab to look at it."""

    engines: list[FakeEngine]
    url: str
    page: Page
    problems: list[str] = field(default_factory=list)

    def open(self) -> None:
        self.page.goto(f"{self.url}/sgl/tree")

    def refresh(self) -> None:
        with self.page.expect_response("**/v1/sgl/tree*"):
            self.page.clock.fast_forward(REFRESH_MS)

    def node(self, num_tokens: int) -> Locator:
        """The node of so many tokens, by what a screen reader says of it."""
        return self.page.locator(f'[data-kind="node"][aria-label*="Tokens {num_tokens:,},"]')

    def width(self, num_tokens: int) -> float:
        box = self.node(num_tokens).bounding_box()
        assert box is not None
        return box["width"]


@contextlib.contextmanager
def served(browser, *engines, prefix="", **options) -> Iterator[Served]:
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
    tab = Served(list(engines), f"http://127.0.0.1:{port}{prefix}", page)
    page.on("pageerror", lambda error: tab.problems.append(str(error)))
    page.on(
        "console",
        lambda message: tab.problems.append(message.text) if message.type == "error" else None,
    )
    try:
        yield tab
    finally:
        context.close()
        server.should_exit = True
        thread.join()


@pytest.fixture
def tab(browser) -> Iterator[Served]:
    """A tree of 1000 tokens: 600 that two others, of 300 and 100, go on from."""
    nodes = [
        node(None, 600, hits=12, num_pinned_blocks=10, num_locked_blocks=10),
        node(0, 300, num_locked_blocks=2, age_s=180),
        node(0, 100, wanted=True),
    ]
    with served(browser, FakeEngine(tree=tree_answer(nodes, num_nodes=3))) as tab:
        yield tab
        assert tab.problems == []


def test_nodes_are_as_wide_as_their_share_of_the_tokens(tab):
    tab.open()
    expect(tab.page.get_by_role("treeitem")).to_have_count(4)  # with the one for all
    whole = tab.width(600)
    assert tab.width(300) == pytest.approx(0.3 * whole, abs=3)
    assert tab.width(100) == pytest.approx(0.1 * whole, abs=3)
    assert tab.node(300).bounding_box()["y"] > tab.node(600).bounding_box()["y"]


def test_use_is_told_apart(tab):
    tab.open()
    for num_tokens, use in ((600, "pinned"), (300, "used"), (100, "evictable")):
        expect(tab.node(num_tokens)).to_have_attribute("data-use", use)
    expect(tab.page.locator("[data-wanted]")).to_have_count(1)
    facts = tab.page.locator("#space-facts")
    for text in ("in use2 (", "pinned10 (", "evictable49 (", "free100 ("):
        expect(facts).to_contain_text(text)


def test_pointing_at_a_node_says_everything_about_it(tab):
    tab.open()
    tab.node(300).hover()
    details = tab.page.get_by_label("The prefix under the pointer")
    for text in ("Positions600 to 900", "Last used3 min ago", "Locked blocks2", "Usein use"):
        expect(details).to_contain_text(text)


# -- programs -------------------------------------------------------------------------------------

STATES = {"running": 2, "in_tool": 3, "waiting_for_person": 1, "unknown": 0, "ended": 4}


def test_programs_are_counted_and_a_context_says_what_its_program_is_doing(browser):
    tools = [{"name": "<b>bash</b>", "num_contexts": 3, "longest_s": 184.0}]
    programs = {**STATES, "longest_in_tool_s": 184.0, "tools": tools}
    context = {"state": "in_tool", "paused_s": 14.2, "tool": "<b>bash</b>"}
    nodes = [node(None, 600), node(0, 300, context=context), node(0, 100)]
    engine = FakeEngine(tree=tree_answer(nodes, programs=programs))
    with served(browser, engine) as tab:
        tab.open()
        panel = tab.page.get_by_role("region", name="Programs")
        facts = panel.locator(".facts li")
        expect(facts).to_have_text(
            ["running2", "in a tool3", "waiting for a person1", "unknown0", "ended4"]
        )
        expect(panel).to_contain_text("In tools: <b>bash</b> 3 (up to 3 min)")
        tab.node(300).hover()
        details = tab.page.get_by_label("The prefix under the pointer")
        expect(details).to_contain_text("Its programin a tool (<b>bash</b>), 14 s")
        tab.node(100).hover()
        expect(details).not_to_contain_text("Its program")
        # The tool has returned.
        programs |= {"running": 5, "in_tool": 0, "longest_in_tool_s": None, "tools": []}
        tab.refresh()
        expect(facts.nth(0)).to_have_text("running5")
        expect(panel).not_to_contain_text("In tools")
        assert tab.problems == []


def test_states_that_the_server_infers_are_explained_where_there_are_some(browser):
    programs = {**STATES, "waiting_for_person": 0, "unknown": 221}
    engine = FakeEngine(tree=tree_answer([node(None, 600)], programs=programs))
    with served(browser, engine) as tab:
        tab.open()
        panel = tab.page.get_by_role("region", name="Programs")
        expect(panel).to_contain_text("unknown221")
        unknown, waiting = panel.get_by_text("Unknown:"), panel.get_by_text("Waiting for a person:")
        expect(unknown).to_contain_text("one request so far")
        expect(unknown).to_contain_text("sgl_ends")
        expect(unknown).to_be_visible()
        expect(waiting).to_be_hidden()
        programs |= {"waiting_for_person": 7, "unknown": 0}
        tab.refresh()
        expect(waiting).to_be_visible()
        expect(waiting).to_contain_text("a program that has finished")
        expect(unknown).to_be_hidden()
        assert tab.problems == []


def test_a_server_that_does_not_know_programs_shows_no_panel(tab):
    tab.open()
    expect(tab.node(600)).to_be_visible()
    expect(tab.page.locator("#programs")).to_be_hidden()


# -- what windows and recurrent layers keep -------------------------------------------------------


def shares(strip: Locator, kind: str) -> list[tuple[float, float]]:
    """Where marks of a kind begin and end, as shares of their strip's width."""
    whole = strip.bounding_box()
    assert whole is not None
    boxes = [mark.bounding_box() for mark in strip.locator(f".{kind}").all()]
    return [
        (
            (box["x"] - whole["x"]) / whole["width"],
            (box["x"] + box["width"] - whole["x"]) / whole["width"],
        )
        for box in boxes
        if box is not None
    ]


def test_strips_show_what_windows_keep_and_where_hits_may_end(browser):
    nodes = [
        node(None, **keeps(1000, [[0, 200], [600, 1000]], hit_ends=[[1, 200], [901, 1000]])),
        node(0, **keeps(500, [[0, 500]], hit_ends=[[1, 500]])),
    ]
    with served(browser, FakeEngine(tree=tree_answer(nodes))) as tab:
        tab.open()
        windows, ends = (tab.node(1000).locator(f".strip.{kind}") for kind in ("windows", "ends"))
        exactly = pytest.approx
        assert shares(windows, "kept") == [
            exactly((0, 0.2), abs=0.005),
            exactly((0.6, 1), abs=0.005),
        ]
        assert shares(windows, "hole") == [exactly((0.2, 0.6), abs=0.005)]
        assert shares(ends, "end") == [exactly((0, 0.2), abs=0.005), exactly((0.9, 1), abs=0.005)]
        assert shares(tab.node(500).locator(".strip.windows"), "kept") == [
            exactly((0, 1), abs=0.005)
        ]
        expect(windows.locator(".hole")).to_have_attribute("title", "Hole: tokens 200 to 600")
        expect(tab.node(500).locator(".kept")).to_have_attribute(
            "title", "Kept by all windows: tokens 1,000 to 1,500"
        )
        expect(tab.page.locator("#legend")).to_contain_text("a hit may end here")
        tab.node(1000).hover()
        details = tab.page.get_by_label("The prefix under the pointer")
        expect(details).to_contain_text("Kept by windows0 to 200, 600 to 1,000")
        expect(details).to_contain_text("A hit may endat 1 to 200, 901 to 1,000")
        assert tab.problems == []


def test_ticks_show_states_and_which_of_them_a_hit_may_end_at(browser):
    nodes = [
        node(None, **keeps(1000, [[600, 1000]], states=[250, 750, 1000], hit_ends=[[1000, 1000]])),
    ]
    with served(browser, FakeEngine(tree=tree_answer(nodes))) as tab:
        tab.open()
        states = tab.node(1000).locator(".strip.states")
        ticks = [end for _, end in shares(states, "tick")]
        assert ticks == pytest.approx([0.25, 0.75, 1], abs=0.005)
        expect(states.locator(".useless")).to_have_count(2)
        expect(states.locator(".tick").last).to_have_attribute(
            "title", "State after 1,000 tokens: a hit may end here"
        )
        legend = tab.page.locator("#legend")
        expect(legend).to_contain_text("state: a hit may end here")
        expect(legend).to_contain_text("state whose window has a hole")
        spoken = tab.page.get_by_role("treeitem", name="States at 250, 750, 1,000")
        expect(spoken).to_have_attribute("aria-label", re.compile("A hit may end at 1,000"))
        assert tab.problems == []


def test_ranges_that_are_not_listed_are_neither_kept_nor_holes(browser):
    fields = keeps(1000, [[800, 1000]], hit_ends=[[900, 1000]])
    fields["windows"]["left_out"] = fields["hit_ends"]["left_out"] = 7
    with served(browser, FakeEngine(tree=tree_answer([node(None, **fields)]))) as tab:
        tab.open()
        windows = tab.node(1000).locator(".strip.windows")
        assert shares(windows, "unlisted") == [pytest.approx((0, 0.8), abs=0.005)]
        expect(windows.locator(".hole")).to_have_count(0)
        expect(tab.page.locator("#legend")).to_contain_text("not listed")
        assert tab.problems == []


def test_strips_stay_as_they_are_until_something_changes(browser):
    """So that what is said of the mark under the pointer stays readable."""
    fields = keeps(1000, [[500, 1000]], hit_ends=[[900, 1000]])
    with served(browser, FakeEngine(tree=tree_answer([node(None, **fields)]))) as tab:
        tab.open()
        tab.node(1000).locator(".kept").evaluate("(mark) => { mark.dataset.seen = 'yes'; }")
        tab.refresh()
        expect(tab.page.locator(".kept[data-seen]")).to_have_count(1)
        fields["windows"]["kept"] = [[750, 1000]]
        tab.refresh()
        expect(tab.page.locator(".strip .hole")).to_have_attribute("title", "Hole: tokens 0 to 750")
        windows = tab.node(1000).locator(".strip.windows")
        assert shares(windows, "kept") == [pytest.approx((0.75, 1), abs=0.005)]
        assert tab.problems == []


def test_full_attention_has_no_strips(tab):
    tab.open()
    expect(tab.node(600)).to_be_visible()
    expect(tab.page.locator(".strip")).to_have_count(0)
    expect(tab.page.locator("#legend")).not_to_contain_text("not listed")
    assert tab.node(600).bounding_box()["height"] == 32
    assert "hit may end" not in tab.page.inner_text("body")


# -- what boxes say -------------------------------------------------------------------------------


def test_boxes_say_what_they_are_when_the_server_shows_no_text(tab):
    tab.open()
    expect(tab.node(600).locator(".label")).to_have_text("600 tokens shared by 2")
    expect(tab.node(300).locator(".label")).to_have_text("300 tokens")
    expect(tab.node(100).locator(".label")).to_have_text("100")  # its box is narrow
    expect(tab.page.locator("#reading")).to_contain_text("tree_text=true")
    for answered in tab.engines[0].answers["tree"]["nodes"]:
        answered["tokens"] = tokens_of("You are a poet.")
    tab.refresh()
    expect(tab.node(600).locator(".label")).to_have_text("You are a poet.")
    expect(tab.page.locator("#reading")).not_to_contain_text("tree_text")


def test_a_pin_is_told_from_what_continues_it(browser):
    pinned = {"num_pinned_blocks": 37, "num_locked_blocks": 37}
    nodes = [node(None, 600, **pinned), node(0, 300), node(1, 100), node(None, 80)]
    with served(browser, FakeEngine(tree=tree_answer(nodes))) as tab:
        tab.open()
        expect(tab.node(600).locator(".meta")).to_contain_text("pinned")
        below_pin = tab.page.locator("[data-below-pin]")
        expect(below_pin).to_have_count(2)  # those of 300 and 100, not the pin, not that of 80
        expect(tab.page.get_by_label("Legend")).to_contain_text("continues a pin")
        pale = tab.node(600).evaluate("(box) => box.style.getPropertyValue('--below')")
        assert pale == "40%"  # 400 of its 1000 tokens are below it
        tab.node(300).hover()
        details = tab.page.get_by_label("The prefix under the pointer")
        expect(details).to_contain_text("Useevictable, below a pin")
        tab.page.get_by_label("Color").select_option("hits")
        expect(below_pin).to_have_count(0)
        tab.page.get_by_label("Color").select_option("use")
        expect(below_pin).to_have_count(2)
        tab.engines[0].answers["tree"] = tree_answer([node(None, 600), node(0, 300)])
        tab.refresh()
        expect(below_pin).to_have_count(0)
        expect(tab.page.get_by_label("Legend")).not_to_contain_text("continues a pin")
        assert tab.problems == []


def test_the_legend_explains_gray_boxes(browser):
    isolated = {"namespaces": 2, "num_tokens": 500, "num_nodes": 7, "num_blocks": 32}
    engine = FakeEngine(tree=tree_answer([node(None, 500)]))
    with served(browser, engine) as tab:
        tab.open()
        legend = tab.page.get_by_label("Legend")
        expect(legend).to_contain_text("several prefixes in one box")
        expect(legend).not_to_contain_text("cache_salt")
        engine.answers["tree"] = tree_answer([node(None, 500)], isolated=isolated, num_tokens=1000)
        tab.refresh()
        expect(legend).to_contain_text("requests with a cache_salt, as one total")
        for colour in ("use", "hits", "age"):
            tab.page.get_by_label("Color").select_option(colour)
            for gray, box in (("several", "root"), ("isolated", "isolated")):
                swatch = legend.locator(f".fill-{gray}")
                assert hue_of(swatch) == hue_of(tab.page.locator(f'[data-kind="{box}"]'))
        assert tab.problems == []


def hue_of(element: Locator) -> str:
    """The color that an element's own is mixed from."""
    return element.evaluate("(one) => getComputedStyle(one).getPropertyValue('--hue')")


# -- charts ---------------------------------------------------------------------------------------


class Counting:
    """An engine's statistics, which a test lets grow."""

    def __init__(self) -> None:
        self.programs: ProgramGauges | None = None
        self.restart()

    def restart(self) -> None:
        self.radix, self.evictions = RadixCounters(), EvictionCounters()

    def __call__(self) -> EngineStats:
        return EngineStats(radix=self.radix, evictions=self.evictions, programs=self.programs)

    def grow(self, requests: int, prompt: int, hits: int, evicted: int = 0) -> None:
        self.radix.lookups += requests
        self.radix.prompt_tokens += prompt
        self.radix.hit_tokens += hits
        self.evictions.evicted_tokens += evicted


@pytest.fixture
def counting() -> Counting:
    return Counting()


@pytest.fixture
def charts(browser, counting) -> Iterator[Served]:
    engine = FakeEngine(tree=tree_answer([node(None, 600)]), stats=counting)
    with served(browser, engine) as tab:
        yield tab
        assert tab.problems == []


def look(tab: Served) -> None:
    """Open the page or let its next refresh come, until it has a sample more."""
    if tab.page.url == "about:blank":
        tab.open()
        num_samples = 0
    else:
        num_samples = tab.page.evaluate("state.history.samples.length")
        tab.refresh()
    for _ in range(500):  # the page's policy forbids Playwright's own way to wait for a condition
        if tab.page.evaluate("state.history.samples.length") > num_samples:
            return
        tab.page.wait_for_timeout(10)
    pytest.fail("no sample came")


def chart(tab: Served, name: str) -> Locator:
    return tab.page.locator(".chart", has_text=name)


def recent(tab: Served, name: str) -> Locator:
    """What a chart says of the time that the page has looked."""
    return chart(tab, name).locator(".facts li").nth(1).locator("strong")


def levels(tab: Served, name: str) -> list[float]:
    """The heights of a chart's lines, as shares of its own."""
    path = chart(tab, name).locator("path").first.get_attribute("d") or ""
    ups = re.findall(r"(?:M\S+ |V)(\d+\.\d)H", path)
    return [round(1 - float(up) / 60, 2) for up in ups]


def test_charts_show_how_the_counters_grow_while_the_page_looks(charts, counting):
    counting.grow(requests=1000, prompt=10**6, hits=0)  # before the page was opened
    look(charts)
    panel = charts.page.get_by_role("region", name="Over time")
    counting.grow(requests=6, prompt=1000, hits=750, evicted=300)
    look(charts)
    expect(recent(charts, "Hit rate")).to_have_text("75%")
    counting.grow(requests=3, prompt=1000, hits=250)
    look(charts)
    expect(recent(charts, "Hit rate")).to_have_text("50%")
    expect(recent(charts, "Requests")).to_have_text("9")
    expect(recent(charts, "Evicted tokens")).to_have_text("300")
    assert levels(charts, "Hit rate") == [0.75, 0.25]
    first, second = levels(charts, "Requests")
    assert first == 1 > second > 0
    assert levels(charts, "Evicted tokens") == [1, 0]
    expect(panel).to_contain_text(re.compile(r"Requests up to (1\.\d|2)/s"))  # 6 in at least 3 s


def test_a_page_that_is_opened_after_a_run_shows_the_totals_of_the_server(charts, counting):
    counting.grow(requests=9, prompt=2000, hits=1660, evicted=40)
    look(charts)
    for name, total in (("Hit rate", "83%"), ("Requests", "9"), ("Evicted tokens", "40")):
        facts = chart(charts, name).locator(".facts li")
        expect(facts).to_have_text([f"since start{total}"])
    look(charts)  # nothing has come
    for name, total, none in (
        ("Hit rate", "83%", "–"),
        ("Requests", "9", "0"),
        ("Evicted tokens", "40", "0"),
    ):
        facts = chart(charts, name).locator(".facts li")
        expect(facts).to_have_text(
            [f"since start{total}", re.compile(rf"^last \d+ s{none}$")],
        )


def test_after_a_restart_the_totals_are_those_of_the_new_server(charts, counting):
    counting.grow(requests=9, prompt=2000, hits=1660)
    look(charts)
    counting.restart()
    counting.grow(requests=1, prompt=1000, hits=500)
    look(charts)
    facts = chart(charts, "Hit rate").locator(".facts li")
    expect(facts.first).to_have_text("since start50%")
    expect(chart(charts, "Requests").locator(".facts li").first).to_have_text("since start1")


def test_a_chart_says_what_was_where_the_pointer_is(charts, counting):
    look(charts)
    for hits in (900, 100):
        counting.grow(requests=1, prompt=1000, hits=hits)
        look(charts)
    expect(recent(charts, "Hit rate")).to_have_text("50%")
    plot = chart(charts, "Hit rate").locator("svg")
    box = plot.bounding_box()
    assert box is not None
    middle_of_first = charts.page.evaluate("""() => {
        const [first, second, last] = state.history.samples.map(({ at }) => at);
        return 1 - (last - (first + second) / 2) / 60000;  // the axis is a minute long
    }""")
    plot.hover(position={"x": box["width"] * middle_of_first, "y": 30})
    facts = chart(charts, "Hit rate").locator(".facts li")
    expect(facts).to_have_text(["90%", re.compile(r"^\d+ s ago$")])
    charts.page.mouse.move(0, 0)
    expect(recent(charts, "Hit rate")).to_have_text("50%")


def test_nothing_is_drawn_for_a_restart_or_without_requests(charts, counting):
    look(charts)
    counting.grow(requests=5, prompt=1000, hits=500)
    look(charts)
    expect(recent(charts, "Requests")).to_have_text("5")
    look(charts)  # no request came
    counting.restart()
    look(charts)
    counting.grow(requests=1, prompt=1000, hits=1000)
    look(charts)
    expect(recent(charts, "Requests")).to_have_text("6")
    assert levels(charts, "Hit rate") == [0.5, 1]
    first, idle, last = levels(charts, "Requests")
    assert first == 1 > last > idle == 0


def test_programs_are_drawn_where_the_server_knows_them(charts, counting):
    look(charts)
    look(charts)
    expect(chart(charts, "Requests")).to_be_visible()
    expect(chart(charts, "Programs")).to_be_hidden()
    counting.programs = ProgramGauges(running=3, in_tool=1, waiting_for_person=2)
    look(charts)
    facts = chart(charts, "Programs").locator(".facts li")
    expect(facts).to_have_text(["running3", "in a tool1", "waiting for a person2"])


def test_the_page_keeps_ten_minutes(charts, counting):
    look(charts)
    charts.page.evaluate("""() => {
        for (let s = 3; s <= 3600; s += 3) {
            state.history.add(state.stats, Date.now() + 1000 * s);
        }
    }""")
    assert charts.page.evaluate("state.history.samples.length") == 201


def test_a_server_without_the_counters_shows_no_charts(tab):
    tab.open()
    expect(tab.node(600)).to_be_visible()
    expect(tab.page.locator("#over-time")).to_be_hidden()


# -- over time ------------------------------------------------------------------------------------


def test_a_refresh_shows_the_changed_tree_and_keeps_zoom_and_pointer(tab):
    tab.open()
    tab.node(300).click()
    assert tab.width(300) == pytest.approx(tab.width(600))
    # One more request came in before it, another prefix was evicted, and time has passed.
    tab.engines[0].answers["tree"] = tree_answer(
        [
            node(None, 50),
            node(None, 600, hits=14),
            node(1, 300, hits=1, age_s=0.1),
            node(2, 40),
        ]
    )
    tab.refresh()
    expect(tab.node(40)).to_be_visible()
    expect(tab.node(100)).to_have_count(0)
    assert tab.width(300) == pytest.approx(tab.width(600))
    details = tab.page.get_by_label("The prefix under the pointer")
    expect(details).to_contain_text("Positions600 to 900")
    expect(details).to_contain_text("Hits1")
    expect(tab.node(300)).to_have_class("node chosen")


def test_what_was_zoomed_into_may_go_away(tab):
    tab.open()
    tab.node(100).click()
    tab.engines[0].answers["tree"] = tree_answer([node(None, 70)])
    tab.refresh()
    expect(tab.node(70)).to_be_visible()
    expect(tab.page.get_by_role("button", name="Zoom out")).to_be_hidden()


def test_the_keyboard_goes_everywhere(tab):
    tab.open()
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


def test_no_request_is_sent_from_a_paused_or_hidden_tab(tab):
    tab.open()
    expect(tab.node(600)).to_be_visible()
    asked = tab.engines[0].asked
    tab.page.get_by_role("button", name="Pause").click()
    before = len(asked)
    tab.page.clock.fast_forward(5 * REFRESH_MS)
    assert len(asked) == before
    tab.page.get_by_role("button", name="Resume").click()
    expect(tab.page.get_by_role("status")).to_contain_text("Live")
    tab.page.evaluate("""() => {
        Object.defineProperty(document, "hidden", { value: true, configurable: true });
        document.dispatchEvent(new Event("visibilitychange"));
    }""")
    before = len(asked)
    tab.page.clock.fast_forward(5 * REFRESH_MS)
    assert len(asked) == before
    with tab.page.expect_response("**/v1/sgl/tree"):
        tab.page.evaluate("""() => {
            Object.defineProperty(document, "hidden", { value: false });
            document.dispatchEvent(new Event("visibilitychange"));
        }""")


def test_markup_in_a_prompt_stays_text(browser):
    text = "<script>window.ran = 1</script><img src=x onerror='window.ran = 1'>"
    nodes = [node(None, len(text), tokens=tokens_of(text), hits=3)]
    with served(browser, FakeEngine(tree=tree_answer(nodes))) as tab:
        tab.open()
        tab.node(len(text)).hover()
        for place in ("#tree", "#details-text", "#top-rows"):
            expect(tab.page.locator(place)).to_contain_text(text)
        assert tab.page.locator("script").count() == 1
        assert tab.page.locator("img").count() == 0
        assert tab.page.evaluate("window.ran") is None
        assert tab.problems == []


def test_a_server_with_an_api_key_is_asked_with_it_and_the_key_stays_in_the_tab(browser):
    engine = FakeEngine(tree=tree_answer([node(None, 600)]))
    with served(browser, engine, api_key=API_KEY) as tab:
        tab.open()
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
        refusals = [problem for problem in tab.problems if "401 (Unauthorized)" in problem]
        assert tab.problems == refusals


def test_an_empty_cache_says_so_until_something_is_cached(tab):
    tab.engines[0].answers["tree"] = tree_answer([])
    tab.open()
    expect(tab.page.get_by_role("heading", name="Nothing is cached yet")).to_be_visible()
    tab.engines[0].answers["tree"] = tree_answer([node(None, 70)])
    tab.refresh()
    expect(tab.node(70)).to_be_visible()
    expect(tab.page.get_by_role("heading", name="Nothing is cached yet")).to_be_hidden()


def test_a_tree_that_is_off_says_why(browser):
    with served(browser, FakeEngine(stats=EngineStats(parts={"radix": "by option"}))) as tab:
        tab.open()
        expect(tab.page.get_by_role("heading", name="The tree is off")).to_be_visible()
        expect(tab.page.locator("#notice-text")).to_contain_text("by option")
        assert tab.problems == []


def test_a_server_without_the_plugin_says_so(tab):
    tab.page.route("**/v1/sgl/tree", lambda route: route.fulfill(status=404))
    tab.open()
    expect(tab.page.get_by_role("heading", name="No prefix tree here")).to_be_visible()
    expect(tab.page.locator("#notice-text")).to_contain_text("--plugin sgl_vllm")
    tab.page.unroute("**/v1/sgl/tree")
    tab.page.clock.fast_forward(2 * REFRESH_MS)
    expect(tab.node(600)).to_be_visible()
    assert all("404 (Not Found)" in problem for problem in tab.problems)
    tab.problems.clear()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("colour", ["use", "hits", "age"])
def test_labels_can_be_read_in_every_colour(tab, scheme, colour):
    """By WCAG's contrast of text and ground, which wants 4.5."""
    tab.page.emulate_media(color_scheme=scheme)
    tab.open()
    tab.page.get_by_label("Color").select_option(colour)
    for num_tokens in (600, 300, 100):
        assert tab.node(num_tokens).evaluate(CONTRAST) >= 4.5


def test_a_server_that_is_gone_leaves_the_last_picture_and_may_come_back(tab):
    tab.open()
    expect(tab.node(600)).to_be_visible()
    tab.page.route("**/v1/sgl/tree", lambda route: route.abort())
    tab.page.clock.fast_forward(REFRESH_MS)
    expect(tab.page.get_by_role("status")).to_contain_text("No answer since")
    expect(tab.node(600)).to_be_visible()
    tab.page.unroute("**/v1/sgl/tree")
    tab.page.clock.fast_forward(2 * REFRESH_MS)
    expect(tab.page.get_by_role("status")).to_contain_text("Live")
    assert all("ERR_FAILED" in problem for problem in tab.problems)
    tab.problems.clear()


def test_fields_that_an_engine_does_not_tell_are_unknown(browser):
    bare = {"parent": None, "namespace": 0, "num_tokens": 70, "num_blocks": 5}
    engine = FakeEngine(
        tree={"num_tokens": 70, "num_blocks": 5, "num_nodes": 1, "nodes": [bare | {"hits": 2}]}
    )
    with served(browser, engine) as tab:
        tab.open()
        expect(tab.node(70)).to_be_visible()
        expect(tab.page.locator("#space-total")).to_have_text("the size of the cache is not known")
        assert "NaN" not in tab.page.inner_text("body")
        assert "undefined" not in tab.page.inner_text("body")
        assert tab.problems == []


def test_tenants_with_a_salt_are_one_total(browser):
    isolated = {"namespaces": 2, "num_tokens": 500, "num_nodes": 7, "num_blocks": 32}
    engine = FakeEngine(tree=tree_answer([node(None, 500)], isolated=isolated, num_tokens=1000))
    with served(browser, engine) as tab:
        tab.open()
        tenants = tab.page.get_by_role("treeitem", name="isolated: 2 tenants")
        box = tenants.bounding_box()
        assert box is not None and box["width"] == pytest.approx(tab.width(500), abs=3)
        tenants.hover()
        expect(tab.page.locator("#details-hint")).to_contain_text("Only their totals are shown")
        assert tab.problems == []


def test_each_engine_of_a_data_parallel_server_can_be_looked_at(browser):
    engines = [FakeEngine(tree=tree_answer([node(None, size)])) for size in (70, 80)]
    with served(browser, *engines) as tab:
        tab.open()
        expect(tab.node(70)).to_be_visible()
        tab.page.get_by_label("Engine").select_option("1")
        expect(tab.node(80)).to_be_visible()
        expect(tab.node(70)).to_have_count(0)
        tab.refresh()
        expect(tab.node(80)).to_be_visible()
        assert tab.problems == []


def test_many_small_prefixes_can_all_be_reached(browser):
    nodes = [node(None, 10_000 + number) for number in range(50)]
    nodes += [node(None, 10 + number % 5, hits=number) for number in range(150)]
    with served(browser, FakeEngine(tree=tree_answer(nodes))) as tab:
        tab.open()
        group = tab.page.get_by_role("treeitem", name="155 smaller")
        group.click()
        inner = tab.page.get_by_role("treeitem", name="110 smaller")
        expect(inner).to_be_visible()
        inner.click()
        expect(tab.page.get_by_role("treeitem", name="65 smaller")).to_be_visible()
        assert tab.problems == []


def test_more_nodes_are_asked_for_when_some_are_left_out(browser):
    def tree(max_nodes: int = 1) -> dict:
        nodes = [node(None, 70), node(None, 80)][:max_nodes]
        return tree_answer(nodes, num_nodes=2, nodes_left_out=2 - len(nodes))

    with served(browser, FakeEngine(tree=tree)) as tab:
        tab.open()
        expect(tab.page.get_by_text("1 node further from the root is left out")).to_be_visible()
        tab.page.get_by_role("button", name="Show more").click()
        expect(tab.node(80)).to_be_visible()
        expect(tab.page.locator("#left-out")).to_be_hidden()
        assert tab.problems == []


@pytest.mark.parametrize("width", [360, 800, 1900])
def test_a_window_of_any_width_needs_no_sideways_scrolling(tab, width):
    tab.page.set_viewport_size({"width": width, "height": 800})
    tab.open()
    expect(tab.node(600)).to_be_visible()
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= width


def test_behind_a_prefix_it_finds_its_data(browser):
    engine = FakeEngine(tree=tree_answer([node(None, 600)]))
    with served(browser, engine, prefix="/models/a") as tab:
        tab.open()
        expect(tab.node(600)).to_be_visible()
        tab.page.goto(f"{tab.url}/v1/sgl/tree")
        assert tab.page.url == f"{tab.url}/sgl/tree"
        assert tab.problems == []
