# [routes]
from typing import TypedDict

class EngineInput(TypedDict): ...  # [routes]
class TokensInput(EngineInput): ...

class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]

def tokens_input(prompt_token_ids: list[int], *, cache_salt: str | None = ...) -> TokensInput: ...
