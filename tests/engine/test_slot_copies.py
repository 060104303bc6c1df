"""Where the matched slots of a block are copied alone.

`test_simulate.py` shows that it is enough.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from sgl_vllm.config import Options
from sgl_vllm.radix.slot_copies import copy_whole_blocks, use_in_worker
from sgl_vllm.scheduler import control as control_module
from sgl_vllm.scheduler.assembly import Parts
from sgl_vllm.scheduler.control import EngineControl
from sgl_vllm.scheduler.stats import BitmaskCounters, StepCounters

BLOCK_SIZE = 16


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
