"""The copies of blocks in which hits end, in a worker: whole blocks, or only the matched slots.

A *slot* is the part of a block that holds the KV of one token. One kernel copies slots in all
layers.

Owns how many slots a step's copies need, the replacement of vLLM's copy in a live model runner, and
the order in which vLLM's own copies caches. Does not own which blocks are copied (vLLM's
scheduler), nor the kernel (`kernels/slot_copy.py`).

vLLM's own copy is of whole blocks, layer by layer, so its message says which blocks to copy and not
how many slots. The number follows from the same message. A copy belongs to a request that starts or
resumes in this step, and this step computes its tokens from `num_computed_tokens` on. So the copied
block must hold `num_computed_tokens % block_size` slots before that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sgl_vllm.vllm_api.patching import wrap
from sgl_vllm.vllm_api.runners import install, is_known

if TYPE_CHECKING:
    import torch
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as RunnerV1
    from vllm.v1.worker.gpu_worker import Worker

    from sgl_vllm.kernels.slot_copy import SlotCopier


def slots_to_copy(step: SchedulerOutput, block_size: int) -> list[tuple[int, int, int]]:
    """(source, destination, number of slots) of each copy of the step. Two kinds of copies are of
    the whole block: those whose destination belongs to no request that starts in the step, and
    those in KV-cache groups other than vLLM's first."""
    started = [(new.block_ids, new.num_computed_tokens) for new in step.scheduled_new_reqs]
    cached = step.scheduled_cached_reqs
    for request_id, block_ids, num_computed in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        if request_id in cached.resumed_req_ids and block_ids is not None:
            started.append((block_ids, num_computed))
    num_slots = {}
    for block_ids, num_computed in started:
        num_full, num_inside = divmod(num_computed, block_size)
        if num_inside and num_full < len(block_ids[0]):
            num_slots[block_ids[0][num_full]] = num_inside
    return [
        (source, destination, num_slots.get(destination, block_size))
        for source, destination in step.kv_cache_block_copies or ()
    ]


def copy_whole_blocks(worker: Worker) -> None:
    """Make a worker copy whole blocks where KV-cache groups share memory. Runs in the worker's
    process, once its KV cache exists. All its layers' caches have the same number of blocks.

    A layer of one group can begin at the same address as a layer of another, as a block id belongs
    to one group at a time. Their pages may hold a different number of bytes:

        recurrent layer     |---- state ----|  (unused)  |
        full attention      |--------- tokens -----------|

    vLLM copies a block layer by layer, and only the first layer at an address
    (https://github.com/vllm-project/vllm/pull/55112). If that is a recurrent one, the copy has no
    last tokens. So the largest caches come first.
    """
    worker.model_runner.kv_caches.sort(key=lambda cache: cache.nbytes, reverse=True)


def use_in_worker(worker: Worker, block_size: int) -> str | None:
    """Make a worker copy slots from now on. Called in its process, when its KV cache exists and is
    idle. Tests the kernel on two blocks, and restores them.

    Returns:
        Why the worker keeps vLLM's copy of whole blocks; None if it copies slots.
    """
    runner = worker.model_runner
    if not is_known(runner):
        return "this vLLM's model runner has no known method that copies blocks"
    try:
        from sgl_vllm.kernels.slot_copy import SlotCopier

        caches = runner.kv_caches
        copier = SlotCopier(caches, block_size)
        if copier.num_blocks != runner.kv_cache_config.num_blocks:
            return f"its KV cache has the shape of {copier.num_blocks} blocks of {block_size} slots"
        if not _is_right(copier, caches):
            return "the kernel's self-test failed on this device"
    except Exception as error:  # vLLM's own copy works in any case
        return f"{type(error).__name__}: {error}"
    install(_SlotCopies(runner, copier), runner)
    return None


class _SlotCopies:
    """A live runner's method that copies blocks before the forward pass, with the kernel's copies
    in place of vLLM's own. They run after this method, so after new blocks are zeroed."""

    def __init__(self, runner: RunnerV1 | RunnerV2, copier: SlotCopier) -> None:
        self._runner = runner
        self._copier = copier
        self._caches = list(runner.kv_caches)

    def install_in_v1(self, runner: RunnerV1) -> None:
        wrap(runner, "_update_states")(self._update)

    def install_in_v2(self, runner: RunnerV2) -> None:
        wrap(runner, "update_requests")(self._update)

    def _update(
        self, original: Callable[[SchedulerOutput], object], scheduler_output: SchedulerOutput
    ) -> object:
        import torch

        copies = scheduler_output.kv_cache_block_copies
        if not copies or [*map(id, self._runner.kv_caches)] != [*map(id, self._caches)]:
            return original(scheduler_output)
        rows = torch.tensor(
            slots_to_copy(scheduler_output, self._copier.block_size), dtype=torch.int32
        )
        try:
            self._copier.check(rows)
        except ValueError:  # copies that depend on each other, which this scheduler never makes
            return original(scheduler_output)
        scheduler_output.kv_cache_block_copies = None
        try:
            result = original(scheduler_output)
        finally:
            scheduler_output.kv_cache_block_copies = copies
        self._copier.copy(rows)
        return result


def _is_right(copier: SlotCopier, caches: list[torch.Tensor]) -> bool:
    """Whether the kernel copies some slots of block 0 over block 1 in all layers, and no others.
    This also tunes the kernel, so that no request waits for it."""
    import torch

    from sgl_vllm.kernels.reference import copy_slots

    num_parts = copier.block_size // caches[0].shape[2]
    pairs = [cache[: 2 * num_parts].view(torch.uint8) for cache in caches]
    before = [pair.clone() for pair in pairs]
    generator = torch.Generator().manual_seed(0)
    copies = [(0, 1, (copier.block_size + 1) // 2)]
    try:
        for pair in pairs:
            pair.copy_(torch.randint(0, 256, pair.shape, dtype=torch.uint8, generator=generator))
        wanted = [pair.clone() for pair in pairs]
        copy_slots(wanted, copies, copier.block_size)
        copier.copy(torch.tensor(copies, dtype=torch.int32))
        return all(map(torch.equal, pairs, wanted))
    finally:
        for pair, old in zip(pairs, before, strict=True):
            pair.copy_(old)
