"""The adapter to vLLM, as far as it goes without a GPU: no FlashAttention, no engine."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker.gpu import block_table

from sgl_vllm.kernels import attention_backend, prefix_levels, prefix_plan
from sgl_vllm.kernels.attention_backend import (
    PrefixGroupedBuilder,
    PrefixGroupedImpl,
    PrefixGroupedMetadata,
    host_batch,
)
from sgl_vllm.kernels.decode_step import Planner
from sgl_vllm.kernels.prefix_attention import DevicePlan

SHAPE = prefix_levels.AttentionShape(4, 2, 32, 2, 16)


class Tables:
    """What of `BlockTables` is used; the real one needs memory that a GPU can see."""

    redirect_writes_to_null_block = False

    def __init__(self) -> None:
        self.input_block_tables = [torch.zeros(4, 8, dtype=torch.int32) for _ in range(2)]
        self.num_blocks = SimpleNamespace(np=np.zeros((2, 4), dtype=np.int32))

    def append_block_ids(self, req_index: int, new_block_ids: Any, overwrite: bool) -> None:
        for group, ids in enumerate(new_block_ids):
            start = 0 if overwrite else self.num_blocks.np[group, req_index]
            self.num_blocks.np[group, req_index] = start + len(ids)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """And forgotten again after the test."""
    for name in ("__init__", "append_block_ids"):
        monkeypatch.setattr(Tables, name, getattr(Tables, name))
    monkeypatch.setattr(block_table, "BlockTables", Tables)
    monkeypatch.setattr(attention_backend, "_rows_by_address", {})
    attention_backend.register()
    yield
    AttentionBackendEnum.CUSTOM.clear_override()


def impl(**changed: Any) -> PrefixGroupedImpl:
    arguments = {
        "num_heads": 4,
        "head_size": 32,
        "scale": 0.5,
        "num_kv_heads": 2,
        "alibi_slopes": None,
        "sliding_window": None,
        "kv_cache_dtype": "auto",
    }
    return PrefixGroupedImpl(**{**arguments, **changed})


def metadata(plan: DevicePlan | None) -> PrefixGroupedMetadata:
    nothing = torch.zeros(0, dtype=torch.int32)
    return PrefixGroupedMetadata(
        num_actual_tokens=2,
        max_query_len=1,
        query_start_loc=torch.tensor([0, 1, 2], dtype=torch.int32),
        max_seq_len=40,
        seq_lens=torch.tensor([40, 35], dtype=torch.int32),
        block_table=torch.tensor([[0, 1, 2], [0, 1, 3]], dtype=torch.int32),
        slot_mapping=nothing,
        prefix_plan=plan,
    )


def device_plan(shape: prefix_levels.AttentionShape = SHAPE) -> DevicePlan:
    table = np.array([[0, 1, 2], [0, 1, 3]], dtype=np.int32)
    plan = prefix_plan.build_plan(table, np.array([40, 35], dtype=np.int32), shape)
    return DevicePlan.upload(plan, "cpu")


# -- which attention is called


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []
    monkeypatch.setattr(attention_backend, "attend", lambda *given: calls.append("grouped"))
    monkeypatch.setattr(FlashAttentionImpl, "forward", lambda *given: calls.append("stock"))
    return calls


def forward(one: PrefixGroupedImpl, made: Any, **options: Any) -> None:
    query = torch.zeros(2, one.num_heads, one.head_size)
    kv_cache = torch.zeros(4, 2, 16, 64)
    one.forward(None, query, query, query, kv_cache, made, torch.empty_like(query), **options)


def test_a_step_with_a_plan_is_computed_in_groups(called: list[str]) -> None:
    forward(impl(), metadata(device_plan()))
    assert called == ["grouped"]


@pytest.mark.parametrize(
    ("one", "made", "options"),
    [
        pytest.param({}, metadata(None), {}, id="no plan"),
        pytest.param({}, None, {}, id="a profiling run"),
        pytest.param({"sliding_window": 64}, metadata(device_plan()), {}, id="a sliding window"),
        pytest.param({"num_heads": 2}, metadata(device_plan()), {}, id="other heads"),
        pytest.param(
            {}, metadata(device_plan()), {"output_scale": torch.ones(1)}, id="a quantized result"
        ),
    ],
)
def test_all_else_is_stocks(
    called: list[str], one: dict[str, Any], made: Any, options: dict[str, Any]
) -> None:
    forward(impl(**one), made, **options)
    assert called == ["stock"]


# -- the batch on the CPU


def table_of(*rows: list[int]) -> tuple[Tables, torch.Tensor]:
    """The runner's tables, in which request n has the n-th of these rows, and their batch's."""
    tables = Tables()
    for number, blocks in enumerate(rows):
        tables.append_block_ids(number, (blocks,), overwrite=True)
    return tables, tables.input_block_tables[0][: len(rows)]


def common(table: torch.Tensor, starts: list[int], lengths: list[int], **more: Any) -> Any:
    loc = torch.tensor(starts, dtype=torch.int32)
    lens = torch.tensor(lengths, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=loc,
        query_start_loc_cpu=loc,
        seq_lens=lens,
        num_reqs=len(lengths),
        num_actual_tokens=starts[-1],
        max_query_len=more.pop("max_query_len", 1),
        max_seq_len=max(lengths),
        block_table_tensor=table,
        slot_mapping=torch.zeros(0, dtype=torch.int64),
        seq_lens_cpu_upper_bound=more.pop("seq_lens_cpu_upper_bound", lens),
        req_idx=more.pop("req_idx", np.arange(len(lengths))),
        **more,
    )


@pytest.mark.parametrize(
    ("starts", "more"),
    [
        pytest.param([0, 2, 3], {"max_query_len": 2}, id="a prompt"),
        pytest.param([0, 1, 2], {"causal": False}, id="not causal"),
        pytest.param([0, 1, 2], {"rswa_prefix_lens": torch.zeros(2)}, id="a reference window"),
        pytest.param([0, 1, 2], {"seq_lens_cpu_upper_bound": None}, id="lengths unknown"),
        pytest.param([0, 0, 0], {}, id="padding alone"),
    ],
)
def test_other_batches_are_not_for_us(
    registered: None, starts: list[int], more: dict[str, Any]
) -> None:
    _tables, table = table_of([3, 4], [3, 5])
    assert host_batch(common(table, starts, [20, 30], **more)) is None


def test_a_table_that_nobody_knows_gives_no_plan(registered: None) -> None:
    tables, table = table_of([3, 4], [3, 5])
    assert host_batch(common(table.clone(), [0, 1, 2], [20, 30])) is None
    assert host_batch(common(table, [0, 1, 2], [20, 30])) is not None
    del tables
    assert host_batch(common(table, [0, 1, 2], [20, 30])) is None


def test_the_runners_tables_are_mirrored(registered: None) -> None:
    tables = Tables()
    tables.append_block_ids(3, ([9, 9, 9], [1]), overwrite=True)
    tables.append_block_ids(3, ([5], [6]), overwrite=True)
    tables.append_block_ids(1, ([5], []), overwrite=True)
    tables.append_block_ids(3, ([7, 8], []), overwrite=False)
    table, requests = tables.input_block_tables[0][:3], np.array([3, 1, 0])
    found = host_batch(common(table, [0, 1, 2, 2], [40, 10, 0], req_idx=requests))
    assert found is not None
    assert found[0][:, :3].tolist() == [[5, 7, 8], [5, 0, 0]]
    assert found[1].tolist() == [40, 10]
    found = host_batch(common(tables.input_block_tables[1], [0, 1], [10], req_idx=requests[:1]))
    assert found is not None and found[0][0, 0] == 6


def test_a_plan_goes_to_the_device_once(registered: None) -> None:
    builder = object.__new__(PrefixGroupedBuilder)
    builder.device = torch.device("cpu")
    builder._planner = Planner(SHAPE, prefix_levels.FREE)
    builder._on_device = None
    _tables, rows = table_of([1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 0])
    first = builder._plan_of(common(rows, [0, 1, 2], [100, 97]))
    assert first is not None and first.plan.num_segments == 1
    assert builder._plan_of(common(rows, [0, 1, 2], [101, 98])) is first
    assert builder._plan_of(common(rows, [0, 2, 3], [102, 99], max_query_len=2)) is None
    other = builder._plan_of(common(rows, [0, 1, 2], [103, 99]))
    assert other is not None and other is not first
