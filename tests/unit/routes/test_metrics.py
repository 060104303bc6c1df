"""What `/metrics` shows of the engines' answers, and that it is documented."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

import sgl_vllm
from sgl_vllm.routes.engines import merge_stats
from sgl_vllm.routes.metrics import _COUNTERS, _GAUGES, _SUMMARIES, PREFIX, SglCollector
from tests.fake_engines import FakeEngine, fake_server

PAGE = Path(sgl_vllm.__file__).parent.parent / "docs" / "operations.md"

STATS: dict[str, Any] = {
    "parts": {"radix": "on", "jump_forward": "by option"},
    "forward_passes": 7,
    "radix": {
        "lookups": 4,
        "prompt_tokens": 400,
        "hit_tokens": 150,
        "partial_block_hits": 2,
        "partial_block_hit_tokens": 22,
        "host_hit_tokens": 64,
        "disk_hit_tokens": 32,
        "p2p_hit_tokens": 0,
        "other_tier_hit_tokens": 0,
        "tier_declined_tokens": 8,
        "retained_tails": 1,
        "evicted_blocks": 3,
        "evicted_tokens": 40,
        "expired_tokens": 5,
        "tree_nodes": 6,
        "tree_tokens": 250,
        "tree_blocks": 17,
        "cache_tokens": 1600,
        "protected_tokens": 64,
        "pinned_tokens": 32,
        "block_size": 16,
    },
    "schedule": {"ordered_steps": 8, "passes": 9, "held_back": 10},
    "fsm": {
        "ours": 1,
        "ours_cached": 2,
        "xgrammar": 3,
        "guidance": 4,
        "refused": 5,
        "errors": 6,
        "compilations": 12,
        "compile_s": 0.5,
    },
    "structured_output": {"masked_steps": 20, "mask_s": 0.25},
    "jump_forward": {
        "jumps": 3,
        "forced_tokens": 30,
        "stale_tokens": 1,
        "released_when_stuck": 0,
        "errors": 0,
    },
    "select": {"scored_requests": 2},
}


def samples(stats: dict[str, Any]) -> dict[str, float]:
    """By name and labels, as a scrape has them."""
    collector = SglCollector()
    collector.stats = stats
    return {
        sample.name + "".join(f"{{{value}}}" for value in sample.labels.values()): sample.value
        for family in collector.collect()
        for sample in family.samples
    }


def test_hits_are_told_by_tier_and_add_up() -> None:
    found = samples(STATS)
    assert found["sgl_vllm:tier_hit_tokens_total{whole_blocks}"] == 128
    assert found["sgl_vllm:tier_hit_tokens_total{partial_block}"] == 22
    assert found["sgl_vllm:tier_hit_tokens_total{host}"] == 64
    assert found["sgl_vllm:tier_hit_tokens_total{disk}"] == 32
    assert found["sgl_vllm:prefix_hit_tokens_total"] == 150


def test_times_are_told_with_their_counts() -> None:
    found = samples(STATS)
    assert found["sgl_vllm:compile_seconds_count"] == 12
    assert found["sgl_vllm:compile_seconds_sum"] == 0.5
    assert found["sgl_vllm:mask_seconds_count"] == 20
    assert found["sgl_vllm:mask_seconds_sum"] == 0.25


def test_a_part_that_is_off_is_told() -> None:
    found = samples(STATS)
    assert found["sgl_vllm:part_on{radix}"] == 1
    assert found["sgl_vllm:part_on{jump_forward}"] == 0


def test_what_an_engine_does_not_count_is_not_told() -> None:
    off = {"parts": {"radix": "by option"}, "radix": {"tree_tokens": 0}, "fsm": {}}
    assert set(samples(off)) == {"sgl_vllm:part_on{radix}", "sgl_vllm:tree_tokens"}
    assert samples({}) == {}


def test_several_engines_are_added_up_times_too() -> None:
    found = samples(merge_stats([STATS, STATS]))
    assert found["sgl_vllm:compile_seconds_sum"] == 1.0
    assert found["sgl_vllm:tier_hit_tokens_total{partial_block}"] == 44


def test_every_metric_is_documented_and_every_documented_one_is_there() -> None:
    collector = SglCollector()
    collector.stats = STATS
    told = {family.name.removeprefix(PREFIX): family.type for family in collector.collect()}
    assert told.keys() >= {*_COUNTERS, *_GAUGES, *_SUMMARIES}, "STATS lacks some"
    documented = re.findall(r"^\| `(\w+)[^|]*\| (\w+) \|", PAGE.read_text(), re.MULTILINE)
    assert dict(documented) == told


# -- one API server of several


@pytest.fixture
def shared_counts(monkeypatch, tmp_path) -> None:
    """As vLLM has it where several processes count: what is told is put together per scrape."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))


def told_by(page: httpx.Response) -> dict[str, float]:
    assert page.status_code == 200 and page.headers["Content-Type"].startswith("text/plain")
    families = text_string_to_metric_families(page.text)
    return {sample.name: sample.value for family in families for sample in family.samples}


@pytest.mark.usefixtures("shared_counts")
def test_an_api_server_tells_of_all_engines_what_they_say_at_that_moment() -> None:
    engines = [FakeEngine(stats={"forward_passes": passes}) for passes in (7, 20)]
    client = TestClient(fake_server(*engines))
    assert told_by(client.get("/metrics")) == {"sgl_vllm:forward_passes_total": 27}
    engines[0].answers["stats"] = {"forward_passes": 8}
    assert told_by(client.get("/metrics/")) == {"sgl_vllm:forward_passes_total": 28}


@pytest.mark.usefixtures("shared_counts")
def test_no_older_counts_are_told_when_an_engine_does_not_answer() -> None:
    engine = FakeEngine(stats={"forward_passes": 7})
    client = TestClient(fake_server(engine))
    assert told_by(client.get("/metrics"))

    def fail() -> None:
        raise RuntimeError("the engine is gone")

    engine.answers["stats"] = fail
    assert told_by(client.get("/metrics")) == {}


@pytest.mark.usefixtures("shared_counts")
def test_a_server_behind_a_path_tells_the_same() -> None:
    client = TestClient(fake_server(FakeEngine(stats={"forward_passes": 7}), root_path="/one"))
    for path in ("/metrics", "/one/metrics"):
        assert told_by(client.get(path)) == {"sgl_vllm:forward_passes_total": 7}
