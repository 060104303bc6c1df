# [preview]
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

class KVConnectorFactory:
    @classmethod
    def get_connector_class(
        cls, kv_transfer_config: KVTransferConfig
    ) -> type[KVConnectorBase_V1]: ...
