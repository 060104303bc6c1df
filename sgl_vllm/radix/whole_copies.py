"""vLLM's copies of blocks in a worker whose KV-cache groups share memory.

Owns the order in which vLLM's copy visits the caches. Does not own which blocks are copied, which
vLLM's scheduler says, nor the copy itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sgl_vllm.vllm_api.runners import runner_in

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker


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
    runner_in(worker).live.kv_caches.sort(key=lambda cache: cache.nbytes, reverse=True)
