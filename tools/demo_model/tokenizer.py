"""The demo model's tokenizer: byte-level BPE, GPT-2-like words, ChatML special tokens.

Owns the tokenizer files of the model folder and the chat template. Learns its merges from the
training text; every byte is a token, so any text can be encoded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
DOCUMENT_END = "<|endoftext|>"
SPECIAL_TOKENS = (DOCUMENT_END, TURN_START, TURN_END)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def chat_turn(role: str, content: str) -> str:
    """One turn exactly as the chat template writes it."""
    return f"{TURN_START}{role}\n{content}{TURN_END}\n"


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that the vocabulary must have."""
    found = tokenizer.token_to_id(token)
    assert found is not None, f"{token!r} is not in the vocabulary"
    return int(found)


def save_tokenizer(tokenizer: Tokenizer, folder: Path, *, max_length_tokens: int) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": DOCUMENT_END,
        "unk_token": None,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length_tokens,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    special = {"eos_token": TURN_END, "pad_token": DOCUMENT_END}
    (folder / "special_tokens_map.json").write_text(json.dumps(special, indent=2) + "\n")
