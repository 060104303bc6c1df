"""A tool that runs for seconds, while other clients need the cache: is its prompt there afterwards?

    python -m benchmarks.long_tools
    python -m benchmarks.long_tools --quick --json result.json

One program reads a long guide, makes a plan, calls a tool of five seconds, and reports. While the
tool runs, other clients, which give no hints, send more than the cache holds. On a slow machine the
tool takes longer, so that they are done when half of its time is over. The ways:

    once     the prompt has been computed for the plan, and is evicted while the tool runs
    twice    it is sent again shortly before the tool usually returns: the default

The ways alternate in every round, each with an empty cache, and are to give the same texts. The
output shows the median time from the tool's return to the end of the answer, and the prompt tokens
that were computed for that answer, after the first rounds that show how long the tool takes.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import openai
from rich.console import Console
from rich.table import Table

import sgl_vllm as sgl
from benchmarks.ab.workloads.base import Texts
from benchmarks.agent_programs import SALT, computed_tokens
from benchmarks.command import one_server_arguments, progress_bars
from sgl_vllm.lang import prefill_ahead
from sgl_vllm.lang.backends.base import GenAnswer, GenRequest
from sgl_vllm.server_process import ServerFailed, VllmServer, sigterm_as_interrupt

ONCE, TWICE = WAYS = ("once", "twice")
BLOCK_SIZE = 32
OTHERS = 5
"""Prompts of other clients while the tool runs."""
NUM_UNCOUNTED = 4
"""Runs that show how long the tool takes."""


@dataclass(frozen=True)
class Sizes:
    """In tokens and seconds. The cache holds the program's prompt and two others at a time."""

    guide: int
    other: int
    tool_s: float

    @property
    def num_blocks(self) -> int:
        return (self.guide + 2 * self.other + 512) // BLOCK_SIZE


FULL, QUICK = Sizes(guide=3000, other=2500, tool_s=5.0), Sizes(guide=1000, other=600, tool_s=4.0)


@dataclass(frozen=True)
class Item:
    """The texts of one run."""

    guide: str
    found: str
    others: tuple[str, ...]

    @classmethod
    def of(cls, texts: Texts, sizes: Sizes) -> Item:
        others = tuple(texts.text(sizes.other) for _ in range(OTHERS))
        return cls(texts.text(sizes.guide), texts.text(60), others)


@dataclass
class Result:
    """What one way showed, run by run.

    Attributes:
        seconds: from the tool's return to the end of the answer.
        computed: prompt tokens that were computed for the answer.
    """

    way: str
    seconds: list[float] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)


class Answers(sgl.VLLM):
    """Knows how much was computed for its last answer."""

    computed = 0

    async def generate(self, request: GenRequest) -> GenAnswer:
        answer = await super().generate(request)
        self.computed = computed_tokens(answer.usage)
        return answer


class Tool:
    """Takes `seconds`, in which other clients are served, and twice as long as that takes at first
    if that is more."""

    def __init__(self, url: str, seconds: float) -> None:
        self._others = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self._model = self._others.models.list().data[0].id
        self._seconds = seconds
        self.returned_at = 0.0

    def __call__(self, item: Item) -> str:
        begun = time.perf_counter()
        for text in item.others:
            self._others.completions.create(model=self._model, prompt=text, max_tokens=1)
        if not self.returned_at:
            self._seconds = max(self._seconds, 2 * (time.perf_counter() - begun))
        time.sleep(max(0.0, begun + self._seconds - time.perf_counter()))
        self.returned_at = time.perf_counter()
        return item.found


@sgl.function
def deploy(s: sgl.ProgramState, item: Item, tool: Tool) -> None:
    """A long guide, a plan, a tool, and a report of what it returned."""
    s += item.guide + "\nPlan:" + sgl.gen("plan", max_tokens=8)
    s += "\nDeployed:" + sgl.tool("deployed", tool, item)
    s += "\nReport:" + sgl.gen("report", max_tokens=1)


def compare(url: str, texts: Texts, sizes: Sizes, rounds: int) -> list[Result]:
    """Run the program in every way, `rounds` times with other texts, after as many runs as show how
    long the tool takes."""
    backend, tool = Answers(url, cache_salt=SALT), Tool(url, sizes.tool_s)
    results = [Result(way) for way in WAYS]
    for _ in range(NUM_UNCOUNTED):
        _run(Result(ONCE), backend, tool, Item.of(texts, sizes))
    with progress_bars(Console(stderr=True)) as progress:
        for _ in progress.track(range(rounds), description="rounds"):
            item = Item.of(texts, sizes)
            for result in results:
                _run(result, backend, tool, item)
            results = [*results[1:], results[0]]
    return sorted(results, key=lambda result: WAYS.index(result.way))


def _run(result: Result, backend: Answers, tool: Tool, item: Item) -> None:
    sgl.flush_cache(backend)
    long_tool_s = prefill_ahead.LONG_TOOL_S
    if result.way == ONCE:
        prefill_ahead.LONG_TOOL_S = float("inf")
    try:
        state = deploy.run(item=item, tool=tool, backend=backend, temperature=0, ignore_eos=True)
        text = state.text()
    finally:
        prefill_ahead.LONG_TOOL_S = long_tool_s
    result.seconds.append(time.perf_counter() - tool.returned_at)
    result.computed.append(backend.computed)
    result.texts.append(text)


def table_of(results: Sequence[Result]) -> Table:
    table = Table(title="after a long tool, beside other clients")
    for heading in ("prompt sent", "s to the answer", "faster", "computed then"):
        table.add_column(heading, justify="left" if heading == "prompt sent" else "right")
    once = statistics.median(results[0].seconds)
    for result in results:
        seconds = statistics.median(result.seconds)
        computed = statistics.median(result.computed)
        table.add_row(result.way, f"{seconds:.3f}", f"{once / seconds:.2f}x", f"{computed:.0f}")
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """The command. 0 if it could measure and all texts are the same, otherwise 1."""
    arguments, model, texts = one_server_arguments(
        argv,
        prog="python -m benchmarks.long_tools",
        description=__doc__,
        rounds=9,
        quick_rounds=1,
    )
    sizes = QUICK if arguments.quick else FULL
    console = Console(highlight=False)
    extra_args = (
        "--num-gpu-blocks-override",
        str(sizes.num_blocks),
        "--enable-prompt-tokens-details",
    )
    try:
        with (
            sigterm_as_interrupt(),
            VllmServer(
                model,
                plugin=True,
                max_model_len=sizes.guide + 512,
                block_size=BLOCK_SIZE,
                extra_args=extra_args,
            ) as server,
        ):
            results = compare(server.url, texts, sizes, arguments.rounds)
    except ServerFailed as error:
        console.print(f"[red]{error}[/]")
        return 1
    console.print(table_of(results))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    if any(result.texts != results[0].texts for result in results):
        console.print("[red]the texts differ[/]")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
