# [fsm, jump_forward]
import enum
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from vllm.config import VllmConfig
from vllm.tokenizers import TokenizerLike

class StructuredOutputOptions(enum.Enum):
    JSON = ...
    JSON_OBJECT = ...
    REGEX = ...
    GRAMMAR = ...
    CHOICE = ...

class StructuredOutputGrammar(ABC):
    @abstractmethod
    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool: ...
    @abstractmethod
    def validate_tokens(self, tokens: list[int]) -> list[int]: ...
    @abstractmethod
    def rollback(self, num_tokens: int) -> None: ...
    @abstractmethod
    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None: ...
    @abstractmethod
    def is_terminated(self) -> bool: ...
    @abstractmethod
    def reset(self) -> None: ...

@dataclass
class StructuredOutputBackend(ABC):
    vllm_config: VllmConfig
    tokenizer: TokenizerLike
    vocab_size: int

    @abstractmethod
    def compile_grammar(
        self,
        request_type: StructuredOutputOptions,
        grammar_spec: str,
        stop_token_ids: set[int] | None = ...,
    ) -> StructuredOutputGrammar: ...
    @abstractmethod
    def allocate_token_bitmask(self, max_num_seqs: int) -> torch.Tensor: ...
    @abstractmethod
    def destroy(self) -> None: ...
