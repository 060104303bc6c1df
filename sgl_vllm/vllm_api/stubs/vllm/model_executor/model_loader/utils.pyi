# [preview]
import torch
from vllm.config import ModelConfig, VllmConfig

def initialize_model(
    vllm_config: VllmConfig, *, prefix: str = ..., model_config: ModelConfig | None = ...
) -> torch.nn.Module: ...
