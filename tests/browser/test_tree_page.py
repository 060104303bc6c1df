"""The tree page in a real browser, over routes whose engine is fake: what it draws."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from sgl_vllm.programs.states import ProgramGauges
from sgl_vllm.radix.stats import EvictionCounters, RadixCounters
from sgl_vllm.scheduler.stats import EngineStats
from tests import fake_engines
from tests.browser.test_view_page import CONTRAST
from tests.browser.tree_tab import Serve, Tab
from tests.fake_engines import FakeEngine, node, tokens_of, tree_answer

if TYPE_CHECKING:
    from playwright.sync_api import Locator

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect


def test_boxes_are_as_wide_as_their_share_of_the_tokens_and_tell_their_use(tab: Tab) -> None:
    expect(tab.page.get_by_role("treeitem")).to_have_count(4)  # with the one for all
    whole = tab.width(600)
    assert tab.width(300) == pytest.approx(0.3 * whole, abs=3)
    assert tab.width(100) == pytest.approx(0.1 * whole, abs=3)
    above, below = (tab.node(num_tokens).bounding_box() for num_tokens in (600, 300))
    assert above is not None and below is not None and above["y"] < below["y"]
    for num_tokens, use in ((600, "pinned"), (300, "used"), (100, "evictable")):
        expect(tab.node(num_tokens)).to_have_attribute("data-use", use)
    tab.has("#space-facts", "in use2 (", "pinned10 (", "evictable49 (", "free100 (")
    tab.details(300, "Positions600 to 900", "Last used3 min ago", "Locked blocks2", "Usein use")
    tab.details(100, "wanted")
    for absent in ("#programs", "#over-time", ".strip"):  # the engine tells nothing of these
        expect(tab.page.locator(absent).first).to_be_hidden()


def test_markup_in_a_prompt_stays_text(look_at: Serve) -> None:
    text = "<script>window.ran = 1</script><img src=x onerror='window.ran = 1'>"
    tab = look_at(node(None, len(text), tokens=tokens_of(text), hits=3))
    tab.details(len(text), text)
    tab.has("#tree", text)
    tab.has("#top-rows", text)
    assert tab.page.locator("script").count() == 1
    assert tab.page.locator("img").count() == 0
    assert tab.page.evaluate("window.ran") is None


def test_programs_are_counted_and_a_context_says_what_its_program_is_doing(
    look_at: Serve,
) -> None:
    states = {"running": 2, "in_tool": 3, "waiting_for_person": 1, "unknown": 0, "ended": 4}
    tools = [{"name": "<b>bash</b>", "num_contexts": 3, "longest_s": 184.0}]
    programs = {**states, "longest_in_tool_s": 184.0, "tools": tools}
    context = {"state": "in_tool", "paused_s": 14.2, "tool": "<b>bash</b>"}
    nodes = [node(None, 600), node(0, 300, context=context), node(0, 100)]
    tab = look_at(*nodes, programs=programs)
    expect(tab.page.locator("#programs-facts li")).to_have_text(
        ["running2", "in a tool3", "waiting for a person1", "unknown0", "ended4"]
    )
    tab.has("#programs", "In tools: <b>bash</b> 3 (up to 3 min)")
    tab.details(300, "Its programin a tool (<b>bash</b>), 14 s")
    waiting = tab.page.get_by_text("Waiting for a person:")
    unknown = tab.page.get_by_text("Unknown:")
    expect(waiting).to_be_visible()
    expect(unknown).to_be_hidden()
    programs |= {"waiting_for_person": 0, "unknown": 221, "longest_in_tool_s": None, "tools": []}
    tab.refresh()
    expect(unknown).to_contain_text("one request so far")
    expect(waiting).to_be_hidden()
    expect(tab.page.locator("#programs")).not_to_contain_text("In tools")


def test_the_chosen_engine_says_how_its_agents_take_turns_while_they_do(serve: Serve) -> None:
    shown = [
        {"programs": {"running": 2}, "admission": one}
        for one in (fake_engines.NO_AGENTS, fake_engines.TURNS)
    ]
    trees = [tree_answer([node(None, 600)], **one) for one in shown]
    tab = serve(*(FakeEngine(tree=tree) for tree in trees))
    turns = tab.page.locator("#programs-turns")
    expect(tab.page.locator("#programs-facts")).to_be_visible()
    expect(turns).to_be_hidden()
    tab.page.locator("#engine").select_option("1")
    expect(turns).to_have_text(fake_engines.TURNS_IN_WORDS.capitalize())
    trees[1]["admission"] = fake_engines.NO_TURNS
    tab.refresh()
    expect(turns).to_have_text(fake_engines.NO_TURNS_IN_WORDS.capitalize())


# -- what recurrent layers keep --------------------------------------------------------------------


def test_ticks_show_states(look_at: Serve) -> None:
    kept = {"positions": [250, 750, 1000], "left_out": 0}
    tab = look_at(node(None, 1000, states=kept))
    strip = tab.node(1000).locator(".strip.states")
    whole = strip.bounding_box()
    assert whole is not None
    boxes = [tick.bounding_box() for tick in strip.locator(".tick").all()]
    ends = [box["x"] + box["width"] - whole["x"] for box in boxes if box is not None]
    assert ends == pytest.approx([whole["width"] * share for share in (0.25, 0.75, 1)], abs=2)
    last = strip.locator(".tick").last
    expect(last).to_have_attribute("title", "State after 1,000 tokens")
    tab.has("#legend", "state: a hit may end here")
    expect(tab.page.get_by_role("treeitem", name="States at 250, 750, 1,000")).to_have_count(1)
    # What is said of a mark under the pointer stays until something changes.
    last.evaluate("(mark) => { mark.dataset.seen = 'yes'; }")
    tab.refresh()
    expect(tab.page.locator(".tick[data-seen]")).to_have_count(1)
    kept |= {"positions": [800, 1000], "left_out": 7}
    tab.refresh()
    expect(strip.locator(".tick")).to_have_count(2)
    expect(strip.locator(".unlisted")).to_have_count(1)
    tab.has("#legend", "not listed")


# -- colors and the legend ------------------------------------------------------------------------


def test_a_pin_is_told_from_what_continues_it(look_at: Serve) -> None:
    pinned = {"num_pinned_blocks": 37, "num_locked_blocks": 37}
    tab = look_at(node(None, 600, **pinned), node(0, 300), node(1, 100), node(None, 80))
    expect(tab.node(600).locator(".meta")).to_contain_text("pinned")
    below_pin = tab.page.locator("[data-below-pin]")
    expect(below_pin).to_have_count(2)  # those of 300 and 100, not the pin, not that of 80
    tab.has("#legend", "continues a pin")
    pale = tab.node(600).evaluate("(box) => box.style.getPropertyValue('--below')")
    assert pale == "40%"  # 400 of its 1000 tokens are below it
    tab.details(300, "Useevictable, below a pin")
    tab.page.get_by_label("Color").select_option("hits")
    expect(below_pin).to_have_count(0)


def test_the_legend_says_what_gray_boxes_are_while_there_are_any(look_at: Serve) -> None:
    tab = look_at(node(None, 5000), *[node(0, 2) for _ in range(100)])
    tab.has("#legend", "smaller prefixes as one box", "too narrow for a box each")
    tab.refresh(node(None, 600))
    expect(tab.page.locator("#legend")).not_to_contain_text("prefixes")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_labels_can_be_read_in_every_color(tab: Tab, scheme: Any) -> None:
    """By WCAG's contrast of text and ground, which wants 4.5."""
    tab.page.emulate_media(color_scheme=scheme)
    for color in ("use", "hits", "age"):
        tab.page.get_by_label("Color").select_option(color)
        for num_tokens in (600, 300, 100):
            assert tab.node(num_tokens).evaluate_all(CONTRAST)[0][0] >= 4.5


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


