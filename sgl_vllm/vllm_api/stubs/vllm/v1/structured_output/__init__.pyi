# [fsm, jump_forward]
from concurrent.futures import Executor

from vllm.tokenizers import TokenizerLike
from vllm.v1.structured_output.backend_types import StructuredOutputBackend

class StructuredOutputManager:
    backend: StructuredOutputBackend | None
    enable_in_reasoning: bool
    executor: Executor
    reasoner_cls: type[object] | None
    tokenizer: TokenizerLike
