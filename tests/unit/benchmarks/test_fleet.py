"""Many simulated workers behind a router: the command, the worker, and what policies come to."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks import simulate, traces
from benchmarks.cost_model import CostModel
from benchmarks.fleet import Copies, FleetResult, FleetRun
from benchmarks.fleet_policies import POLICIES, LeastLoaded, PrefixAffinity
from benchmarks.fleet_worker import BlockCache, Request, Worker
from benchmarks.traces import Call, Program, Trace
from tools.engine_harness.settings import EngineSettings

SETTINGS = EngineSettings(num_blocks=100, block_size=16, max_model_len=1600)
COST = CostModel(step_s=1.0, prefill_token_s=0.0, decode_token_s=0.0, context_token_s=0.0)


def run_to_end(worker: Worker) -> dict[Request, float]:
    """When each request ended."""
    ended_s = {}
    while worker.end_s < math.inf:
        now_s = worker.end_s
        for request in worker.end_passes().finished:
            ended_s[request] = now_s
    return ended_s


def request_of(num_prompt: int, num_reply: int, first_id: int = 0) -> Request:
    return Request(
        num_prompt, num_reply, range(first_id, first_id + (num_prompt + num_reply) // 16)
    )


# -- the worker


def test_a_pass_is_filled_and_replies_end_after_as_many_passes() -> None:
    worker = Worker(SETTINGS, COST)
    first, second = request_of(64, 10), request_of(64, 3, 50)
    worker.send(first, 0.0)
    worker.send(second, 0.5)
    assert worker.end_s == 1.0  # the second came too late for the first pass
    assert run_to_end(worker) == {first: 10.0, second: 4.0}
    assert worker.busy_s == 10.0


def test_a_long_prompt_is_computed_in_chunks() -> None:
    settings = EngineSettings(100, 16, 1600, max_num_batched_tokens=100)
    worker = Worker(settings, COST)
    request = request_of(250, 1)
    worker.send(request, 0.0)
    assert run_to_end(worker) == {request: 3.0}


def test_a_new_request_cuts_decoding_short_after_the_pass_that_runs() -> None:
    worker = Worker(SETTINGS, COST)
    first, second = request_of(16, 100), request_of(16, 1, 50)
    worker.send(first, 0.0)
    worker.end_passes()
    assert worker.end_s == 100.0
    worker.send(second, 40.5)
    assert worker.end_s == 41.0
    assert run_to_end(worker) == {first: 100.0, second: 42.0}


def test_what_was_computed_is_found_again_but_for_the_last_token() -> None:
    cache = BlockCache(num_blocks=10, block_size=16)
    first, again = request_of(64, 16), request_of(64, 16)
    assert cache.admit(first) and first.num_cached == 0
    cache.release(first)
    assert cache.admit(again) and again.num_cached == 48
    longer = request_of(81, 15)
    cache.release(again)
    assert cache.admit(longer) and longer.num_cached == 80  # the reply too


def test_the_least_recently_used_goes_first_from_its_end_and_running_ones_stay() -> None:
    cache = BlockCache(num_blocks=10, block_size=16)
    old, running, new = request_of(64, 0), request_of(64, 0, 10), request_of(64, 0, 20)
    assert cache.admit(old)
    cache.release(old)
    assert cache.admit(running)
    assert cache.admit(new)
    assert not cache.admit(request_of(64, 0, 30))
    cache.release(new)
    again = request_of(64, 0)
    assert cache.admit(again) and again.num_cached == 32


def test_a_request_that_can_never_fit_is_an_error() -> None:
    with pytest.raises(ValueError, match="larger than the cache"):
        Worker(SETTINGS, COST).send(request_of(2000, 1), 0.0)


# -- copies of a trace


def test_copies_share_what_all_prompts_begin_with_and_nothing_else() -> None:
    system = np.arange(32, dtype=np.int32)
    programs = tuple(
        Program((Call(np.concatenate([system, tail]), np.array([5], dtype=np.int32)),))
        for tail in (np.full(32, 7, dtype=np.int32), np.full(32, 9, dtype=np.int32))
    )
    copies = Copies(Trace("t", programs), 2, 16, 0)
    one, other = copies.prompt(0, 0, 0), copies.prompt(1, 0, 0)
    assert (one[:32] == other[:32]).all() and (one[32:] != other[32:]).all()
    ids, other_ids = copies.request(0, 0, 0).block_ids, copies.request(1, 0, 0).block_ids
    assert ids[:2] == other_ids[:2] and set(ids[2:]).isdisjoint(other_ids[2:])


# -- policies


def test_the_least_loaded_has_the_fewest_open_requests() -> None:
    policy = LeastLoaded(3)
    choices = [policy.choose(np.zeros(1, dtype=np.int32)) for _ in range(6)]
    policy.finished(choices[4])
    assert policy.choose(np.zeros(1, dtype=np.int32)).worker == choices[4].worker


def test_prefix_affinity_goes_by_match_then_by_size_and_by_load_when_that_is_uneven() -> None:
    router = PrefixAffinity()
    for worker in range(2):
        router.add_worker(worker)
    rng = np.random.default_rng(0)
    hot = rng.integers(0, 1000, 1000, dtype=np.int32)
    home = router.choose(hot).worker
    assert isinstance(home, int)
    assert [router.choose(hot).worker for _ in range(64)] == [home] * 64
    assert router.choose(hot).worker == 1 - home  # 65 open ones against none
    assert router.choose(rng.integers(0, 1000, 50, dtype=np.int32)).worker == home  # of one size


def study(policy: str, num_workers: int = 8) -> FleetResult:
    trace = traces.generate("long_chat", 150)
    reuse = traces.reuse(trace)
    settings = EngineSettings(reuse.working_set_tokens // 2 // 128, 128, trace.max_call_tokens + 1)
    span_s = simulate.least_time_s(trace, reuse, CostModel(), settings) / 0.8
    return FleetRun(policy, num_workers, settings, CostModel(), span_s).carry_out(
        trace, lambda: None
    )


def test_the_router_finds_more_than_round_robin_and_waits_less_than_the_least_loaded() -> None:
    by_policy = {policy: study(policy) for policy in POLICIES}
    assert len({one.prompt_tokens for one in by_policy.values()}) == 1
    ours = by_policy["cost"]
    assert ours.cached_prompt_tokens >= 2 * by_policy["round-robin"].cached_prompt_tokens
    assert ours.ttft_p99_s <= by_policy["least-loaded"].ttft_p99_s
    assert ours.imbalance <= 1.3
    assert ours == study("cost")


# -- the command

ASKED = ["--trace", "chat", "--requests", "60", "--load", "0.8", "--cache-fraction", "0.5"]


def test_the_command_compares_policies_in_one_process_or_two(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*ASKED, "--workers", "1,4", "--routing", "round-robin,cost", "--json"]
    assert simulate.main([*words, str(tmp_path / "one.json")]) == 0
    table = capsys.readouterr().out
    assert "load max/mean" in table
    assert simulate.main([*words, str(tmp_path / "two.json"), "--jobs", "2"]) == 0
    one, two = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two"))
    assert one["results"] == two["results"]
    assert [(row["num_workers"], row["policy"]) for row in one["results"]] == [
        (1, "round-robin"),
        (1, "cost"),
        (4, "round-robin"),
        (4, "cost"),
    ]


def test_the_command_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    words = [*ASKED, "--workers", "1,2", "--plot", str(tmp_path / "study.svg")]
    assert simulate.main(words) == 0
    assert "prefix-affinity" in (tmp_path / "study.svg").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--cache-fraction 0.5", "--workers needs one --load"),
        ("--cache-fraction 0.5,1 --load 1", "--workers takes one cache size"),
        ("--cache-fraction 0.5 --load 1 --routing random", "--routing has no 'random'"),
        ("--cache-fraction 0.5 --load 1 --policy lpm", "--policy has no meaning with --workers"),
    ],
)
def test_what_cannot_be_is_said_before_anything_runs(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        simulate.main(["--trace", "chat", "--workers", "2", *words.split()])
    assert message in capsys.readouterr().err
