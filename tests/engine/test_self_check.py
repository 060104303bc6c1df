"""The self-check on real engines: a planted fault switches off its part, and no other."""

from __future__ import annotations

import itertools
import json
import logging
import random
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.config import KVEventsConfig, KVTransferConfig
from vllm.v1.core.sched.scheduler import Scheduler

from sgl_vllm.commands import cli
from sgl_vllm.config import Options
from sgl_vllm.fsm.vllm.grammar import SglGrammar
from sgl_vllm.jump.jump import JumpForward
from sgl_vllm.part import SchedulerFacts
from sgl_vllm.radix.manager import RadixKVCacheManager
from sgl_vllm.radix.pool import RadixBlockPool
from sgl_vllm.scheduler import select
from sgl_vllm.self_check import check, driver
from sgl_vllm.self_check.check import check_engine
from sgl_vllm.self_check.marker import DeviceLost
from sgl_vllm.self_check.plan import marker_for
from tests.engine.engine import KV_CACHE_BYTES, MODEL, Ask, Engine, in_format, random_asks, words
from tests.engine.test_radix import scores, scoring
from tests.platforms import asynchronous

SETTINGS = {"block_size": 32, "num_gpu_blocks_override": 200}
ALL = ("radix", "schedule", "fsm", "jump_forward", "select")
NAMES = ("Ann", "Bob")


@pytest.fixture(scope="module", autouse=True)
def overlap():
    """On vLLM's choice for a CPU nothing is checked by default, so engines of these tests schedule
    asynchronously unless they are told not to."""
    with pytest.MonkeyPatch.context() as patch:
        asynchronous.allow(patch)
        yield


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SGL_VLLM_CACHE", str(tmp_path))
    monkeypatch.delenv("SGL_VLLM_CONFIG", raising=False)
    return tmp_path / "self_check"


def start_unchecked(start, **settings) -> Engine:
    return start(plugin={"self_check": "off"}, **SETTINGS, **settings)


def asks(engine: Engine) -> list[Ask]:
    """Prompts that share beginnings, and scores of the ends of some."""
    shared = [words(75, seed) for seed in range(3)]
    ends = [Ask(shared[0] + words(4, seed), scoring(75)) for seed in range(3)]
    return [*random_asks(12, shared, seed=1), *ends]


def answers(engine: Engine) -> list[object]:
    """What the engine answers, twice: from an empty cache and from a full one."""
    found: list[object] = []
    for _ in range(2):
        for ask, output in zip(asks(engine), engine.run(asks(engine)), strict=True):
            if ask.params.prompt_logprobs is not None:
                found.append([round(score, 3) for score in scores(output, 4)])
            else:
                found.append(list(output.outputs[0].token_ids))
    return found


def structured(engine: Engine) -> list[str]:
    regex = r'\{"name": "(Ann|Bob)", "age": [1-9][0-9]\}'
    asks = [Ask(words(20 + seed, seed), in_format(80, {"regex": regex})) for seed in range(4)]
    outputs = engine.run(asks)
    return [output.outputs[0].text for output in outputs]


@pytest.fixture(scope="module")
def right(request):
    """The answers of stock vLLM, to be computed before another engine starts."""
    found: list[object] = []

    def of(start) -> list[object]:
        if not found:
            stock = start(async_scheduling=False, **SETTINGS)
            found.extend(answers(stock))
        return found

    return of


# -- planted faults -------------------------------------------------------------------------------


def copy_the_wrong_block(patch):
    schedule = Scheduler.schedule

    def wrong(scheduler, *args, **kwargs):
        output = schedule(scheduler, *args, **kwargs)
        copies = output.kv_cache_block_copies or []
        output.kv_cache_block_copies = [
            copy._replace(src_block_id=copy.src_block_id ^ 1) for copy in copies
        ] or None
        return output

    patch.setattr(Scheduler, "schedule", wrong)


def keep_a_stale_row(patch):
    patch.setattr(JumpForward, "_drop_in_flight", lambda jump, request: None)


def shift_scores_by_one(patch):
    last_rows = select._last_rows

    def shifted(*args):
        rows = last_rows(*args)
        assert rows is not None
        return rows._replace(logprobs=rows.logprobs.roll(1, 0))

    patch.setattr(select, "_last_rows", shifted)


def leak_a_block(patch):
    touch = RadixBlockPool.touch

    def leaking(pool, blocks):
        touch(pool, blocks)
        if not pool.is_off and blocks:
            blocks[0].ref_cnt += 1

    patch.setattr(RadixBlockPool, "touch", leaking)


def mask_the_wrong_row(patch):
    fill = SglGrammar.fill_bitmask

    def wrong(grammar, bitmask, index):
        fill(grammar, bitmask, index ^ 1)

    patch.setattr(SglGrammar, "fill_bitmask", wrong)


