# [routes]
from vllm.entrypoints.serve.engine.protocol import OpenAIBaseModel

def validate_cache_salt(cache_salt: object) -> None: ...

class DeltaMessage(OpenAIBaseModel):  # [tools_and_format]
    def __init__(self, *, content: str | None = ...) -> None: ...
