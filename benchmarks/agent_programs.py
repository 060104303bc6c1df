"""What planning ahead gains agents: three programs with tools, run in five ways on one server.

    python -m benchmarks.agent_programs
    python -m benchmarks.agent_programs --quick --json result.json

The ways:

    ordinary   every tool is called in its turn (`sgl.tool`), and nothing is computed ahead
    ahead      the same, and while a tool runs the server computes the prompt up to it
    early      tools that only read are `sgl.read_only_tool`, which may be called before their turn
    marked     both
    compiled   both, run from the program's graph: nothing waits for the function to read a variable

Tools sleep for 50 to 500 ms, the same in each way. The ways alternate in every round, each with an
empty cache, and are to give the same texts. The output shows the median time of a program's runs,
the prompt tokens that were computed while a tool ran, and how many of them were computed again
(wasted). Times mean something only as ratios of one run of this command.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple
from unittest.mock import patch

from rich.console import Console
from rich.table import Table

import sgl_vllm as sgl
from benchmarks.ab.workloads.base import Texts, Vocabulary
from benchmarks.command import figures_table, parser_of, progress_bars, write_json
from benchmarks.models import resolve_model
from sgl_vllm.lang.prompts import Prompt
from sgl_vllm.server_process import ServerFailed, VllmServer, sigterm_as_interrupt

ORDINARY, MARKED, COMPILED = "ordinary", "marked", "compiled"


class Way(NamedTuple):
    """How programs are run."""

    calls_early: bool = False
    prefills: bool = False
    is_compiled: bool = False


WAYS = {
    ORDINARY: Way(),
    "ahead": Way(prefills=True),
    "early": Way(calls_early=True),
    MARKED: Way(calls_early=True, prefills=True),
    COMPILED: Way(calls_early=True, prefills=True, is_compiled=True),
}
SALT = "agent_programs"
"""A server tells hits in whole blocks only, but for requests with a salt."""
FULL, QUICK = ("shape:33m", 12), ("demo", 2)
"""A model, and how many runs of each program."""
TOOL_MS = (50, 500)
FOUND_TOKENS = (60, 180)
QUESTION_TOKENS = (20, 60)
GUIDE_TOKENS = 400

Tool = Callable[..., Any]


@dataclass(frozen=True)
class Delayed:
    """What a tool returns, and how long that takes."""

    text: str
    delay_s: float


def ask(answer: Delayed, *_: object) -> str:
    """A tool: a service that takes its time."""
    time.sleep(answer.delay_s)
    return answer.text


def programs(look: Tool) -> dict[str, sgl.Program]:
    """The programs, with `look` for their tools that only read."""

    @sgl.function
    def research(
        s: sgl.ProgramState, guide: str, question: str, tools: Mapping[str, Delayed]
    ) -> None:
        """A query that the model writes, then sources that depend on the question alone."""
        s += guide + "\nQuestion:" + question + "\nQuery:" + sgl.gen("query", max_tokens=16)
        s += "\nFound:" + look("found", ask, tools["search"], s["query"])
        s += "\nNews:" + look("news", ask, tools["news"], question)
        s += "\nRecords:" + look("records", ask, tools["records"], question)
        s += "\nAnswer:" + sgl.gen("answer", max_tokens=32)

    @sgl.function
    def review(
        s: sgl.ProgramState, guide: str, question: str, tools: Mapping[str, Delayed]
    ) -> None:
        """Three reviewers, each with a policy to look up; then the history, and a verdict."""
        s += guide + "\nChange:" + question
        branches = s.fork(3)
        for number, branch in enumerate(branches):
            branch += f"\nReviewer {number}:" + sgl.gen("remark", max_tokens=16)
            branch += "\nPolicy:" + look("policy", ask, tools[f"policy {number}"], number)
            branch += "\nVerdict:" + sgl.gen("verdict", max_tokens=8)
        for number, branch in enumerate(branches):
            s += f"\nReviewer {number}:" + branch["verdict"]
        s += "\nHistory:" + look("history", ask, tools["history"], question)
        s += "\nSummary:" + sgl.gen("summary", max_tokens=32)

    @sgl.function
    def repair(
        s: sgl.ProgramState, guide: str, question: str, tools: Mapping[str, Delayed]
    ) -> None:
        """A patch that is applied and tested; then what the change is described by."""
        s += guide + "\nBug:" + question + "\nPatch:" + sgl.gen("patch", max_tokens=32)
        s += guide + "\nApplied:" + sgl.tool("applied", ask, tools["apply"], s["patch"])
        s += "\nTests:" + look("tests", ask, tools["test"], s["applied"])
        s += "\nIssue:" + look("issue", ask, tools["issue"], question)
        s += "\nTemplate:" + look("template", ask, tools["template"], question)
        s += "\nDescription:" + sgl.gen("description", max_tokens=32)

    return {"research": research, "review": review, "repair": repair}


TOOLS = {
    "research": ("search", "news", "records"),
    "review": ("policy 0", "policy 1", "policy 2", "history"),
    "repair": ("apply", "test", "issue", "template"),
}


def computed_tokens(usage: sgl.Usage) -> int:
    """Prompt tokens that were not cached. Raises ValueError if the server does not tell."""
    if usage.cached_prompt_tokens is None:
        raise ValueError("the server does not report cached tokens")
    return usage.prompt_tokens - usage.cached_prompt_tokens


class Watched(sgl.VLLM):
    """Counts the tokens that it is asked to compute without generating any."""

    prefilled_tokens = 0

    async def warm(self, prompt: Prompt) -> sgl.Usage:
        return self._counted(await super().warm(prompt))

    async def warm_ahead(self, prompt: Prompt) -> sgl.Usage:
        return self._counted(await super().warm_ahead(prompt))

    def _counted(self, usage: sgl.Usage) -> sgl.Usage:
        self.prefilled_tokens += computed_tokens(usage)
        return usage


@dataclass
class Arm:
    """One way to run one program.

    Attributes:
        seconds: of each run.
        computed_tokens: of all prompts, those computed ahead included.
        prefilled_tokens: computed ahead, what a fork's branches share included.
    """

    program: sgl.Program
    seconds: list[float] = field(default_factory=list)
    computed_tokens: int = 0
    prefilled_tokens: int = 0
    texts: list[str] = field(default_factory=list)

    def run(self, backend: Watched, item: Mapping[str, Any]) -> None:
        prefilled = backend.prefilled_tokens
        sgl.flush_cache(backend)
        started = time.perf_counter()
        state = self.program.run(backend=backend, temperature=0, ignore_eos=True, **item)
        self.seconds.append(time.perf_counter() - started)
        self.computed_tokens += computed_tokens(state.usage)
        self.prefilled_tokens += backend.prefilled_tokens - prefilled
        self.texts.append(state.text())


@dataclass(frozen=True)
class Result:
    """One program.

    Attributes:
        seconds: median of one run, by way.
        prefilled_tokens, wasted_tokens: by way, of all runs; computed ahead, and again.
        num_different: runs that did not give the ordinary way's text.
    """

    program: str
    seconds: dict[str, float]
    prefilled_tokens: dict[str, int]
    wasted_tokens: dict[str, int]
    num_different: int


def items(name: str, texts: Texts, number: int) -> list[dict[str, Any]]:
    """The arguments of `number` runs of a program."""

    def tool() -> Delayed:
        return Delayed(texts.text(texts.number(*FOUND_TOKENS)), texts.number(*TOOL_MS) / 1000)

    return [
        {
            "guide": texts.text(GUIDE_TOKENS),
            "question": texts.text(texts.number(*QUESTION_TOKENS)),
            "tools": {tool_name: tool() for tool_name in TOOLS[name]},
        }
        for _ in range(number)
    ]


def measured(name: str, arms: Mapping[str, Arm]) -> Result:
    ordinary = arms[ORDINARY]
    return Result(
        name,
        {way: statistics.median(arm.seconds) for way, arm in arms.items()},
        {way: arm.prefilled_tokens - ordinary.prefilled_tokens for way, arm in arms.items()},
        {way: max(0, arm.computed_tokens - ordinary.computed_tokens) for way, arm in arms.items()},
        sum(arm.texts[i] != text for arm in arms.values() for i, text in enumerate(ordinary.texts)),
    )


def table_of(results: list[Result]) -> Table:
    headings = ("program", "", "s", "faster than ordinary", "computed ahead", "wasted")
    table = figures_table(*headings, num_left=2)
    for result in results:
        for way in WAYS:
            ahead, wasted = result.prefilled_tokens[way], result.wasted_tokens[way]
            table.add_row(
                result.program if way == ORDINARY else "",
                way,
                f"{result.seconds[way]:.3f}",
                f"{result.seconds[ORDINARY] / result.seconds[way]:.2f}x",
                f"{ahead}",
                f"{wasted}" + (f" ({wasted / ahead:.0%})" if ahead else ""),
                end_section=way == COMPILED,
            )
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """The command. 0 if it could measure and all texts are the same, otherwise 1."""
    parser = parser_of("agent_programs", __doc__)
    parser.add_argument("--quick", action="store_true", help="the demo model, 2 of each")
    arguments = parser.parse_args(argv)
    name, rounds = QUICK if arguments.quick else FULL
    model = resolve_model(name)
    texts = Texts(Vocabulary.of(model), seed=0)
    console = Console(highlight=False)
    try:
        with (
            sigterm_as_interrupt(),
            VllmServer(
                model,
                plugin=True,
                max_model_len=2048,
                extra_args=("--enable-prompt-tokens-details",),  # so that hits are told
            ) as server,
        ):
            results = compare(Watched(server.url, cache_salt=SALT), texts, rounds)
    except ServerFailed as error:
        console.print(f"[red]{error}[/]")
        return 1
    console.print(table_of(results))
    write_json(arguments.json, [asdict(result) for result in results])
    different = sum(result.num_different for result in results)
    if different:
        console.print(f"[red]{different} runs gave another text than the ordinary way[/]")
    return 1 if different else 0


def compare(backend: Watched, texts: Texts, rounds: int) -> list[Result]:
    """Run every program in every way, `rounds` times with other items, after one that does not
    count."""
    results = []
    in_turn, early = programs(sgl.tool), programs(sgl.read_only_tool)
    with progress_bars(Console(stderr=True)) as progress:
        for name in TOOLS:
            arms = {}
            for way, how in WAYS.items():
                program = (early if how.calls_early else in_turn)[name]
                arms[way] = Arm(program.compile() if how.is_compiled else program)
            (first,) = items(name, texts, 1)
            for arm in arms.values():
                Arm(arm.program).run(backend, first)
            todo = items(name, texts, rounds)
            for index, item in enumerate(progress.track(todo, description=name)):
                turn = index % len(WAYS)  # another way is the first in each round
                for way in (*[*WAYS][turn:], *[*WAYS][:turn]):
                    with patch.object(
                        sgl.global_config, "enable_prefill_during_tools", WAYS[way].prefills
                    ):
                        arms[way].run(backend, item)
            results.append(measured(name, arms))
    return results


if __name__ == "__main__":
    sys.exit(main())