def raise_in_a_step(patch):
    def fail(jump, outputs, unfinished):
        raise RuntimeError("planted")

    patch.setattr(JumpForward, "after_update", fail)


FAULTS = {
    copy_the_wrong_block: ("radix", "token .* is|log-probability"),
    keep_a_stale_row: ("jump_forward", "IndexError|request"),
    mask_the_wrong_row: ("fsm", "does not fit the format|request"),
    shift_scores_by_one: ("select", "token 0 has log-probability"),
    leak_a_block: ("radix", "blocks of the cache are not free|disagree|cannot be emptied"),
    raise_in_a_step: ("jump_forward", "RuntimeError: planted"),
}
CASES = [
    *((fault, True) for fault in (copy_the_wrong_block, keep_a_stale_row)),
    *(pytest.param(fault, True, marks=pytest.mark.slow) for fault in [*FAULTS][2:]),
    # Without a step in flight, there is no stale row at a jump.
    *(
        pytest.param(fault, False, marks=pytest.mark.nightly)
        for fault in FAULTS
        if fault is not keep_a_stale_row
    ),
]


@pytest.mark.parametrize(
    ("fault", "is_async"), CASES, ids=lambda one: getattr(one, "__name__", one)
)
def test_a_fault_switches_off_its_part_and_no_other(start, right, fault, is_async, monkeypatch):
    part, says = FAULTS[fault]
    want = right(start)
    engine = start_unchecked(start, async_scheduling=is_async)
    with monkeypatch.context() as patch:
        fault(patch)
        # Without our automata, xgrammar's process has to start before a structured request runs.
        patch.setattr(driver, "STALLED_S", 30.0 if part == "fsm" else 5.0)
        report = check_engine(engine.core, engine.scheduler.parts)
        parts = engine.scheduler.sgl_vllm.stats().parts
        assert {name for name in ALL if parts[name] != "on"} == {part}, report.to_text()
        assert parts[part].startswith("the self-check found: ")
        assert re.search(says, parts[part]), parts[part]
        pool = engine.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        assert answers(engine) == want
        assert all(json.loads(text)["name"] in NAMES for text in structured(engine))


# -- the check itself ------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_crash_of_a_part_s_check_switches_off_that_part_and_no_other(start, right, monkeypatch):
    want = right(start)
    engine, part = start_unchecked(start), "fsm"
    with monkeypatch.context() as patch:
        patch.setattr(check._Check, f"_{part}", lambda check, found: 1 / 0)
        report = check_engine(engine.core, engine.scheduler.parts)
    parts = engine.scheduler.sgl_vllm.stats().parts
    assert {name for name in ALL if parts[name] != "on"} == {part}
    assert "the check itself failed: ZeroDivisionError" in parts[part]
    assert not report.agrees
    assert answers(engine) == want
    engine.check_nothing_is_left()


@pytest.mark.slow
def test_after_a_failed_run_before_any_part_is_checked_all_of_them_are_off(
    start, right, monkeypatch
):
    want = right(start)
    engine = start_unchecked(start)
    with monkeypatch.context() as patch:
        patch.setattr(RadixKVCacheManager, "allocate_slots", lambda *args, **options: 1 / 0)
        with pytest.raises(DeviceLost, match="cannot run a plain request"):
            check_engine(engine.core, engine.scheduler.parts)
    parts = engine.scheduler.sgl_vllm.stats().parts
    assert {name for name in ALL if parts[name] == "on"} == {"schedule"}
    assert "the self-check failed: ZeroDivisionError" in parts["radix"]
    assert answers(engine) == want
    pool = engine.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


def test_by_default_it_runs_before_the_first_request_and_all_parts_are_on(start, caplog, folder):
    with caplog.at_level(logging.INFO, logger="vllm.sgl_vllm"):
        engine = start(plugin={}, **SETTINGS)
    assert set(engine.scheduler.sgl_vllm.stats().parts.values()) == {"on"}
    lines = [record.getMessage() for record in caplog.records if "vllm.sgl_vllm" in record.name]
    assert "agrees" in lines[-2]
    assert lines[-1].endswith("radix on; schedule on; fsm on; jump_forward on; select on")
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_nothing_is_left_of_a_check(start):
    engine = start_unchecked(start)
    generators = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()
    counted = engine.scheduler.sgl_vllm.stats()
    free = engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    assert check_engine(engine.core, engine.scheduler.parts).agrees
    assert generators == (
        random.getstate(),
        str(np.random.get_state()),
        torch.get_rng_state().tolist(),
    )
    counts = engine.scheduler.sgl_vllm.stats()
    for part in ("radix", "evictions", "cache", "schedule", "fsm", "jump_forward", "select"):
        assert getattr(counts, part) == getattr(counted, part), part
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free
    assert engine.scheduler.make_stats().prefix_cache_stats.queries == 0
    engine.check_nothing_is_left()


