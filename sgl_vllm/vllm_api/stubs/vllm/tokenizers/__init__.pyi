# [fsm, jump_forward]
from typing import Protocol

class TokenizerLike(Protocol):
    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]: ...  # [approximate_reuse]
    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...
