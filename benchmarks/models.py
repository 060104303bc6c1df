"""The models that benchmarks run on: the shipped one, made-up ones of real shapes, any other.

Owns the names `demo` and `shape:NAME` and the cache of made-up models. A made-up model has random
weights, so its text is noise, but it costs what a real model of its shape costs. It carries the
demo tokenizer and chat template. Does not download anything.

    python -m benchmarks.models shape:33m        # prints the folder, makes it first if needed
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

DEMO_MODEL = Path(__file__).resolve().parent.parent / "sgl_vllm" / "demo" / "model"
SHAPE_PREFIX = "shape:"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
# Raise it when the weights that the same shape gets would change.
_RECIPE = 1


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder-only model; the head is tied to the embedding."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    max_position_embeddings: int
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6


SHAPES = {
    "33m": Shape(
        model_type="llama",
        hidden_size=512,
        intermediate_size=1472,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=16_384,
        max_position_embeddings=8192,
    ),
    "qwen2.5-0.5b": Shape(
        model_type="qwen2",
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        vocab_size=151_936,
        max_position_embeddings=32_768,
        rope_theta=1_000_000.0,
    ),
}


def resolve_model(name: str, cache_dir: Path | None = None) -> Path:
    """The folder of a model: `demo`, `shape:NAME` (made on first use), else `name` unchanged.

    `cache_dir` holds the made-up models, by default a folder of this user's. Raises ValueError for
    a shape that does not exist.
    """
    if name == "demo":
        return DEMO_MODEL
    if not name.startswith(SHAPE_PREFIX):
        return Path(name)
    shape_name = name.removeprefix(SHAPE_PREFIX)
    if shape_name not in SHAPES:
        known = ", ".join(SHAPE_PREFIX + known for known in SHAPES)
        raise ValueError(f"there is no model shape {name!r}; the known ones are {known}")
    return cached_shape_model(shape_name, SHAPES[shape_name], cache_dir or default_cache_dir())


def default_cache_dir() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "sgl-vllm" / "models"


def cached_shape_model(name: str, shape: Shape, cache_dir: Path) -> Path:
    """The folder of a made-up model in the cache; made first when it is not there.

    The folder's name holds a digest of all that decides its content, and it appears there complete
    or not at all, whatever is interrupted and however many processes ask at once.
    """
    tokenizer = (DEMO_MODEL / "tokenizer.json").read_bytes()
    recipe = json.dumps([_RECIPE, asdict(shape)]).encode() + tokenizer
    folder = cache_dir / f"{name}-{hashlib.sha256(recipe).hexdigest()[:12]}"
    if folder.is_dir():
        return folder
    cache_dir.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=cache_dir))
    try:
        write_shape_model(shape, unfinished)
        unfinished.chmod(0o755)
        try:
            unfinished.rename(folder)
        except OSError:  # another process was faster, which is as good
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def write_shape_model(shape: Shape, folder: Path, *, seed: int = 0) -> None:
    """Writes a complete bfloat16 model folder with random weights; the seed decides them."""
    # Half a second each to import, and not needed to name a model.
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = asdict(shape)
    config = AutoConfig.for_model(
        **fields, tie_word_embeddings=True, bos_token_id=None, eos_token_id=_demo_eos_token_id()
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    num_tokens = len(json.loads((DEMO_MODEL / "tokenizer.json").read_text())["model"]["vocab"])
    weights = {}
    for name, parameter in model.named_parameters():
        weight = torch.empty(parameter.shape)
        if name == "model.norm.weight":
            # Logits then have a deviation of about 5: a next token is as clear as in a real model.
            weight.fill_(5.0)
        elif parameter.dim() == 1:
            weight.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            weight.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
        if name == "model.embed_tokens.weight":
            weight[num_tokens:] = 0.0  # tokens without text are next to never generated
        weights[name] = weight.to(torch.bfloat16)
    weights_file = folder / "model.safetensors"
    save_file(weights, weights_file, metadata={"format": "pt"})
    weights_file.chmod(0o644)  # safetensors writes it for its owner alone
    config.architectures = [type(model).__name__]
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    for file in _TOKENIZER_FILES:
        shutil.copy(DEMO_MODEL / file, folder / file)


def _demo_eos_token_id() -> int:
    return json.loads((DEMO_MODEL / "config.json").read_text())["eos_token_id"]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.models",
        description="Print the folder of a model, making it first if it is a shape.",
    )
    shapes = ", ".join(SHAPE_PREFIX + name for name in SHAPES)
    parser.add_argument("name", help=f"demo, {shapes}, or any folder or hub name")
    parser.add_argument("--cache-dir", type=Path, help="where made-up models are kept")
    arguments = parser.parse_args()
    try:
        print(resolve_model(arguments.name, arguments.cache_dir))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
