"""The page of benchmarks.report in a real browser, light and dark, on a phone and on a desk."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks.report import __main__ as command
from tests.results_of_benchmarks import HOSTILE, result, write

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = sync_api.expect

WIDTHS = (360, 760, 1081, 1331, 1440)
# Elements that stick out of the window, or of the card that they are in; headings that a phone does
# not show, but a screen reader may say, do no harm. A table may scroll in its card.
STICKING_OUT = """() => [...document.querySelectorAll("main *, header *")].filter((element) => {
    if (getComputedStyle(element.closest("thead") ?? element).position === "absolute") return false;
    const card = element.closest(".card");
    if (element.closest("table") && card.matches(".wide")) return false;
    const edge = card ? card.getBoundingClientRect().right : innerWidth;
    return element.getBoundingClientRect().right > edge + 1;
}).map((element) => element.outerHTML.slice(0, 80))"""


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    """Of a report with everything in it: gains, none, losses, one round, wild names."""
    folder = tmp_path_factory.mktemp("results")
    hostile = result(workload="llm_judge", ratio=1.3)
    hostile["differences"] = [{"round_number": 1, "item": 2, "stock": HOSTILE, "sgl": "x" * 500}]
    hostile["gain"] = HOSTILE
    one_round = result(workload="mmlu", ratio=12.0) | {"ablations": []}
    one_round["ratio_of_rounds"] = one_round["ratio_of_rounds"][:1]
    contents = [
        result(workload="tight_cache", ratio=2.4),
        *(result("json_regex", "shape:qwen2.5-0.5b", n, 0.02, c) for n, c in ((2, 1), (1.2, 32))),
        result(workload="no_sharing", ratio=0.995, apart=0.02),
        result(workload="chat_long", ratio=0.9),
        one_round,
        hostile,
    ]
    for number, content in enumerate(contents):
        write(folder, str(number), content)
    html = folder / "report.html"
    assert command.main([str(folder), "--html", str(html)]) == 0
    return html


@pytest.fixture
def page(blank, file) -> Page:
    blank.goto(file.as_uri())
    blank.problems.remove(file.as_uri())
    return blank


def test_only_the_pages_script_runs_and_what_models_wrote_is_text(page) -> None:
    assert page.title() == "vLLM with sgl-vllm, against stock vLLM"
    assert page.locator("script").count() == 1
    assert page.locator("img").count() == 0
    expect(page.locator("pre", has_text="<script>document.title")).to_be_visible()


@pytest.mark.parametrize("width", WIDTHS)
def test_a_window_of_any_width_needs_no_sideways_scrolling(page, width) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(STICKING_OUT) == []


@pytest.mark.parametrize("width", [360, 1200])
def test_every_plot_can_be_seen_and_read(page, width) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    titles = (
        "Throughput",
        "Forward passes",
        "Prompt tokens computed",
        "Time to first token",
    )
    for title in titles:
        plot = page.get_by_role("group", name=title, exact=True).locator("svg")
        expect(plot).to_be_visible()
        box = plot.bounding_box()
        assert box["width"] > 250
        assert box["height"] > 100
        label = plot.get_by_text("tight_cache").first
        assert label.bounding_box()["height"] > 8  # px
    # Six results were taken apart.
    assert page.locator("section.workload").get_by_text("no prefix cache").count() == 6


def test_plots_and_page_are_as_light_or_dark_as_the_system(page) -> None:
    def brightness(selector: str, name: str) -> int:
        colour = page.locator(selector).first.evaluate(f"e => getComputedStyle(e).{name}")
        return sum(map(int, colour[4:-1].split(",")))

    is_dark = page.scheme == "dark"
    assert (brightness("body", "backgroundColor") < 3 * 128) == is_dark
    assert (brightness("figure svg text", "fill") > 3 * 128) == is_dark


def test_a_ratio_within_its_spread_is_no_difference(page) -> None:
    def row(name: str) -> Locator:
        return page.locator("main > .wide").first.get_by_role("row").filter(has_text=name)

    expect(row("no_sharing").locator("td").nth(1)).to_contain_text("no difference")
    expect(row("chat_long").locator("td").nth(1)).to_have_attribute("data-tone", "worse")
    expect(row("mmlu").locator("td").nth(1)).to_have_attribute("data-tone", "one round")
    for words in ("4 faster", "1 no difference", "1 slower", "1 of one round"):
        number, rest = words.split(" ", 1)
        fact = page.locator(".facts li").filter(has_text=rest)
        expect(fact.locator("strong")).to_have_text(number)


@pytest.mark.parametrize("width", [360, 1440])
def test_a_heading_sorts_and_a_second_click_turns_the_order_around(page, width) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    table = page.locator("main > .wide").first

    def names() -> list[str]:
        return table.locator("tbody td:first-child a").all_inner_texts()

    heading = table.get_by_role("button", name="throughput")
    heading.click()
    most_first = names()
    assert most_first[:2] == ["mmlu", "tight_cache"]
    assert most_first[-2:] == ["no_sharing", "chat_long"]
    heading.click()
    assert names() == most_first[::-1]
    assert heading.locator("..").get_attribute("aria-sort") == "ascending"


def test_what_is_worse_is_said_on_top_and_is_red(page) -> None:
    said = page.locator(".regressions")
    expect(said).to_contain_text("chat_long, demo (throughput: 0.90; latency, p50: 0.90;")
    expect(said).not_to_contain_text("no_sharing")
    cell = page.locator('.wide td[data-tone="worse"] strong').first
    color = cell.evaluate("e => getComputedStyle(e).color")
    red, green, blue = map(int, color[4:-1].split(","))
    assert red > 1.5 * green
    assert red > 1.5 * blue
