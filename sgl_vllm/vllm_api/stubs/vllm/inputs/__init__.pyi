# [routes]
from typing import TypedDict

class TokensInput(TypedDict): ...

EngineInput = TokensInput

class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]

def tokens_input(prompt_token_ids: list[int], *, cache_salt: str | None = ...) -> TokensInput: ...
