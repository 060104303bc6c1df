# [routes]
from vllm.entrypoints.serve.engine.protocol import ErrorResponse

def create_error_response(message: str | Exception) -> ErrorResponse: ...
