"""When decode is grouped, and plans of one step after the other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_vllm.kernels import decode_step, prefix_levels, prefix_plan
from sgl_vllm.kernels.decode_step import Layer, Planner, num_decodes
from tests.effort import examples

LAYER = Layer(head_size=128, num_heads=32, num_kv_heads=8)
SHAPE = prefix_levels.AttentionShape(4, 1, 32, 2, 16)
EAGER = replace(prefix_levels.FREE, min_split_tokens_per_row=0)

# -- when it applies


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"is_decoder": False}, "not a decoder"),
        ({"has_sliding_window": True}, "sliding window"),
        ({"has_alibi": True}, "ALiBi"),
        ({"has_softcap": True}, "caps its logits"),
        ({"has_sinks": True}, "sinks"),
        ({"has_quantized_cache": True}, "quantized"),
        ({"decode_context_parallel": 2}, "parallelism"),
        ({"head_size": 72}, "head size is 72"),
        ({"head_size": 512}, "head size is 512"),
        ({"num_kv_heads": 5}, "evenly"),
    ],
)
def test_layers_that_ask_for_more_are_not_for_us(changed: dict, reason: str | None) -> None:
    why_not = replace(LAYER, **changed).why_not
    assert why_not is None if reason is None else why_not is not None and reason in why_not


@pytest.mark.parametrize(
    ("starts", "expected"),
    [
        pytest.param([0, 1, 2, 3], 3, id="decodes"),
        pytest.param([0, 1, 2, 2, 2], 2, id="padded"),
        pytest.param([0, 0, 0], 0, id="padding alone"),
        pytest.param([0], 0, id="no request"),
        pytest.param([0, 1, 3], None, id="two tokens"),
        pytest.param([0, 1, 1, 2], None, id="none in the middle"),
        pytest.param([0, 2, 2], None, id="two tokens, padded"),
    ],
)
def test_a_batch_of_decodes(starts: list[int], expected: int | None) -> None:
    assert num_decodes(np.array(starts, dtype=np.int32)) == expected


# -- one step after the other


def batch(num_requests: int = 4, shared: int = 300, own: int = 10) -> tuple[np.ndarray, np.ndarray]:
    table = np.arange(num_requests * (shared + own), dtype=np.int32).reshape(num_requests, -1)
    table[:, :shared] = np.arange(shared) + 10**6
    return table, np.full(num_requests, (shared + own - 2) * 16, dtype=np.int32)


def test_a_plan_is_kept_while_requests_grow() -> None:
    planner = Planner(SHAPE, EAGER, max_steps=3)
    table, lengths = batch()
    first = planner.plan(table, lengths)
    assert first is not None and set(first.shared_blocks) == {300}
    table[0, -1] = 7  # a new block of its own
    assert planner.plan(table, lengths + 1) is first
    assert planner.plan(table, lengths + 2) is first
    assert planner.plan(table, lengths + 3) is not first  # after max_steps


def test_no_plan_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(decode_step, "make_plan", lambda *given: calls.append(given))
    planner = Planner(SHAPE, EAGER, max_steps=5)
    table, lengths = batch(shared=0)
    for step in range(6):
        assert planner.plan(table, lengths + step) is None
    assert len(calls) == 2


@settings(max_examples=examples(20))
@given(st.data())
def test_a_kept_plan_is_right_for_the_table_of_its_step(data: st.DataObject) -> None:
    planner = Planner(SHAPE, EAGER)
    table, lengths = batch(num_requests=3, shared=20, own=4)
    for step in range(4):
        for _ in range(data.draw(st.integers(0, 2))):
            row, block = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 23))
            table[row, block] = data.draw(st.integers(0, 5))
        plan = planner.plan(table, lengths + step)
        if plan is None:
            continue
        for item in plan.items[plan.items[:, prefix_plan.IS_OPEN] == 0]:
            first = item[prefix_plan.FIRST_MEMBER]
            members = plan.members[first : first + item[prefix_plan.NUM_MEMBERS]]
            blocks = slice(item[prefix_plan.KV_START] // 16, item[prefix_plan.KV_END] // 16)
            if len(members) > 1:
                assert (table[members, blocks] == table[item[prefix_plan.TABLE_ROW], blocks]).all()
