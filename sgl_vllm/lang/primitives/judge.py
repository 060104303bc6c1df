"""`judge`: what the model thinks of the prompt so far."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from sgl_vllm.lang.api import select
from sgl_vllm.lang.ir import Block
from sgl_vllm.lang.keywords import suggests
from sgl_vllm.lang.primitives.block import Conversation, block, reported
from sgl_vllm.lang.state import AsyncProgramState
from sgl_vllm.lang.tracing.standin import deferrable
from sgl_vllm.lang.transcript import Variable

GRADE = "{criterion}\nGrade it from 1 to {scale}, where {scale} is best."


@deferrable
@suggests
def judge(name: str, criteria: str | Sequence[str], *, scale: int = 5) -> Block:
    """Let the model grade the prompt so far; the grade is the variable `name`.

    Each criterion is asked on a copy of the prompt, all at the same time, so the prompt itself does
    not change.

    - `criteria`: a question or a statement, or several.
    - `scale`: grades are selected from 1 to `scale` (2 to 10). The grade of a criterion is the mean
      of these numbers, weighted by how likely the model finds each, so it tells apart what one
      number would not. Backends without scores give the number itself. The variable is the mean
      over the criteria, a float.

    `get_meta_info` has `grades`, a dict from a criterion to its grade. Cost: a `select` per
    criterion, and with several also a prefix hint. Only the question is new to the cache. For
    grades with reasons, `gen` JSON on a copy of the prompt.

    Raises ValueError for no criteria, and for a `scale` that is not from 2 to 10.
    """
    asked = (criteria,) if isinstance(criteria, str) else tuple(criteria)
    if not asked:
        raise ValueError("judge needs at least one criterion")
    if not 2 <= scale <= 10:
        raise ValueError(f"scale must be from 2 to 10, not {scale}")

    async def grade(s: AsyncProgramState) -> Mapping[str, Variable]:
        numbers = [str(number) for number in range(1, scale + 1)]
        transcript = await s._read()
        forks = s.fork(len(asked))
        for branch, criterion in zip(forks, asked, strict=True):
            conversation = Conversation(branch, transcript)
            conversation.tell(GRADE.format(criterion=criterion, scale=scale))
            space = conversation.before_choice
            conversation.ask("Grade:", select(name, [space + number for number in numbers]))
        forks.join()
        grades = [await _mean_grade(branch, name) for branch in forks]
        mean = Variable.of(sum(grades) / len(grades))
        return {name: reported(mean, grades=dict(zip(asked, grades, strict=True)))}

    return block("judge", (name,), grade)


async def _mean_grade(branch: AsyncProgramState, name: str) -> float:
    """The mean of the grades under the model's own probabilities."""
    scores: list[float] = (await branch.get_meta_info(name))["scores"]
    if not scores:
        return float(await branch[name])
    weights = [math.exp(score - max(scores)) for score in scores]
    weighted = sum(grade * weight for grade, weight in enumerate(weights, start=1))
    return weighted / sum(weights)
