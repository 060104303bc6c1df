"""What a workload is, and made-up texts of exact lengths in tokens."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import sgl_vllm as sgl

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Item = Mapping[str, Any]
"""The arguments of one run of a workload's program."""

TEXT_MODEL = "demo"
MAX_WORDS = 2000
MAX_MODEL_LEN = 4096


class Vocabulary:
    """A model's tokenizer, and its words: those that are one token each, space before included."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises ValueError if it has next to no words."""
        self._tokenizer = tokenizer
        self.words = np.array(_one_token_words(tokenizer))
        if len(self.words) < 2:
            raise ValueError("the tokenizer has no words of one token: name another model")

    @classmethod
    def of(cls, model: str | Path) -> Vocabulary:
        """That of a model's folder or hub name. ValueError if its tokenizer cannot be had."""
        return cls(_tokenizer(model))

    def num_tokens(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def beginning(self, text: str, num_tokens: int) -> str:
        """As much of the text, from its beginning, as has so many tokens or fewer."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        if len(encoding.ids) <= num_tokens:
            return text
        return text[: encoding.offsets[num_tokens - 1][1]] if num_tokens else ""


class Texts:
    """Random texts of exact lengths, real ones from files, and random numbers.

    Every random text begins with a space, so texts can be joined and their tokens add up. The same
    vocabulary and seed give the same texts. `data` is the folder of real inputs, None where a
    workload is to make some up in their shape.
    """

    def __init__(self, vocabulary: Vocabulary, seed: int, data: Path | None = None) -> None:
        self.vocabulary = vocabulary
        self.rng = np.random.default_rng(seed)
        self.data = data

    def text(self, num_tokens: int) -> str:
        words = self.vocabulary.words
        return "".join(words[self.rng.integers(0, len(words), num_tokens)])

    def number(self, low: int, high: int) -> int:
        """From `low` to `high`, both included."""
        return int(self.rng.integers(low, high + 1))

    def order(self, number: int, of: int) -> list[int]:
        """So many of the indices 0 to `of` - 1: all in a random order, then all in another, ..."""
        rounds = -(-number // of)
        return [int(i) for _ in range(rounds) for i in self.rng.permutation(of)][:number]

    def file(self, name: str) -> str | None:
        """The text of a file of the `data` folder; None without such a folder.

        Raises ValueError, which says what to do, if the file cannot be read.
        """
        if self.data is None:
            return None
        try:
            return (self.data / name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--data: cannot read {self.data / name}: {error}") from error


TABLE: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("workloads.toml").read_text()
)


def usual_server_args(block_size_tokens: int) -> tuple[str, ...]:
    """Those of most workloads, which can so share their servers."""
    return ("--max-model-len", str(MAX_MODEL_LEN))


@dataclass(frozen=True)
class Workload:
    """What is asked of both servers.

    Attributes:
        name: as on the command line.
        summary: one line for `--help`.
        gain: where a gain can come from here, or why there is none; a sentence or two.
        program: run once per item, greedily where it does not say otherwise.
        items: so many items; called once for the warm-up and once for what is measured, with
            texts of different seeds. Raises ValueError if the data is not what it should be.
        num_requests: programs in a round, if `--requests` does not say; `quick_requests` with
            `--quick`.
        concurrency: programs under way at a time, if `--concurrency` does not say.
        model: what runs it, if `--model` does not say.
        structured: whether a grammar holds the output, so that some of it can be forced.
        stock_program: what is run on stock vLLM instead, where the comparison is with another way
            to the same answers; None if both run the same.
        stock_by_next_tokens: whether stock scores choices by a request of one token for each of
            their tokens, which read its prefix cache, and not by prompt log-probabilities.
        request_fields: what each request of a program has besides what the language sends, such as
            `tools`, given its item. Such requests are not streamed.
        pauses: whether the program waits for others than the server, such as tools and people. Its
            latency is then only the time in which it waits for the server.
        score: how good one run's result is, from 0 to 1, given its item and its final state; None
            if there is no right answer.
        server_args: flags that both servers get, given the number of tokens in a KV block.
    """

    name: str
    summary: str
    gain: str
    program: sgl.Program
    items: Callable[[Texts, int], list[Item]]
    num_requests: int
    quick_requests: int
    concurrency: int = 8
    model: str = TEXT_MODEL
    structured: bool = False
    request_fields: Callable[[Item], Mapping[str, Any]] | None = None
    pauses: bool = False
    stock_program: sgl.Program | None = None
    stock_by_next_tokens: bool = False
    score: Callable[[Item, sgl.ProgramState], float] | None = None
    server_args: Callable[[int], tuple[str, ...]] = usual_server_args

    @classmethod
    def of(
        cls, name: str, program: sgl.Program, items: Callable[[Texts, int], list[Item]], **more: Any
    ) -> Workload:
        """With what `workloads.toml` says of it."""
        return cls(name=name, program=program, items=items, **TABLE[name], **more)


def _one_token_words(tokenizer: Tokenizer) -> list[str]:
    by_id = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    words = [f" {token[1:]}" for token, _ in by_id if re.fullmatch("[Ġ▁][A-Za-z]{2,}", token)]
    # Twice: some tokenizers treat the beginning of a text in a way of their own.
    twice = tokenizer.encode_batch([word + word for word in words], add_special_tokens=False)
    return [word for word, both in zip(words, twice, strict=True) if len(both.ids) == 2][:MAX_WORDS]


def _tokenizer(model: str | Path) -> Tokenizer:
    from tokenizers import Tokenizer

    file = Path(model) / "tokenizer.json"
    if Path(model).is_absolute() and not file.is_file():
        raise ValueError(f"there is no tokenizer of {model}: there is no file {file}")
    try:
        if file.is_file():
            return Tokenizer.from_file(str(file))
        return Tokenizer.from_pretrained(str(model))
    except Exception as error:  # the library has none of its own
        raise ValueError(f"there is no tokenizer of {model}: {error}") from error
