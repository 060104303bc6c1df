"""`benchmarks.models`: made-up models load with all their weights, and behave."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from transformers import AutoModelForCausalLM

from benchmarks.models import resolve_model


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
