"""Skeleton of thought: an answer in five tips first, then all tips expanded at once, then joined.

With `--data` what is asked are MT-bench's questions.
"""

from __future__ import annotations

import sgl_vllm as sgl
from benchmarks.ab.workloads.base import Item, Texts, Workload
from benchmarks.ab.workloads.questions import mtbench

NUM_TIPS = 5
QUESTION_TOKENS = (32, 96)
MAX_QUESTION_TOKENS = 256
TIP_TOKENS = (8, 24)
EXPANSION_TOKENS = (32, 128)

TASK = """\
You organize answers. First give the skeleton of an answer to the question: five tips of a few words
each, not whole sentences, that are independent of each other and in the order in which a reader
should meet them. Then expand each tip on its own, in one or two short sentences that say what to do
and why, without repeating the question or the other tips.

Question: How do I sleep better?
Skeleton:
1. Same hours every day
2. A dark, cool room
3. No screens late
4. Little coffee
5. Some exercise
Tip 3 in detail: Put the phone away an hour before bed. Its light and its news keep you awake.

Question:"""


@sgl.function
def answer(
    s: sgl.ProgramState,
    question: str,
    tip_lengths: tuple[int, ...],
    expansion_lengths: tuple[int, ...],
) -> None:
    s += TASK + question + "\nSkeleton:"
    for number, length in enumerate(tip_lengths, start=1):
        s += f"\n{number}." + sgl.gen("tip", min_tokens=length, max_tokens=length)
    forks = s.fork(NUM_TIPS)
    forks += [f"\nTip {number} in detail:" for number in range(1, NUM_TIPS + 1)]
    forks += [
        sgl.gen("expansion", min_tokens=length, max_tokens=length) for length in expansion_lengths
    ]
    forks.join("concate_and_append")


def items(texts: Texts, num_requests: int) -> list[Item]:
    def lengths(bounds: tuple[int, int]) -> tuple[int, ...]:
        return tuple(texts.number(*bounds) for _ in range(NUM_TIPS))

    real = mtbench(texts)
    if real is None:
        asked = [texts.text(texts.number(*QUESTION_TOKENS)) for _ in range(num_requests)]
    else:
        cut = texts.vocabulary.beginning
        asked = [cut(" " + turns[0], MAX_QUESTION_TOKENS) for turns in real]
    return [
        {
            "question": asked[index],
            "tip_lengths": lengths(TIP_TOKENS),
            "expansion_lengths": lengths(EXPANSION_TOKENS),
        }
        for index in texts.order(num_requests, len(asked))
    ]


WORKLOAD = Workload.of("skeleton_of_thought", answer, items)
