"""The network that is trained: Llama, written out plainly, and its export to a Hugging Face folder.

Owns the modules and the names their weights carry in `model.safetensors`. Knows nothing of text or
of training. It computes exactly what `transformers.LlamaForCausalLM` computes (the self-test of the
trained folder runs through that class), but passes only the positions that carry loss through the
output head, which is a third of the work at this size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class NetworkShape:
    """Sizes of the network; every attention head is `head_dim` wide."""

    vocab_size: int = 4096
    hidden_size: int = 256
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    intermediate_size: int = 704
    head_dim: int = 64
    max_positions: int = 4096
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-5

    def hf_config(self, *, bos_token_id: int, eos_token_id: int, pad_token_id: int) -> dict:
        """The folder's `config.json`."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "attention_bias": False,
            "mlp_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "tie_word_embeddings": True,
            "use_cache": True,
            "dtype": "bfloat16",
            "bos_token_id": bos_token_id,
            "eos_token_id": eos_token_id,
            "pad_token_id": pad_token_id,
        }


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def rotary_table(shape: NetworkShape, length: int) -> tuple[Tensor, Tensor]:
    """cos and sin, each of shape (length, head_dim), in the half-rotated layout of Llama."""
    exponents = torch.arange(0, shape.head_dim, 2).float() / shape.head_dim
    angles = torch.outer(torch.arange(length).float(), shape.rope_theta**-exponents)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        kv_size = shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, shape.num_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape

        def heads(projected: Tensor) -> Tensor:
            return projected.view(batch, length, -1, self.head_dim).transpose(1, 2)

        query = rotate(heads(self.q_proj(x)), cos, sin)
        key = rotate(heads(self.k_proj(x)), cos, sin)
        mixed = F.scaled_dot_product_attention(
            query, key, heads(self.v_proj(x)), is_causal=True, enable_gqa=True
        )
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Network(nn.Module):
    """Llama with tied embeddings. `state_dict()` has the names of `LlamaModel`, without prefix."""

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.data /= (2 * shape.num_layers) ** 0.5
        nn.init.normal_(self.embed_tokens.weight, std=0.02)

    def logits(self, tokens: Tensor, wanted: Tensor) -> Tensor:
        """Of shape (positions where `wanted`, vocab_size); the arguments are (batch, length)."""
        x = self.embed_tokens(tokens)
        cos, sin = rotary_table(self.shape, tokens.shape[1])
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x[wanted]) @ self.embed_tokens.weight.t()

    def loss(self, tokens: Tensor, targets: Tensor, trained: Tensor) -> Tensor:
        """Mean cross entropy over the positions where `trained`; all three are (batch, length)."""
        return F.cross_entropy(self.logits(tokens, trained), targets[trained])

    def export_weights(self) -> dict[str, Tensor]:
        """Weights in bfloat16 under the names of `LlamaForCausalLM`; the head is tied."""
        return {
            f"model.{name}": weight.detach().to(torch.bfloat16).contiguous()
            for name, weight in self.state_dict().items()
        }
