"""A tree of thoughts on the Game of 24: each thought is continued by three others, three levels
deep, 3 + 9 + 27 generations.

Decoding is greedy, so each of the three begins with words of its own; the paper samples. Thoughts
are of 24 to 256 tokens, drawn beforehand: a round is so half as long as with the paper's limit of
256 for all. With `--data` the puzzles are those of the Game of 24's list.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator

import sgl_vllm as sgl
from benchmarks.ab.workloads.base import Item, Texts, Workload

PUZZLES_FILE = "game24.csv"
PUZZLES_COLUMN = "Puzzles"

LEAD_INS = ("\nOne way is to add", "\nAnother way is to multiply", "\nOr try to divide")
NUM_LEVELS = 3
NUM_THOUGHTS = sum(len(LEAD_INS) ** level for level in range(1, NUM_LEVELS + 1))
OUTPUT_TOKENS = (24, 256)

TASK = """\
Four numbers are given. Use each of them once, with +, -, * and /, to get 24. Write down one step
after the other, and after each step which numbers are left.

Numbers: 3 5 6 9
3 * 5 = 15 (left: 6 9 15)
15 - 9 = 6 (left: 6 6)
Wrong: 6 + 6 = 12 and 6 * 6 = 36.
5 - 3 = 2 (left: 2 6 9)
2 * 9 = 18 (left: 6 18)
6 + 18 = 24 (left: 24)
Answer: 2 * 9 + 6 where 2 = 5 - 3

Numbers: 2 2 7 8
7 + 8 = 15 (left: 2 2 15)
Wrong: there is no way from 2 2 15 to 24.
2 * 8 = 16 (left: 2 7 16)
Wrong: 7 + 16 = 23 (left: 2 23)
7 - 2 = 5 (left: 2 5 8)
Wrong: 2 * 8 + 5 = 21 and 5 * 2 + 8 = 18.
2 + 2 = 4 (left: 4 7 8)
7 - 4 = 3 (left: 3 8)
3 * 8 = 24 (left: 24)
Answer: (7 - (2 + 2)) * 8

Numbers: """


@sgl.function
def search(s: sgl.ProgramState, puzzle: str, lengths: tuple[int, ...]) -> None:
    s += TASK + puzzle
    _continue(s, iter(lengths), NUM_LEVELS)


def _continue(s: sgl.ProgramState, lengths: Iterator[int], num_levels: int) -> None:
    forks = s.fork(len(LEAD_INS))
    forks += list(LEAD_INS)
    for branch in forks:
        length = next(lengths)
        branch += sgl.gen("thought", min_tokens=length, max_tokens=length)
        if num_levels > 1:
            _continue(branch, lengths, num_levels - 1)
    forks.join("concate_and_append")


def items(texts: Texts, num_requests: int) -> list[Item]:
    puzzles = _real_puzzles(texts)
    if puzzles is None:
        puzzles = [
            " ".join(str(texts.number(1, 13)) for _ in range(4)) for _ in range(num_requests)
        ]
    return [
        {
            "puzzle": puzzles[index],
            "lengths": tuple(texts.number(*OUTPUT_TOKENS) for _ in range(NUM_THOUGHTS)),
        }
        for index in texts.order(num_requests, len(puzzles))
    ]


def _real_puzzles(texts: Texts) -> list[str] | None:
    content = texts.file(PUZZLES_FILE)
    if content is None:
        return None
    puzzles = [row.get(PUZZLES_COLUMN) for row in csv.DictReader(content.splitlines())]
    if not puzzles or not all(puzzles):
        raise ValueError(f"--data: {PUZZLES_FILE} has no column {PUZZLES_COLUMN}, or nothing in it")
    return [puzzle for puzzle in puzzles if puzzle]


WORKLOAD = Workload.of("tree_of_thought", search, items)
