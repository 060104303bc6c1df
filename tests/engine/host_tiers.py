"""vLLM's native tiers (host memory, below it files) for engines that run on a CPU.

Everything is vLLM's: the connector, the managers of both tiers, the file tier's threads. Only what
moves blocks between the device and host memory is here, as vLLM has it for GPUs alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from sgl_vllm.tiers.files import CheckedFileTier


def config(host_bytes: int, *tiers: dict[str, Any]) -> dict[str, Any]:
    """For `KVTransferConfig`: so much host memory, and `tiers` below it."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": HostTieringSpec.__name__,
            "spec_module_path": __name__,
            "cpu_bytes_to_use": host_bytes,
            "secondary_tiers": list(tiers),
        },
    }


def checked_files(folder: Path) -> dict[str, Any]:
    """Our file tier, with checksums, over vLLM's."""
    return {
        "type": CheckedFileTier.__name__,
        "module_path": CheckedFileTier.__module__,
        "root_dir": str(folder),
        "n_read_threads": 2,
        "n_write_threads": 2,
    }


class HostTieringSpec(TieringOffloadingSpec):
    """vLLM's, with another worker."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        region = SharedOffloadRegion(
            engine_id=self.config.engine_id,
            num_chunks=self.num_chunks,
            rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return HostWorker(kv_caches, self.blocks_per_chunk, region)


class HostWorker(OffloadingWorker):
    """Copies at once; a transfer is finished when it is next asked."""

    def __init__(
        self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, region: SharedOffloadRegion
    ) -> None:
        self._region = region
        self._blocks_per_chunk = blocks_per_chunk
        self._tensors = [
            (cache.tensor, region.create_next_worker_view(cache.page_size_bytes * blocks_per_chunk))
            for cache in kv_caches.tensors
        ]
        self._tensors_of_group = [
            sorted({ref.tensor_idx for ref in refs}) for refs in kv_caches.group_data_refs
        ]
        self._finished: list[TransferResult] = []

    def _pages(self, device: GPULoadStoreSpec, host: LoadStoreSpec) -> Any:
        """Pairs of the same page on the device and in host memory.

        Both sides have the blocks of the first KV-cache group, then those of the next. A group's
        chunks in host memory begin at a whole chunk, its blocks on the device may not.
        """
        size = self._blocks_per_chunk
        blocks, first_chunk = iter(device.block_ids), 0
        for group, num_blocks in enumerate(device.group_sizes):
            inside = device.block_indices[group] % size
            for place in range(inside, inside + num_blocks):
                block_id, chunk = next(blocks), first_chunk + place // size
                for index in self._tensors_of_group[group]:
                    on_device, on_host = self._tensors[index]
                    width = on_device.shape[1]
                    begin = place % size * width
                    yield on_device[block_id], on_host[host.chunk_ids[chunk], begin : begin + width]
            first_chunk += -(-(inside + num_blocks) // size) if num_blocks else 0

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        for on_device, on_host in self._pages(src_spec, dst_spec):
            on_host.copy_(on_device)
        self._finished.append(TransferResult(job_id, True))
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        for on_device, on_host in self._pages(dst_spec, src_spec):
            on_device.copy_(on_host)
        self._finished.append(TransferResult(job_id, True))
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        pass

    def shutdown(self) -> None:
        self._tensors.clear()
        self._region.cleanup()
