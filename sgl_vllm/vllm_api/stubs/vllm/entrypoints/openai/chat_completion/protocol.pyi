# [routes]
from vllm.entrypoints.serve.engine.protocol import OpenAIBaseModel

class ChatCompletionRequest(OpenAIBaseModel): ...
