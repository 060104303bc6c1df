"""The page of benchmarks.report in a real browser, light and dark, on a phone and on a desk."""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO
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


@pytest.fixture(params=["light", "dark"])
def page(browser, file, request) -> Iterator[Page]:
    context = browser.new_context(
        color_scheme=request.param, viewport={"width": 1200, "height": 900}
    )
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text))
    page.on("request", lambda asked: problems.append(asked.url))
    page.goto(file.as_uri())
    page.scheme = request.param
    yield page
    assert [one for one in problems if one != file.as_uri() and not one.startswith("data:")] == []
    context.close()


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


def row_heights(page: Page) -> list[float]:
    """Of the results in the first table."""
    found = page.locator("main > .wide tbody").first.locator("tr")
    return [row.evaluate("e => e.getBoundingClientRect().height") for row in found.all()]


@pytest.mark.parametrize("width", [720, 800, 1024, 1200])
def test_a_result_is_a_row_of_a_table(page, width) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    assert all(height < 110 for height in row_heights(page))
    table = page.locator("main > .wide").first
    heading = table.get_by_role("columnheader", name="throughput").bounding_box()
    cell = table.locator("tbody td:nth-child(2)").first.bounding_box()
    assert cell["x"] == pytest.approx(heading["x"], abs=1)


@pytest.mark.parametrize("width", [1024, 1200])
def test_all_columns_are_seen_at_once(page, width) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    assert page.locator("main > .wide").first.evaluate("e => e.scrollWidth <= e.clientWidth")


def test_workloads_stay_in_sight_when_a_table_scrolls(page) -> None:
    page.set_viewport_size({"width": 720, "height": 800})
    table = page.locator("main > .wide").first
    table.evaluate("e => { e.scrollLeft = 10000; }")
    assert table.evaluate("e => e.scrollLeft") > 0
    name = table.get_by_role("link", name="tight_cache").bounding_box()
    assert name["x"] >= table.bounding_box()["x"]


def test_a_result_is_a_block_on_a_phone(page) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    assert all(height > 150 for height in row_heights(page))
    assert page.locator("main > .wide").first.evaluate("e => e.scrollWidth <= e.clientWidth")


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


def test_the_contents_lead_to_every_part(page) -> None:
    contents = page.get_by_role("navigation", name="Contents")
    contents.locator("summary").click()
    for link in contents.get_by_role("link").all():
        assert page.locator(link.get_attribute("href")).count() == 1
    assert contents.get_by_role("link").count() == 4 + 7


def test_what_is_worse_is_said_on_top_and_is_red(page) -> None:
    said = page.locator(".regressions")
    expect(said).to_contain_text("chat_long, demo (throughput: 0.90; latency, p50: 0.90;")
    expect(said).not_to_contain_text("no_sharing")
    cell = page.locator('.wide td[data-tone="worse"] strong').first
    color = cell.evaluate("e => getComputedStyle(e).color")
    red, green, blue = map(int, color[4:-1].split(","))
    assert red > 1.5 * green
    assert red > 1.5 * blue


def test_a_workloads_name_leads_to_its_section(page) -> None:
    page.get_by_role("link", name="chat_long", exact=True).click()
    expect(page.locator("section.workload:target")).to_have_attribute(
        "aria-label", "chat_long, demo"
    )


@pytest.mark.parametrize("width", [360, 1200])
def test_a_screenshot_is_not_blank(page, width) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    page.set_viewport_size({"width": width, "height": 900})
    plot = page.get_by_role("group", name="Throughput", exact=True).locator("svg")
    width_px = plot.bounding_box()["width"]
    drawn = image.open(BytesIO(plot.screenshot())).convert("RGB")
    greens = [
        count
        for count, (red, green, blue) in drawn.getcolors(maxcolors=1 << 24)
        if green > red + 60 and green > blue
    ]
    # The bar of the greatest ratio that is a gain, 2.4, is a good part of the picture's width.
    assert sum(greens) > 0.2 * width_px * 5
