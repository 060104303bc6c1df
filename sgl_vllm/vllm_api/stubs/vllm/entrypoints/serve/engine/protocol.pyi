# [routes]
from pydantic import BaseModel

class OpenAIBaseModel(BaseModel): ...

class ErrorResponse(OpenAIBaseModel):
    error: ErrorInfo

class ErrorInfo(OpenAIBaseModel):
    message: str
    code: int

class CompletionTokenUsageInfo(OpenAIBaseModel):
    def __init__(self, **fields: object) -> None: ...

class UsageInfo(OpenAIBaseModel):
    def __init__(self, **fields: object) -> None: ...

    completion_tokens: int | None
    completion_tokens_details: CompletionTokenUsageInfo | None
