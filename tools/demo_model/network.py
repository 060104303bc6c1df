"""The network that is trained: transformers' Llama, which passes only the positions that carry loss
through the output head. That is a third of the work at this size."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM


class Network(LlamaForCausalLM):
    """Llama with tied embeddings, in the sizes of the demo model."""

    @classmethod
    def of(cls) -> Network:
        """A network with random weights."""
        config = {
            "vocab_size": 4096,
            "hidden_size": 256,
            "intermediate_size": 704,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
        }
        network = cls(LlamaConfig(**config))
        for name, weight in network.model.named_parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.data /= (2 * config["num_hidden_layers"]) ** 0.5
        nn.init.normal_(network.model.embed_tokens.weight, std=0.02)
        return network

    def logits(self, tokens: Tensor, wanted: Tensor) -> Tensor:
        """Of shape (positions where `wanted`, vocab_size); the arguments are (batch, length)."""
        hidden = self.model(tokens, use_cache=False).last_hidden_state
        return hidden[wanted] @ self.model.embed_tokens.weight.t()

    def loss(self, tokens: Tensor, targets: Tensor, trained: Tensor) -> Tensor:
        """Mean cross entropy over the positions where `trained`; all three are (batch, length)."""
        return F.cross_entropy(self.logits(tokens, trained), targets[trained])

    def save(self, folder: Path, *, document_end: int, turn_end: int) -> None:
        """Write the weights in bfloat16, and the configurations that vLLM reads."""
        ids = {"bos_token_id": document_end, "eos_token_id": turn_end, "pad_token_id": document_end}
        served = LlamaForCausalLM(LlamaConfig(**{**self.config.to_dict(), **ids}))
        served.load_state_dict(self.state_dict())
        served.generation_config.update(**ids | {"eos_token_id": [turn_end, document_end]})
        served.to(torch.bfloat16).save_pretrained(folder)
        (folder / "model.safetensors").chmod(0o644)  # it is written for its owner alone
