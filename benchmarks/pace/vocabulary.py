"""The vocabulary that schedulers are measured with: a real one of 131,072 tokens, or a padded one.

The cost of a bitmask grows with the vocabulary, and so does a grammar's. `TEKKEN` is Mistral's,
which comes with vLLM. `DEMO` is that of the shipped model, of 4,096 tokens; `PADDED` has more ids,
without text, up to the size of Qwen 2.5's.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.models import DEMO_MODEL, default_cache_dir

TEKKEN, PADDED, DEMO = "tekken", "padded", "demo"
SIZES = {TEKKEN: 131_072, PADDED: 152_064, DEMO: 4096}


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer and the number of logits that its model would have.

    Attributes:
        folder: the tokenizer's.
        size: logits of a model.
    """

    folder: Path
    size: int

    @cached_property
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(self.folder))

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """Of each token of a byte-level BPE; empty for special ones."""
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
        special = set(self.tokenizer.all_special_ids)
        names = self.tokenizer.convert_ids_to_tokens(range(len(self.tokenizer)))
        return [
            b"" if token in special else bytes(byte_of[character] for character in name)
            for token, name in enumerate(names)
        ]

    def tokens(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return found


def vocabulary(name: str) -> Vocabulary:
    """Converts Mistral's tokenizer at its first use (10 s), and keeps it in this user's cache.

    Raises ValueError if it cannot be had.
    """
    if name != TEKKEN:
        return Vocabulary(DEMO_MODEL, SIZES[name])
    folder = default_cache_dir() / TEKKEN
    if not folder.is_dir():
        from benchmarks.masks import tokenizer_of

        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{TEKKEN}-", dir=folder.parent))
        try:
            tokenizer_of(None).save_pretrained(unfinished)
            shutil.copy(DEMO_MODEL / "config.json", unfinished)  # vLLM looks for one
            unfinished.rename(folder)
        except OSError:  # another process was faster
            if not folder.is_dir():
                raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return Vocabulary(folder, SIZES[TEKKEN])