@pytest.mark.slow
def test_after_a_check_that_killed_the_engine_the_parts_are_off_until_it_is_asked_again(
    start, folder
):
    engine = start_unchecked(start)
    marker = marker_for(SchedulerFacts.of(engine.scheduler), Options())
    with pytest.raises(DeviceLost), marker.held():
        raise DeviceLost
    (left,) = folder.iterdir()
    parts = start(plugin={}, **SETTINGS).scheduler.sgl_vllm.stats().parts
    assert {name for name in ALL if parts[name] == "on"} == {"schedule"}
    assert f"delete {left} or set self_check=on" in parts["radix"]
    asked_again = start(plugin={"self_check": "on"}, **SETTINGS).scheduler.sgl_vllm.stats().parts
    assert set(asked_again.values()) == {"on"}
    assert list(folder.iterdir()) == []


def test_an_engine_that_cannot_run_a_plain_request_any_more_leaves_its_marker(
    start, folder, monkeypatch
):
    engine = start_unchecked(start)
    calls = itertools.count()
    execute = engine.core.model_executor.execute_model

    def lost_after_some_steps(*args, **kwargs):
        if next(calls) > 30:
            raise RuntimeError("an illegal memory access was encountered")
        return execute(*args, **kwargs)

    monkeypatch.setattr(engine.core.model_executor, "execute_model", lost_after_some_steps)
    monkeypatch.setattr(driver, "STALLED_S", 1.0)
    with pytest.raises(DeviceLost, match="illegal memory access"):
        check_engine(engine.core, engine.scheduler.parts)
    assert len(list(folder.iterdir())) == 1


@pytest.mark.slow
def test_no_request_of_a_check_is_announced_or_stored(start, right, tmp_path, monkeypatch):
    want, store = right(start), tmp_path / "store"
    config = KVTransferConfig(
        kv_connector="ExampleConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"shared_storage_path": str(store)},
    )
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    engine = start(plugin={}, kv_transfer_config=config, kv_events_config=events, **SETTINGS)
    scheduler = engine.scheduler
    assert set(scheduler.sgl_vllm.stats().parts.values()) == {"on"}
    told: list[object] = []
    monkeypatch.setattr(scheduler, "kv_event_publisher", SimpleNamespace(publish=told.append))
    assert check_engine(engine.core, scheduler.parts).agrees
    assert told == [] and not scheduler.kv_cache_manager.take_events()
    assert not store.exists()
    assert type(scheduler.connector).__name__ == "ExampleConnector"
    assert answers(engine) == want
    assert all(json.loads(text)["name"] in NAMES for text in structured(engine))
    engine.check_nothing_is_left()
    assert told and any(store.iterdir())


@pytest.mark.slow
def test_windows_in_all_layers_pass_the_check(start):
    overrides = {"sliding_window": 64, "layer_types": ["sliding_attention"] * 4}
    engine = start(plugin={}, hf_overrides=overrides, **SETTINGS)
    assert set(engine.scheduler.sgl_vllm.stats().parts.values()) == {"on"}
    engine.check_nothing_is_left()


@pytest.mark.slow
def test_an_engine_without_the_tree_has_its_other_parts_checked(start):
    engine = start(plugin={"radix": False}, **SETTINGS)
    states = engine.scheduler.sgl_vllm.stats().parts
    assert {name for name in ALL if states[name] == "on"} == {"schedule", "fsm", "jump_forward"}
    assert "self-check" not in states["radix"] + states["select"]
    assert all(json.loads(text)["name"] in NAMES for text in structured(engine))
    engine.check_nothing_is_left()


@pytest.mark.slow
def test_the_command_checks_an_engine_of_its_own(tmp_path, start):
    start(**SETTINGS).stop()  # what engines of this process need is set up
    flags = ["--dtype=float32", "--enforce-eager", "--max-model-len=1024", "--block-size=32"]
    flags += ["--num-gpu-blocks-override=200", "--port=8000"]
    flags += [f"--kv-cache-memory-bytes={KV_CACHE_BYTES}"]
    arguments = ["verify", "--output", str(tmp_path), MODEL, *flags]
    assert cli.main(arguments) == 0
    report = json.loads((tmp_path / "sgl-vllm-verify.json").read_text())
    assert [part["name"] for part in report["parts"]] == ["radix", "fsm", "jump_forward", "select"]
    assert report["agrees"] and report["facts"]["block_size"] == 32
