"""The models that benchmarks run on: the shipped one, made-up ones of real shapes, any other.

Owns the names `demo` and `shape:NAME` and the cache of made-up models. A made-up model has random
weights, so its text is noise, whole words of it, but it costs what a real model of its shape costs.
It carries the demo tokenizer and chat template. Those with a `vision` tower also read images, so
that the way of an image can be tried without a download; they say nothing about them. Does not
download anything.

    python -m benchmarks.models shape:33m        # prints the folder, makes it first if needed
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sgl_vllm.demo import MODEL_PATH as DEMO_MODEL

SHAPE_PREFIX = "shape:"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
_IMAGE_TOKENS = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
# Raise it when the weights that the same shape gets would change.
_RECIPE = 2
# A trained model writes texts in the tokens that its tokenizer would give them. A random one that
# writes whole words does too: so other tokens, of parts of words or without text, get embeddings,
# and as head and embedding are one also logits, so small that they are next to never the largest.
_SCALE_OF_OTHERS = 0.2
_LAST_NORMS = (
    "model.norm.weight",
    "model.text_model.norm.weight",
    "model.language_model.norm.weight",
)
# In PaddleOCR-VL's checkpoints; transformers renames them when it loads one.
_PREFIXES_IN_FILE = {
    "model.language_model.": "model.",
    "model.visual.": "visual.",
    "model.projector.": "mlp_AR.",
}

Shape = Mapping[str, Any]
"""What transformers' `AutoConfig.for_model` takes for a model whose head is its embedding. With
images: `model_type`, the `text` model's, those of the `vision` tower, and `scale_factor`."""


def _shapes() -> dict[str, Shape]:
    named: dict[str, dict[str, Any]] = tomllib.loads(_SHAPES_FILE.read_text())
    shapes: dict[str, Shape] = {}
    for name, shape in named.items():
        like = shapes[shape.pop("like")] if "like" in shape else {}
        shapes[name] = {**like, **shape}
        if isinstance(text := shape.get("text"), str):
            shapes[name] = {**shape, "text": shapes[text]}
    return shapes


_SHAPES_FILE = Path(__file__).with_name("shapes.toml")
SHAPES = _shapes()


def num_image_tokens(shape: Shape) -> int:
    vision = shape["vision"]
    return (vision["image_size"] // vision["patch_size"] // shape["scale_factor"]) ** 2


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
    recipe = json.dumps([_RECIPE, shape]).encode() + tokenizer
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
    for file in _TOKENIZER_FILES:
        shutil.copy(DEMO_MODEL / file, folder / file)
    if "vision" in shape:
        _write_image_processor(shape, folder)
    _write_weights(shape, folder, seed)


def _write_weights(shape: Shape, folder: Path, seed: int) -> None:
    # Half a second each to import, and not needed to name a model.
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    ids = {"bos_token_id": None, "eos_token_id": _demo_eos_token_id(), "tie_word_embeddings": True}
    if "vision" in shape:
        kind, vision = shape["model_type"], shape["vision"]
        config = AutoConfig.for_model(
            kind,
            text_config=AutoConfig.for_model(**shape["text"], **ids),
            vision_config=AutoConfig.for_model(f"{kind}_vision", **vision),
            scale_factor=shape["scale_factor"],
            image_token_id=_num_demo_tokens(),
            pad_token_id=None,
            tie_word_embeddings=True,
        )
        auto_model = AutoModelForImageTextToText
    else:
        config = AutoConfig.for_model(**shape, **ids)
        auto_model = AutoModelForCausalLM
    with torch.device("meta"):
        model = auto_model.from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, parameter in model.named_parameters():
        weight = torch.empty(parameter.shape)
        if name in _LAST_NORMS:
            # Logits then have a deviation of about 5: a next token is as clear as in a real model.
            weight.fill_(5.0)
        elif parameter.dim() == 1:
            weight.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            weight.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
        if name.endswith("embed_tokens.weight"):
            weight[~torch.tensor(_are_words(len(weight)))] *= _SCALE_OF_OTHERS
        for prefix, in_file in _PREFIXES_IN_FILE.items():
            name = name.replace(prefix, in_file)
        weights[name] = weight.to(torch.bfloat16)
    weights_file = folder / "model.safetensors"
    save_file(weights, weights_file, metadata={"format": "pt"})
    weights_file.chmod(0o644)  # safetensors writes it for its owner alone
    config.architectures = [type(model).__name__]
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)


def _write_image_processor(shape: Shape, folder: Path) -> None:
    """The tokens that stand for an image, and what makes pixels of one."""
    size = shape["vision"]["image_size"]
    if shape["model_type"] == "idefics3":
        name, edge = "Idefics3", {"longest_edge": size}
        pixels = {"size": edge, "max_image_size": edge, "do_image_splitting": False}
    else:  # "paddleocr_vl", whose edges are areas
        name = "PaddleOCRVL"
        pixels = {"size": {"shortest_edge": size**2, "longest_edge": size**2}}
    pixels["image_processor_type"] = f"{name}ImageProcessor"
    processor = {"processor_class": f"{name}Processor", "image_seq_len": num_image_tokens(shape)}
    (folder / "preprocessor_config.json").write_text(json.dumps(pixels))
    (folder / "processor_config.json").write_text(json.dumps(processor))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    like = tokenizer["added_tokens"][0]
    for number, token in enumerate(_IMAGE_TOKENS, _num_demo_tokens()):
        tokenizer["added_tokens"].append(like | {"id": number, "content": token})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    options = json.loads((folder / "tokenizer_config.json").read_text())
    options["extra_special_tokens"] = {"image_token": _IMAGE_TOKENS[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(options))


def _are_words(vocab_size: int) -> list[bool]:
    """Of each token, whether it is a whole word with a space before it."""
    vocab = json.loads((DEMO_MODEL / "tokenizer.json").read_text())["model"]["vocab"]
    words = {number for token, number in vocab.items() if re.fullmatch("Ġ[A-Za-z]{2,}", token)}
    return [number in words for number in range(vocab_size)]


def _num_demo_tokens() -> int:
    return len(json.loads((DEMO_MODEL / "tokenizer.json").read_text())["model"]["vocab"])


def _demo_eos_token_id() -> int:
    return json.loads((DEMO_MODEL / "config.json").read_text())["eos_token_id"]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.models",
        description="Print the folder of a model, making it first if it is a shape.",
    )
    shapes = ", ".join(SHAPE_PREFIX + name for name in SHAPES)
    parser.add_argument("name", help=f"demo, {shapes}, or any folder or hub name")
    arguments = parser.parse_args()
    try:
        print(resolve_model(arguments.name))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
