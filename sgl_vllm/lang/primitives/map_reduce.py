"""`map_reduce`: one answer about more documents than a prompt can hold."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any  # Any: what is reported

from sgl_vllm.lang.ir import Block, Expr
from sgl_vllm.lang.keywords import suggests
from sgl_vllm.lang.primitives.block import answer_of, at_least, block, variables_of
from sgl_vllm.lang.state import AsyncProgramState
from sgl_vllm.lang.tracing.standin import deferrable
from sgl_vllm.lang.transcript import Variable


@deferrable
@suggests
def map_reduce(
    name: str,
    documents: Sequence[str],
    *,
    map: Callable[[str], Expr],
    reduce: Callable[[str], Expr],
    max_chars: int = 16_000,
    separator: str = "\n\n",
    at_once: int = 32,
) -> Block:
    """Ask the model about each document, and then about its answers, until one is left.

    Every question is asked on a copy of the prompt so far, so put instructions that are the same
    for all before it. The last reduction is written into the prompt itself; its answer is the
    variable `name`.

    - `map`: from a document to the expression that asks about it, such as
      ``lambda text: sgl.user(text) + sgl.assistant(sgl.gen("part"))``. Its last variable is the
      answer.
    - `reduce`: the same, from answers, joined by `separator`, to one.
    - `max_chars`: how many characters of answers `reduce` is given. If there are more, they are
      reduced in groups of neighbors first, level by level.
    - `at_once`: how many questions are asked at the same time.

    `get_meta_info` has also `levels` (of reductions), `num_reductions` and `parts`, what `map`
    found in each document. Cost: the calls of `map` for each document, and of `reduce` for each
    reduction: about ``A / max_chars`` on the first level, where A is the length of all answers. And
    a prefix hint, so that the prompt before is computed once.

    Raises ValueError for no documents, and if two neighboring answers are longer than `max_chars`.
    """
    if isinstance(documents, str) or not documents:
        raise ValueError("map_reduce needs a list of at least one document")
    at_least(1, at_once=at_once, max_chars=max_chars)
    documents = [*documents]

    async def body(s: AsyncProgramState) -> Mapping[str, Variable]:
        found = parts = await _ask_each(s, "map", map, documents, at_once)
        levels, num_reductions = 1, 1
        while len(groups := _groups(parts, max_chars, len(separator))) > 1:
            if len(groups) == len(parts):
                raise ValueError(
                    f"no two neighboring answers fit into max_chars={max_chars}: raise it, or let "
                    f"`map` and `reduce` write less"
                )
            parts = [separator.join(group) for group in groups]
            many = [index for index, group in enumerate(groups) if len(group) > 1]
            asked = [parts[index] for index in many]
            reduced = await _ask_each(s, "reduce", reduce, asked, at_once)
            for index, answer in zip(many, reduced, strict=True):
                parts[index] = answer
            levels += 1
            num_reductions += len(many)
        expr, names = answer_of("reduce", reduce(separator.join(parts)))
        s += expr
        report: dict[str, Any] = {"levels": levels, "num_reductions": num_reductions}
        made = await variables_of(s, names, **report, parts=found)
        return {name: made[names[-1]]}

    return block("map_reduce", (name,), body)


async def _ask_each(
    s: AsyncProgramState,
    kind: str,
    question: Callable[[str], Expr],
    texts: Sequence[str],
    at_once: int,
) -> list[str]:
    """The answers about each text, asked on copies of the prompt."""

    slots = asyncio.Semaphore(at_once)

    async def ask(branch: AsyncProgramState, text: str) -> str:
        await slots.acquire()
        expr, names = answer_of(kind, question(text))
        branch += expr
        answer = (await variables_of(branch, names))[names[-1]].text
        slots.release()  # not after an error: the next question would begin before it is canceled
        return answer

    forks = s.fork(len(texts))
    asking = [asyncio.create_task(ask(*pair)) for pair in zip(forks, texts, strict=True)]
    try:
        answers = await asyncio.gather(*asking)  # the first error, and no more questions
    finally:
        for task in asking:
            task.cancel()
    forks.join()
    return answers


def _groups(parts: Sequence[str], max_chars: int, num_between: int) -> list[list[str]]:
    """Neighbors in as few groups as have at most `max_chars` each; a longer part is alone."""
    groups: list[list[str]] = []
    num_chars = 0
    for part in parts:
        num_chars += num_between + len(part)
        if not groups or num_chars > max_chars:
            groups.append([])
            num_chars = len(part)
        groups[-1].append(part)
    return groups
