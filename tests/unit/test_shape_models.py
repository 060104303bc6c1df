"""`benchmarks.models`: names become folders, and made-up models load and behave."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
)

from benchmarks import models
from benchmarks.models import DEMO_MODEL, Shape, resolve_model

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


def test_demo_is_the_folder_that_ships() -> None:
    assert resolve_model("demo") == DEMO_MODEL
    assert (DEMO_MODEL / "model.safetensors").is_file()


@pytest.mark.parametrize("name", ["/somewhere/a-model", "Qwen/Qwen2.5-0.5B"])
def test_other_names_are_returned_as_they_are(name: str) -> None:
    assert str(resolve_model(name)) == name


def test_an_unknown_shape_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"shape:1t.*shape:33m.*shape:qwen2\.5-0\.5b"):
        resolve_model("shape:1t")


def test_a_shape_model_is_made_once_and_found_again(tiny_shape: str, tmp_path: Path) -> None:
    folder = resolve_model(tiny_shape, tmp_path)
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve_model(tiny_shape, tmp_path) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made
    assert list(tmp_path.iterdir()) == [folder]


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


@pytest.mark.slow
def test_the_vision_shape_reads_an_image_as_as_many_tokens_as_it_says(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image").new("RGB", (90, 40), "red")
    shape = models.SHAPES["vlm-tiny"]
    folder = resolve_model("shape:vlm-tiny", tmp_path)
    processor = AutoProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    inputs = processor(text="<image> A red field", images=image, return_tensors="pt")
    num_image_tokens = int((inputs["input_ids"] == processor.image_token_id).sum())
    assert num_image_tokens == models.num_image_tokens(shape) == 4
    with torch.inference_mode():
        logits = model(**inputs).logits[0, -1]
        other = model(**{**inputs, "pixel_values": -inputs["pixel_values"]}).logits[0, -1]
    assert 1.0 < logits.std() < 20.0
    assert not torch.equal(logits, other)
