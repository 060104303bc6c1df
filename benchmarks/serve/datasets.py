"""What `vllm bench serve` is to send: its options for each dataset, and the files of prompts.

Owns the names of datasets and the prompts of those that vLLM reads from a file. Pure but for
writing that file. The lengths of `prefix_repetition` and `random` are vLLM's own defaults.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.ab.workloads import gsm8k as problems
from benchmarks.ab.workloads.base import Texts
from benchmarks.ab.workloads.questions import mtbench

NUM_SHOTS = 5
OUTPUT_TOKENS = 128
MOST_PREFIXES = 10
# vLLM's reader of ShareGPT's format leaves longer ones out without a word; some tokenizers add a
# few tokens of their own.
MAX_PROMPT_TOKENS = 1000
# In tokens, of made-up prompts: as GSM8K's and MT-bench's are with a usual tokenizer.
SHOTS_TOKENS = 700
QUESTION_TOKENS = (20, 120)
TURN_TOKENS = (15, 250)


@dataclass(frozen=True)
class Asked:
    """One dataset, ready to be sent: `options` are those of `vllm bench serve`.

    `num_prompts` is what is really sent: a file may have fewer than was asked for.
    """

    name: str
    num_prompts: int
    options: tuple[str, ...]


@dataclass(frozen=True)
class Dataset:
    """`ask` gets the texts, how many prompts are wanted, and a folder for a file of them. It raises
    ValueError if the data is not what it should be."""

    summary: str
    ask: Callable[[Texts, int, Path], Asked]


# -- those that vLLM makes up


def _prefix_repetition(texts: Texts, num_prompts: int, folder: Path) -> Asked:
    # It sends as many for each prefix: with any other number of them, fewer than was asked for.
    num_prefixes = max(
        number
        for number in range(1, MOST_PREFIXES + 1)
        if num_prompts % number == 0 and (number == 1 or num_prompts >= 2 * number)
    )
    options = ("--prefix-repetition-num-prefixes", str(num_prefixes))
    return Asked(
        "prefix_repetition", num_prompts, ("--dataset-name", "prefix_repetition", *options)
    )


def _random(texts: Texts, num_prompts: int, folder: Path) -> Asked:
    return Asked("random", num_prompts, ("--dataset-name", "random"))


# -- those that it reads from a file


def _custom(texts: Texts, num_prompts: int, folder: Path) -> Asked:
    return of_file("custom", gsm8k(texts, num_prompts), texts, folder)


def _custom_mtbench(texts: Texts, num_prompts: int, folder: Path) -> Asked:
    return of_file("custom_mtbench", mt_bench(texts, num_prompts), texts, folder)


def gsm8k(texts: Texts, num_prompts: int) -> list[str]:
    """Five solved problems, the same ones each time, and then one to solve."""
    if texts.data is None:
        shots = texts.text(SHOTS_TOKENS)
        return [
            f"{shots}\n\nQuestion:{texts.text(texts.number(*QUESTION_TOKENS))}\nAnswer:"
            for _ in range(num_prompts)
        ]
    solved = problems.read_problems(texts, problems.EXAMPLES_FILE)[:NUM_SHOTS]
    shots = "".join(problem.with_answer() for problem in solved)
    unsolved = problems.read_problems(texts, problems.FILE)[:num_prompts]
    return [shots + problem.asked() for problem in unsolved]


def mt_bench(texts: Texts, num_prompts: int) -> list[str]:
    """First turns, which have nothing in common."""
    questions = mtbench(texts)
    if questions is None:
        return [texts.text(texts.number(*TURN_TOKENS)) for _ in range(num_prompts)]
    return [turns[0] for turns in questions[:num_prompts]]


def of_file(name: str, prompts: list[str], texts: Texts, folder: Path) -> Asked:
    """Prompts that are not too long for vLLM's readers, in a file.

    They are in ShareGPT's format, whose reader in vLLM needs no package that servers lack.
    """
    kept = [one for one in prompts if texts.vocabulary.num_tokens(one) <= MAX_PROMPT_TOKENS]
    if not kept:
        raise ValueError(f"{name}: every prompt has more than {MAX_PROMPT_TOKENS} tokens")
    file = folder / f"{name}.json"
    turns = [[{"value": prompt}, {"value": ""}] for prompt in kept]
    file.write_text(json.dumps([{"conversations": conversation} for conversation in turns]))
    options = ("--dataset-name", "sharegpt", "--sharegpt-output-len", str(OUTPUT_TOKENS))
    return Asked(name, len(kept), (*options, "--dataset-path", str(file)))


DATASETS: Mapping[str, Dataset] = {
    "prefix_repetition": Dataset(
        "vLLM's: up to ten prefixes of 256 tokens, each followed by other 256", _prefix_repetition
    ),
    "random": Dataset("vLLM's: 1,024 random tokens; nothing is shared", _random),
    "custom": Dataset("GSM8K's questions, after the same five solved ones", _custom),
    "custom_mtbench": Dataset("MT-bench's first turns; nothing is shared", _custom_mtbench),
}
