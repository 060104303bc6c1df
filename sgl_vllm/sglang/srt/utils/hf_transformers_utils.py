"""What programs import of `sglang.srt.utils.hf_transformers_utils`: tokenizers."""

from __future__ import annotations

from typing import Any  # Any: a tokenizer and options of transformers


def get_tokenizer(tokenizer_name: str, **options: Any) -> Any:
    """A tokenizer of the package transformers."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_name, **options)
