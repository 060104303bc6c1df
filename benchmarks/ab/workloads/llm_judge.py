"""An essay judged by six criteria at once, and then scored from all six judgements.

Judgements are of 32 to 256 tokens, drawn beforehand.
"""

from __future__ import annotations

import sgl_vllm as sgl
from benchmarks.ab.workloads.base import Item, Texts, Workload

CRITERIA = ("clarity", "originality", "evidence", "structure", "style", "relevance")
ESSAY_TOKENS = (256, 768)
JUDGEMENT_TOKENS = (32, 256)
SCORE_TOKENS = 2

TASK = """\
You judge essays. For each criterion you say in some sentences what the essay does well and what it
does not, and you quote the words that show it. Then you give one score from 1 to 10 to the whole.

Essay:"""


@sgl.function
def judge(s: sgl.ProgramState, essay: str, lengths: tuple[int, ...]) -> None:
    s += TASK + essay
    forks = s.fork(len(CRITERIA))
    forks += [f"\nJudgement of its {criterion}:" for criterion in CRITERIA]
    forks += [sgl.gen("judgement", min_tokens=length, max_tokens=length) for length in lengths]
    forks.join("concate_and_append")
    s += "\nScore of the whole:"
    s += sgl.gen("score", min_tokens=SCORE_TOKENS, max_tokens=SCORE_TOKENS)


def items(texts: Texts, num_requests: int) -> list[Item]:
    return [
        {
            "essay": texts.text(texts.number(*ESSAY_TOKENS)),
            "lengths": tuple(texts.number(*JUDGEMENT_TOKENS) for _ in CRITERIA),
        }
        for _ in range(num_requests)
    ]


WORKLOAD = Workload.of("llm_judge", judge, items)
