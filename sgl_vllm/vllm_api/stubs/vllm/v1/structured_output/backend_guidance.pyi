# [fsm, jump_forward]
from dataclasses import dataclass
from typing import Any

import llguidance
import torch
from vllm.v1.structured_output.backend_types import (
    StructuredOutputBackend,
    StructuredOutputGrammar,
    StructuredOutputOptions,
)

@dataclass
class GuidanceBackend(StructuredOutputBackend):
    def compile_grammar(
        self,
        request_type: StructuredOutputOptions,
        grammar_spec: str,
        stop_token_ids: set[int] | None = ...,
    ) -> StructuredOutputGrammar: ...
    def allocate_token_bitmask(self, max_num_seqs: int) -> torch.Tensor: ...
    def destroy(self) -> None: ...

class GuidanceGrammar(StructuredOutputGrammar):
    ll_matcher: llguidance.LLMatcher

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool: ...
    def validate_tokens(self, tokens: list[int]) -> list[int]: ...
    def rollback(self, num_tokens: int) -> None: ...
    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int, /) -> None: ...
    def is_terminated(self) -> bool: ...
    def reset(self) -> None: ...

def serialize_guidance_grammar(
    request_type: StructuredOutputOptions,
    grammar_spec: str | dict[str, Any],
    disable_any_whitespace: bool = ...,
    disable_additional_properties: bool = ...,
) -> str: ...
def has_guidance_unsupported_json_features(schema: Any) -> bool: ...
def process_for_additional_properties(guide_json: str | dict[str, Any]) -> dict[str, Any]: ...
