"""`benchmarks.models`: names become folders, and made-up models load and behave."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
)

from benchmarks import models
from benchmarks.models import Shape, resolve_model

TINY: Shape = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 6000,
    "max_position_embeddings": 512,
}


@pytest.fixture
def tiny_shape(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(models.SHAPES, "tiny", TINY)
    return "shape:tiny"


def test_a_shape_model_loads_and_writes_tokens_that_have_text(
    tiny_shape: str, tmp_path: Path
) -> None:
    folder = resolve_model(tiny_shape, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert type(model).__name__ == "Qwen2ForCausalLM"
    assert tuple(model.get_input_embeddings().weight.shape) == (6000, 64)
    prompt = tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        logits = model(prompt).logits[0, -1]
    top = logits.topk(2)
    assert top.indices[0] < len(tokenizer)
    assert 1.0 < logits[: len(tokenizer)].std() < 20.0
    assert top.values[0] > top.values[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "gpt-oss", "qwen3-next"])
def test_shapes_with_layers_of_several_kinds_load_with_all_their_weights(
    name: str, tmp_path: Path
) -> None:
    folder = resolve_model(f"shape:{name}", tmp_path)
    model, found = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    assert 30e6 < sum(p.numel() for p in model.parameters()) < 55e6
    assert len(set(model.config.layer_types)) == 2
    with torch.inference_mode():
        top = model(torch.arange(20, 60)[None]).logits[0].topk(2).values
    assert (top[:, 0] - top[:, 1]).median() > 0.01
