"""Copying the matched slots alone is enough: the real scheduler, and what each pass would read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from benchmarks import traces
from benchmarks.cost_model import CostModel
from benchmarks.engine_settings import EngineSettings
from sgl_vllm.config import Options
from sgl_vllm.radix.slot_copies import copy_whole_blocks, slots_to_copy, use_in_worker
from sgl_vllm.scheduler import control as control_module
from sgl_vllm.scheduler.assembly import Parts
from sgl_vllm.scheduler.control import EngineControl
from sgl_vllm.scheduler.stats import BitmaskCounters, StepCounters
from tests.engine.checked_simulation import CheckedSimulation

BLOCK_SIZE = 16


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", ["chat", "tree_of_thought", "fork_join"])
def test_every_pass_reads_what_was_computed_for_its_tokens(
    name: str, async_scheduling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a small cache, preemption and aborts. Copies of a step are independent of each other."""
    num_copies, num_slots = 0, 0
    stock = CheckedSimulation.check_kv

    def check_kv(self: CheckedSimulation, step: Any) -> None:
        nonlocal num_copies, num_slots
        copies = slots_to_copy(step, BLOCK_SIZE)
        sources = {source for source, _, _ in copies}
        destinations = {destination for _, destination, _ in copies}
        assert len(destinations) == len(copies) and not sources & destinations
        num_copies += len(copies)
        for source, destination, number in copies:
            slots = self.memory._slots
            slots[destination, :number] = slots[source, :number]
            num_slots += number
        kept, step.kv_cache_block_copies = step.kv_cache_block_copies, None
        stock(self, step)
        step.kv_cache_block_copies = kept

    monkeypatch.setattr(CheckedSimulation, "check_kv", check_kv)
    trace = traces.generate(name, 150)
    num_tokens = max(0.05 * traces.reuse(trace).working_set_tokens, trace.max_call_tokens)
    settings = EngineSettings(
        num_blocks=int(num_tokens / BLOCK_SIZE) + 2,
        block_size=BLOCK_SIZE,
        max_model_len=trace.max_call_tokens + 1,
        max_num_seqs=16,
        async_scheduling=async_scheduling,
    )
    result = CheckedSimulation(
        trace, "sgl", settings, CostModel(), concurrency=8, abort_share=0.02
    ).run()
    assert result.copied_blocks == num_copies > 20
    assert num_slots < num_copies * BLOCK_SIZE * 0.8


def control(
    device: str, radix: bool = True, asked_for: bool = True, num_groups: int = 1
) -> EngineControl:
    groups = SimpleNamespace(num_groups=num_groups)
    pool = SimpleNamespace(guarded=lambda step, *args: step(*args))
    tree: Any = SimpleNamespace(block_size=BLOCK_SIZE, groups=groups, pool=pool)
    scheduler: Any = None
    engine: Any = None
    config: Any = SimpleNamespace(device_config=SimpleNamespace(device_type=device))
    return EngineControl(
        Parts(scheduler, engine, off={}, radix=tree if radix else None),
        Options(radix_slot_copy=asked_for),
        config,
        StepCounters(),
        BitmaskCounters(),
    )


def test_workers_are_told_where_it_can_work_and_why_not_is_said_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []
    warnings: list[Any] = []
    monkeypatch.setattr(
        control_module.logger, "warning", lambda form, *values: warnings.append(form % values)
    )

    def collective_rpc(method: Any, args: tuple[Any, ...] = ()) -> list[str | None]:
        calls.append((method, args))
        return [None, "the layers differ", "the layers differ"]

    control("cuda", radix=False).prepare_workers(collective_rpc)
    control("cuda", asked_for=False).prepare_workers(collective_rpc)
    assert calls == warnings == []
    control("cpu").prepare_workers(collective_rpc)
    assert calls == [] and warnings == ["sgl-vllm: radix_slot_copy has no effect: it needs a GPU"]
    control("cuda", num_groups=2).prepare_workers(collective_rpc)
    assert calls == [(copy_whole_blocks, ())]
    assert "several KV-cache groups" in warnings.pop()
    control("cuda").prepare_workers(collective_rpc)
    assert calls[1:] == [(use_in_worker, (BLOCK_SIZE,))]
    assert warnings[1:] == ["sgl-vllm: radix_slot_copy has no effect: the layers differ"]