def facts(tab: Tab, name: str) -> Locator:
    """What a chart says above its lines."""
    return tab.page.locator(".chart", has_text=name).locator(".facts li")


def levels(tab: Tab, name: str) -> list[float]:
    """The heights of a chart's lines, as shares of its own."""
    line = tab.page.locator(".chart", has_text=name).locator("path").first
    ups = re.findall(r"(?:M\S+ |V)(\d+\.\d)H", line.get_attribute("d") or "")
    return [round(1 - float(up) / 60, 2) for up in ups]


def test_charts_show_totals_and_how_the_counters_grow(serve: Serve) -> None:
    counting = Counting()
    counting.grow(requests=9, prompt=2000, hits=1660, evicted=40)  # before the page is opened
    tab = serve(FakeEngine(tree=tree_answer([node(None, 600)]), stats=counting))
    tab.await_samples(1)
    for name, total in (("Hit rate", "83%"), ("Requests", "9"), ("Evicted tokens", "40")):
        expect(facts(tab, name)).to_have_text([f"since start{total}"])
    for number, (hits, evicted) in enumerate(((750, 300), (250, 0)), start=2):
        counting.grow(requests=3, prompt=1000, hits=hits, evicted=evicted)
        tab.refresh()
        tab.await_samples(number)
    last = re.compile(r"^last \d+ s50%$")
    expect(facts(tab, "Hit rate")).to_have_text(["since start67%", last])
    assert levels(tab, "Hit rate") == [0.75, 0.25]
    assert levels(tab, "Evicted tokens") == [1, 0]
    expect(facts(tab, "Programs").first).to_be_hidden()

    counting.restart()  # totals are the new server's, and the step is not drawn
    counting.grow(requests=1, prompt=1000, hits=500)
    counting.programs = ProgramGauges(running=3, in_tool=1, waiting_for_person=2)
    tab.refresh()
    tab.await_samples(4)
    expect(facts(tab, "Hit rate").first).to_have_text("since start50%")
    assert levels(tab, "Hit rate") == [0.75, 0.25]
    counting.grow(requests=1, prompt=1000, hits=1000)
    tab.refresh()
    tab.await_samples(5)
    assert levels(tab, "Hit rate") == [0.75, 0.25, 1]
    programs = ["running3", "in a tool1", "waiting for a person2"]
    expect(facts(tab, "Programs")).to_have_text(programs)
