# [fsm, jump_forward]
from typing import Protocol

class TokenizerLike(Protocol):
    def get_vocab(self) -> dict[str, int]: ...  # [approximate_reuse]
    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...
