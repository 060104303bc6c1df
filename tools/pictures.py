"""Draws the pictures of docs/primitives.md: the runs of the page's blocks, as `fork_tree_svg` shows
them.

Owns what the model says in these runs: a script stands for it, so that they are the same on every
machine. The programs are on the page. ``make pictures`` runs it.

    python -m tools.pictures [--check]
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sgl_vllm as sgl
from sgl_vllm.lang.backends.base import branch_name
from sgl_vllm.lang.backends.requests import GenAnswer, Generated, GenRequest, ScoreAnswer
from sgl_vllm.lang.prompts import ChatPrompt, Prompt
from sgl_vllm.lang.usage import Usage
from sgl_vllm.protocol.scoring import ChoiceTokens
from tests.pages import Block, blocks_of, printed_by
from tools.generated import main_writing

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE, FOLDER = DOCS / "primitives.md", DOCS / "pictures"
NEVER = "never"
"""What stands for an answer that does not come."""

Say = Callable[[str, str], str]
"""From the name of a branch and the end of its prompt to what the model says."""


@dataclass
class Script(sgl.Backend):
    """A model that says `say(branch, the last text of the prompt)`. Tokens are four characters."""

    say: Say

    name = "a script"

    @staticmethod
    def _texts(prompt: Prompt) -> list[str]:
        if isinstance(prompt, ChatPrompt):
            return [message.text for message in prompt.messages]
        return [prompt.text]

    def _usage(self, prompt: Prompt, said: str) -> Usage:
        num_chars = sum(map(len, self._texts(prompt)))
        return Usage(prompt_tokens=num_chars // 4, completion_tokens=len(said) // 4, calls=1)

    async def generate(self, request: GenRequest) -> GenAnswer:
        said = self.say(branch_name.get(), self._texts(request.prompt)[-1])
        if said == NEVER:
            await asyncio.Event().wait()
        return GenAnswer((Generated(said, "stop"),), self._usage(request.prompt, said))

    async def score(
        self, prompt: Prompt, choices: tuple[str, ...], *, unconditional: bool, warm: bool
    ) -> ScoreAnswer:
        best = self.say(branch_name.get(), self._texts(prompt)[-1])
        scored = tuple(ChoiceTokens((1,), (-0.1 if c == best else -3.0,), (-1.0,)) for c in choices)
        return ScoreAnswer(scored, self._usage(prompt, best))


# --- what the model says in the blocks of the page -----------------------------------------------


def say_agent(branch: str, asked: str) -> str:
    if asked.startswith("[{"):
        return '{"calls": []}'
    if asked == "Answer now.":
        return "They are Lima and Nairobi."
    peru, kenya = (
        f'{{"tool": "capital", "arguments": {{"country": "{country}"}}}}'
        for country in ("Peru", "Kenya")
    )
    return f'{{"calls": [{peru}, {kenya}]}}'


def say_vote(branch: str, asked: str) -> str:
    number = int(branch[-2])
    if number > 3:
        return NEVER
    if asked.endswith("Answer: "):
        return "381" if number == 1 else "391"
    return "17 * 20 = 340 and 17 * 3 = 51, so it is the sum."


def say_best_of(branch: str, asked: str) -> str:
    number = int(branch.partition("[")[2][0])
    if asked.startswith("Is it"):
        return "254"[number]
    return ["Bread, and other things that we bake.", "Fresh every day.", "We bake."][number]


def say_judge(branch: str, asked: str) -> str:
    if asked == "Explain tides.":
        return "The moon pulls at the sea. The side that is near to it is pulled most."
    return "524"[int(branch[-2])]


def say_map_reduce(branch: str, asked: str) -> str:
    return "Good, but slow." if asked.startswith("Review") else "Mostly good."


def say_retry_until(branch: str, asked: str) -> str:
    return "8" if "Try again" in asked else "A spider has eight legs."


SAYS: dict[str, Say] = {
    "agent": say_agent,
    "vote": say_vote,
    "best_of": say_best_of,
    "judge": say_judge,
    "map_reduce": say_map_reduce,
    "retry_until": say_retry_until,
}
"""By the name of the picture, in the order of the blocks."""


@dataclass(frozen=True)
class BlockRun:
    """A block of the page, what it has printed, and the picture of its last run."""

    name: str
    block: Block
    printed: str
    picture: str


def runs() -> Iterator[BlockRun]:
    """Runs the blocks of the page, one after the other."""
    namespace: dict[str, Any] = {"__name__": "page"}
    with tempfile.TemporaryDirectory() as folder:
        for (name, say), block in zip(SAYS.items(), blocks_of(PAGE), strict=True):
            sgl.set_default_backend(Script(say))
            printed = printed_by(block, namespace, Path(folder) / f"{name}.py")
            yield BlockRun(name, block, printed, sgl.fork_tree_svg(namespace["state"]) + "\n")


def pictures() -> dict[Path, str]:
    return {FOLDER / f"{run.name}.svg": run.picture for run in runs()}


if __name__ == "__main__":
    sys.exit(main_writing("make pictures", pictures))
