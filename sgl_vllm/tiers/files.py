"""vLLM's file tier with a checksum in every file: a damaged file is a miss, never a wrong answer.

Owns that blocks are written and read through `sealed_file`. Does not own the files' places, the
lookup, the threads, and the handling of failed loads, which are vLLM's. vLLM's configuration names
it as a secondary tier; it works without the rest of the plugin:

    {"type": "CheckedFileTier", "module_path": "sgl_vllm.tiers.files", "root_dir": "/cache"}
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any  # Any: arguments of vLLM's

from vllm.v1.kv_offload.base import OffloadKey
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

from sgl_vllm.tiers import sealed_file


class CheckedFileTier(FileSystemTierManager):
    """Takes the settings of vLLM's tier `fs`. Its files are in a subfolder of `root_dir`, so both
    tiers can share one."""

    def __init__(self, *args: Any, root_dir: str, **kwargs: Any) -> None:
        super().__init__(*args, root_dir=os.path.join(root_dir, "checked"), **kwargs)
        self._flags = os.O_DIRECT if self._use_o_direct else 0

    def submit_store(self, job_metadata: TransferJob) -> None:
        job_id, keys = job_metadata.job_id, list(job_metadata.keys)
        self._job_block_counts[job_id] = len(keys)
        if self.events is not None:
            self._store_job_keys[job_id] = keys
        task = functools.partial(self._store, keys, job_metadata.chunk_ids.tolist())
        self._pool.enqueue_store(job_id, 1, [task])

    def submit_load(self, job_metadata: TransferJob) -> None:
        job_id, keys = job_metadata.job_id, list(job_metadata.keys)
        self._job_block_counts[job_id] = len(keys)
        self._load_job_keys[job_id] = keys
        task = functools.partial(self._load, job_id, keys, job_metadata.chunk_ids.tolist())
        self._pool.enqueue_load(job_id, 1, [task])

    # -- in vLLM's threads ----------------------------------------------------------------------

    def _store(self, keys: Sequence[OffloadKey], chunk_ids: Sequence[int]) -> None:
        for key, chunk_id in zip(keys, chunk_ids, strict=True):
            path = self.file_mapper.get_file_name(key)
            sealed_file.write(path, key, self._block(chunk_id), self._flags)

    def _load(self, job_id: int, keys: Sequence[OffloadKey], chunk_ids: Sequence[int]) -> None:
        for number, (key, chunk_id) in enumerate(zip(keys, chunk_ids, strict=True)):
            self._load_progress[job_id] = number  # how many blocks vLLM keeps if the next one fails
            path = self.file_mapper.get_file_name(key)
            sealed_file.read(path, key, self._block(chunk_id), self._flags)

    def _block(self, chunk_id: int) -> memoryview:
        start = chunk_id * self._block_size
        return self._primary_kv_view.cast("B")[start : start + self._block_size]
