# [format_checks]
from vllm.config import ModelConfig, StructuredOutputsConfig
from vllm.tokenizers import TokenizerLike

class InputProcessor:
    model_config: ModelConfig
    structured_outputs_config: StructuredOutputsConfig

    @property
    def tokenizer(self) -> TokenizerLike | None: ...
