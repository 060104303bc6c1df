# [tiers]
from vllm.v1.kv_offload.base import OffloadKey

class FileMapper:
    def get_file_name(self, key: OffloadKey) -> str: ...
