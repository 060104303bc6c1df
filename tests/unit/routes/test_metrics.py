"""What `/metrics` shows of the engines' reports."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client import REGISTRY, Counter, make_asgi_app
from prometheus_client.parser import text_string_to_metric_families

from sgl_vllm.fsm.vllm.backend import BackendCounters
from sgl_vllm.radix.stats import RadixCounters, RadixGauges
from sgl_vllm.routes import metrics
from sgl_vllm.routes.metrics import SglCollector
from sgl_vllm.scheduler.queue import OrderCounters
from sgl_vllm.scheduler.stats import BitmaskCounters, EngineStats, StepCounters
from tests.fake_engines import FakeEngine, fake_server

STATS = EngineStats(
    parts={"radix": "on", "jump_forward": "by option"},
    steps=StepCounters(forward_passes=7),
    radix=RadixCounters(
        hit_tokens=150,
        whole_block_hit_tokens=128,
        partial_block_hit_tokens=22,
        host_hit_tokens=64,
        disk_hit_tokens=32,
    ),
    cache=RadixGauges(tree_tokens=250, block_size=16),
    schedule=OrderCounters(overtakes=9),
    fsm=BackendCounters(compilations=12, compile_s=0.5),
    structured_output=BitmaskCounters(masked_steps=20, mask_s=0.25),
)


def samples(stats: EngineStats | None) -> dict[str, float]:
    """By name and labels, as a scrape has them."""
    collector = SglCollector()
    collector.stats = stats
    return {
        sample.name + "".join(f"{{{value}}}" for value in sample.labels.values()): sample.value
        for family in collector.collect()
        for sample in family.samples
    }


def test_hits_are_labeled_by_tier_times_come_with_their_counts_and_a_part_that_is_off_is_0() -> (
    None
):
    tiers = {"whole_blocks": 128, "partial_block": 22, "host": 64, "disk": 32}
    times = {"compile_seconds_count": 12, "compile_seconds_sum": 0.5}
    times |= {"mask_seconds_count": 20, "mask_seconds_sum": 0.25}
    expected = {f"tier_hit_tokens_total{{{tier}}}": number for tier, number in tiers.items()}
    expected |= {"prefix_hit_tokens_total": 150, "part_on{radix}": 1, "part_on{jump_forward}": 0}
    found = samples(STATS)
    for name, number in (expected | times).items():
        assert found[f"sgl_vllm:{name}"] == number, name


def test_what_an_engine_does_not_count_is_not_exported() -> None:
    off = EngineStats(parts={"radix": "by option"}, steps=StepCounters(forward_passes=7))
    exported = {"sgl_vllm:part_on{radix}", "sgl_vllm:forward_passes_total"}
    assert set(samples(off)) == exported
    assert samples(None) == samples(EngineStats()) == {}


# -- one API server of several


@pytest.fixture
def let_time_pass(monkeypatch) -> Callable[[], None]:
    """Lets the age of the last report pass."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(metrics, "time", SimpleNamespace(monotonic=lambda: clock.now))

    def advance() -> None:
        clock.now += 1.01

    return advance


@pytest.fixture
def shared_counts(monkeypatch, tmp_path) -> None:
    """As vLLM has it where several processes count: what is told is put together per scrape."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))


def ran(num_passes: int) -> EngineStats:
    return EngineStats(steps=StepCounters(num_passes))


def told_by(page: Any) -> dict[str, float]:  # of httpx or httpx2, by the version of Starlette
    assert page.status_code == 200 and page.headers["Content-Type"].startswith("text/plain")
    families = text_string_to_metric_families(page.text)
    return {sample.name: sample.value for family in families for sample in family.samples}


@pytest.mark.usefixtures("shared_counts")
def test_an_api_server_tells_of_all_engines_what_they_say_at_that_moment(let_time_pass) -> None:
    engines = [FakeEngine(stats=ran(passes)) for passes in (7, 20)]
    client = TestClient(fake_server(*engines))
    for _ in range(3):  # within a second
        assert told_by(client.get("/metrics")) == {"sgl_vllm:forward_passes_total": 27}
    assert engines[0].asked == [("stats", None)]
    engines[0].answers["stats"] = ran(8)
    let_time_pass()
    assert told_by(client.get("/metrics/")) == {"sgl_vllm:forward_passes_total": 28}


def test_a_page_has_all_that_was_counted_before_its_scrape() -> None:
    """vLLM's own metrics are never a second old, even if the plugin's are."""
    counted = Counter("counted", "By this test.", registry=REGISTRY)

    async def ask(app: FastAPI) -> EngineStats:
        return ran(7)

    app = FastAPI()
    app.mount("/metrics", make_asgi_app(REGISTRY))
    app.add_middleware(
        metrics.MetricsMiddleware,
        collector=SglCollector(),
        registry=REGISTRY,
        ask=ask,
        max_age_s=metrics.MAX_AGE_S,
    )
    client = TestClient(app)
    try:
        for number in (1, 2, 3):
            counted.inc()
            assert told_by(client.get("/metrics"))["counted_total"] == number
        only = told_by(client.get("/metrics", params={"name[]": "counted_total"}))
        assert only == {"counted_total": 3}
    finally:
        REGISTRY.unregister(counted)


@pytest.mark.usefixtures("shared_counts")
def test_no_older_counts_are_told_when_an_engine_does_not_answer(let_time_pass) -> None:
    engine = FakeEngine(stats=ran(7))
    client = TestClient(fake_server(engine))
    assert told_by(client.get("/metrics"))

    def fail() -> None:
        raise RuntimeError("the engine is gone")

    engine.answers["stats"] = fail
    let_time_pass()
    assert told_by(client.get("/metrics")) == {}


@pytest.mark.usefixtures("shared_counts")
def test_a_server_behind_a_path_tells_the_same() -> None:
    client = TestClient(fake_server(FakeEngine(stats=ran(7)), root_path="/one"))
    for path in ("/metrics", "/one/metrics"):
        assert told_by(client.get(path)) == {"sgl_vllm:forward_passes_total": 7}
