# [fsm, jump_forward]
from typing import Protocol

class TokenizerLike(Protocol):
    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...
