"""A worker's model runner copies slots in place of blocks, and blocks as before where it cannot."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_vllm.kernels import reference, slot_copy
from sgl_vllm.radix.slot_copies import slots_to_copy, use_in_worker

BLOCK_SIZE, NUM_BLOCKS = 4, 6


class Runner:
    """What of vLLM's model runners is used. Its own update copies whole blocks."""

    def __init__(
        self, slots: int = BLOCK_SIZE, order: Sequence[int] = (0, 1, 2, 3, 4), num_heads: int = 2
    ) -> None:
        """`order` in memory of layers, blocks, heads, slots and content."""
        generator = torch.Generator().manual_seed(0)
        sizes = (3, NUM_BLOCKS * BLOCK_SIZE // slots, num_heads, slots, 8)
        whole = torch.randn([sizes[axis] for axis in order], generator=generator)
        self.kv_caches = list(whole.permute([order.index(axis) for axis in range(5)]))
        self.kv_cache_config = SimpleNamespace(num_blocks=NUM_BLOCKS)
        self.copied: list[Any] = []

    def update(self, step: Any) -> str:
        self.copied.append(step.kv_cache_block_copies)
        return "what the runner goes on with"


class RunnerV1(Runner):
    _update_states = Runner.update


class RunnerV2(Runner):
    update_requests = Runner.update


def step(
    copies: Sequence[tuple[int, int]] | None,
    new: Sequence[tuple[list[int], int]] = (),
    running: Sequence[tuple[str, list[int] | None, int]] = (),
    resumed: Sequence[str] = (),
) -> Any:
    return SimpleNamespace(
        kv_cache_block_copies=copies,
        scheduled_new_reqs=[
            SimpleNamespace(block_ids=(blocks,), num_computed_tokens=number)
            for blocks, number in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[request_id for request_id, _, _ in running],
            new_block_ids=[None if blocks is None else (blocks,) for _, blocks, _ in running],
            num_computed_tokens=[number for _, _, number in running],
            resumed_req_ids=set(resumed),
        ),
    )


def test_a_copy_has_the_slots_that_its_request_has_computed() -> None:
    assert slots_to_copy(step([(1, 5)], new=[([2, 3, 5, 0], 11)]), BLOCK_SIZE) == [(1, 5, 3)]
    resumed = step([(1, 5)], running=[("a", [2, 5], 6)], resumed=["a"])
    assert slots_to_copy(resumed, BLOCK_SIZE) == [(1, 5, 2)]


def test_a_copy_that_no_starting_request_owns_has_all_slots() -> None:
    of_nobody = step([(1, 5)], new=[([2, 3], 5)], running=[("a", [5], 1), ("b", None, 9)])
    assert slots_to_copy(of_nobody, BLOCK_SIZE) == [(1, 5, 4)]
    assert slots_to_copy(step([(1, 5)], new=[([2, 5], 4)]), BLOCK_SIZE) == [(1, 5, 4)]
    assert slots_to_copy(step(None), BLOCK_SIZE) == []


@pytest.mark.parametrize("kind", [RunnerV1, RunnerV2])
@pytest.mark.parametrize("num_heads", [2, 1], ids=["keys and values", "one latent vector (MLA)"])
@pytest.mark.parametrize(
    ("slots", "order"), [(4, (0, 1, 2, 3, 4)), (4, (1, 0, 3, 2, 4)), (2, (0, 1, 3, 2, 4))]
)
def test_both_runners_copy_the_matched_slots_alone(
    kind: type[Runner], slots: int, order: Sequence[int], num_heads: int
) -> None:
    runner = kind(slots, order, num_heads)
    before = [cache.clone() for cache in runner.kv_caches]
    assert use_in_worker(SimpleNamespace(model_runner=runner), BLOCK_SIZE) is None
    assert all(map(torch.equal, runner.kv_caches, before)), "the trial has left something"
    update: Any = getattr(runner, "_update_states" if kind is RunnerV1 else "update_requests")
    scheduled = step([(1, 5), (1, 3)], new=[([2, 5], 7), ([3], 1)])
    assert update(scheduled) == "what the runner goes on with"
    assert runner.copied == [None] and scheduled.kv_cache_block_copies == [(1, 5), (1, 3)]
    reference.copy_slots(before, [(1, 5, 3), (1, 3, 1)], BLOCK_SIZE)
    assert all(map(torch.equal, runner.kv_caches, before))


def test_a_step_without_copies_and_a_cache_that_is_gone_are_the_runners_own() -> None:
    runner = RunnerV2()
    assert use_in_worker(SimpleNamespace(model_runner=runner), BLOCK_SIZE) is None
    runner.update_requests(step(None))
    runner.kv_caches = [cache.clone() for cache in runner.kv_caches]
    before = [cache.clone() for cache in runner.kv_caches]
    runner.update_requests(step([(0, 1)]))
    assert runner.copied == [None, [(0, 1)]]
    assert all(map(torch.equal, runner.kv_caches, before))


def refusal(runner: Any, block_size: int = BLOCK_SIZE) -> str:
    own = getattr(runner, "update_requests", None)
    reason = use_in_worker(SimpleNamespace(model_runner=runner), block_size)
    assert reason is not None
    assert getattr(runner, "update_requests", None) == own
    return reason


def test_what_the_kernel_cannot_copy_is_left_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no known method that copies blocks" in refusal(Runner())
    unlike = RunnerV2()
    unlike.kv_caches[1] = unlike.kv_caches[1][:, :1]
    assert "layer by layer" in refusal(unlike)
    with_index = RunnerV2(num_heads=1)  # smaller vectors beside those of MLA
    with_index.kv_caches.append(torch.zeros(NUM_BLOCKS, 1, BLOCK_SIZE, 2))
    assert "layer by layer" in refusal(with_index)
    assert "12 blocks of 2 slots" in refusal(RunnerV2(slots=2), block_size=2)
    without_cache = RunnerV2()
    del without_cache.kv_caches
    assert "kv_caches" in refusal(without_cache)
    monkeypatch.setattr(slot_copy.SlotCopier, "copy", lambda self, copies: None)
    broken = RunnerV2()
    before = [cache.clone() for cache in broken.kv_caches]
    assert "self-test failed" in refusal(broken)
    assert all(map(torch.equal, broken.kv_caches, before))
