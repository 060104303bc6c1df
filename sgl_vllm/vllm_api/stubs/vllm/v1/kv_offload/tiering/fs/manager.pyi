# [tiers]
from typing import Any

from vllm.v1.kv_offload.base import OffloadKey
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.fs.thread_pool import DualQueueThreadPool

class FileSystemTierManager:
    events: list[Any] | None
    file_mapper: FileMapper
    _block_size: int
    _job_block_counts: dict[int, int]
    _load_job_keys: dict[int, list[OffloadKey]]
    _load_progress: dict[int, int]
    _pool: DualQueueThreadPool
    _primary_kv_view: memoryview
    _store_job_keys: dict[int, list[OffloadKey]]
    _use_o_direct: bool

    def __init__(self, *args: Any, root_dir: str, **kwargs: Any) -> None: ...
    def submit_store(self, job_metadata: TransferJob) -> None: ...
    def submit_load(self, job_metadata: TransferJob) -> None: ...
