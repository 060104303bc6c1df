"""What a workload is, and made-up texts of exact lengths in tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import sgl_vllm as sgl

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Item = Mapping[str, Any]
"""The arguments of one run of a workload's program."""

MAX_WORDS = 2000


class Texts:
    """Random words that are one token each, so that a text of n words has n tokens.

    Every text begins with a space, so texts can be joined and their tokens add up. The same words
    and seed give the same texts. `data` is the folder of real inputs, None where a workload is to
    make some up in their shape.
    """

    def __init__(self, words: Sequence[str], seed: int, data: Path | None = None) -> None:
        if len(words) < 2:
            raise ValueError("the tokenizer has no words of one token: name another model")
        self._words = np.array(words)
        self.rng = np.random.default_rng(seed)
        self.data = data

    def text(self, num_tokens: int) -> str:
        return "".join(self._words[self.rng.integers(0, len(self._words), num_tokens)])

    def number(self, low: int, high: int) -> int:
        """From `low` to `high`, both included."""
        return int(self.rng.integers(low, high + 1))


@dataclass(frozen=True)
class Workload:
    """What is asked of both servers.

    Attributes:
        name: as on the command line.
        summary: one line for `--help`.
        program: run once per item, greedily where it does not say otherwise.
        items: so many items; called once for the warm-up and once for what is measured, with
            texts of different seeds.
        num_requests: programs in a round, if `--requests` does not say; `quick_requests` with
            `--quick`.
        concurrency: programs under way at a time, if `--concurrency` does not say.
        structured: whether a grammar holds the output, so that some of it can be forced.
        server_args: flags that both servers get, given the number of tokens in a KV block.
    """

    name: str
    summary: str
    program: sgl.Program
    items: Callable[[Texts, int], list[Item]]
    num_requests: int
    quick_requests: int
    concurrency: int = 8
    structured: bool = False
    server_args: Callable[[int], tuple[str, ...]] = lambda block_size_tokens: ()


def one_token_words(model: str | Path) -> list[str]:
    """Words, each with a space before it, that the model's tokenizer gives one token.

    Raises ValueError if the model's tokenizer cannot be had.
    """
    tokenizer = _tokenizer(model)
    by_id = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    words = (f" {token[1:]}" for token, _ in by_id if re.fullmatch("[Ġ▁][A-Za-z]{2,}", token))
    # Twice: some tokenizers treat the beginning of a text in a way of their own.
    stay_one = (
        word
        for word in words
        if len(tokenizer.encode(word + word, add_special_tokens=False).ids) == 2
    )
    return list(islice(stay_one, MAX_WORDS))


def _tokenizer(model: str | Path) -> Tokenizer:
    from tokenizers import Tokenizer

    file = Path(model) / "tokenizer.json"
    try:
        if file.is_file():
            return Tokenizer.from_file(str(file))
        return Tokenizer.from_pretrained(str(model))
    except Exception as error:  # the library has none of its own
        raise ValueError(f"there is no tokenizer of {model}: {error}") from error
