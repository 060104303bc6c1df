# [routes]
from pydantic import BaseModel

class OpenAIBaseModel(BaseModel): ...

class ErrorResponse(OpenAIBaseModel):
    error: ErrorInfo

class ErrorInfo(OpenAIBaseModel):
    message: str
    code: int

class UsageInfo(OpenAIBaseModel):
    prompt_tokens: int
    completion_tokens: int | None
    total_tokens: int
