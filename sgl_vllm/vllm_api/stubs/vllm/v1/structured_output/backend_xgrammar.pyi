# [fsm, jump_forward]
from typing import Any

import torch
import xgrammar
from vllm.sampling_params import SamplingParams
from vllm.v1.structured_output.backend_types import (
    StructuredOutputBackend,
    StructuredOutputGrammar,
    StructuredOutputOptions,
)

class XgrammarBackend(StructuredOutputBackend):
    compiler: xgrammar.GrammarCompiler
    full_vocab_compiler: xgrammar.GrammarCompiler  # since 0.33

    def compile_grammar(
        self,
        request_type: StructuredOutputOptions,
        grammar_spec: str,
        stop_token_ids: set[int] | None = ...,
    ) -> StructuredOutputGrammar: ...
    def allocate_token_bitmask(self, max_num_seqs: int) -> torch.Tensor: ...
    def destroy(self) -> None: ...

class XgrammarGrammar(StructuredOutputGrammar):
    matcher: xgrammar.GrammarMatcher
    num_processed_tokens: int

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool: ...
    def validate_tokens(self, tokens: list[int]) -> list[int]: ...
    def rollback(self, num_tokens: int) -> None: ...
    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int, /) -> None: ...
    def is_terminated(self) -> bool: ...
    def reset(self) -> None: ...

def validate_xgrammar_grammar(sampling_params: SamplingParams) -> None: ...  # [format_checks]
def has_xgrammar_unsupported_json_features(schema: dict[str, Any]) -> bool: ...
