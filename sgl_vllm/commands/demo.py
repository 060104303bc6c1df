"""`sgl-vllm demo`: one program on stock vLLM and on vLLM with the plugin, side by side.

Owns the order of the two servers, what is compared, and how it is printed. The counts are the
servers' own. Answers are compared text for text.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Annotated, Any  # Any: JSON

import httpx
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

import sgl_vllm as sgl
from sgl_vllm.commands.arguments import flag
from sgl_vllm.commands.client import Json, SglServer
from sgl_vllm.commands.terminal import CommandError, reason_of
from sgl_vllm.commands.tree import draw_nodes
from sgl_vllm.demo import MODEL_PATH
from sgl_vllm.demo.program import FIRST_COUNTRY, MORE_COUNTRIES, Guide, city_guide
from sgl_vllm.server_process import Counters, ServerFailed, VllmServer, sigterm_as_interrupt
from sgl_vllm.vllm_api import versions

MAX_MODEL_LEN = 2048
STOP_TIMEOUT_S = 5.0
ROLE_STYLES = {"system": "dim", "user": "bold cyan", "assistant": "green"}


DESCRIPTION = """\
Starts `vllm serve` twice on this machine, stock and with the plugin, and runs
the same program on both. Prints its answers, what each server computed for
them, and the radix tree. Stops everything at the end. Exit status: 0 if the
answers are the same.
"""


@dataclass(frozen=True)
class Arm:
    """The whole program on one server: answers, counts and time."""

    guides: tuple[Guide, ...]
    messages: tuple[Mapping[str, str], ...]  # the conversation about the first country
    counters: Counters
    wall_s: float


@dataclass(frozen=True)
class Comparison:
    """The same program on both servers, and the plugin's tree afterwards, as the server's route
    has it."""

    stock: Arm
    plugin: Arm
    tree: Json

    @property
    def same_answers(self) -> bool:
        return self.stock.guides == self.plugin.guides

    def to_json(self) -> str:
        def arm(run: Arm) -> dict[str, Any]:
            counts = asdict(run.counters)
            counts["computed_prompt_tokens"] = run.counters.computed_prompt_tokens
            return {**counts, "wall_s": run.wall_s, "guides": [asdict(g) for g in run.guides]}

        arms = {"stock": arm(self.stock), "plugin": arm(self.plugin)}
        content = {"same_answers": self.same_answers, "arms": arms, "tree": self.tree}
        return json.dumps(content, indent=2)


def command(
    as_json: Annotated[bool, flag("--json", "Print counts and answers as JSON.")] = False,
) -> int:
    """The exit status: 0 if both servers gave the same answers, 1 if not or on failure."""
    progress = Console(stderr=True, highlight=False)
    with sigterm_as_interrupt():
        try:
            comparison = compare(progress, as_json=as_json)
        except (ServerFailed, sgl.BackendError, sgl.ProgramError) as failure:
            raise CommandError(str(failure)) from failure
        except KeyboardInterrupt:
            progress.print("interrupted; both servers are stopped")
            return 130
    return 0 if comparison.same_answers else 1


def compare(progress: Console, *, as_json: bool) -> Comparison:
    """Runs the program on one server after the other, and prints the result."""
    with serving(progress, plugin=False) as server:
        stock = run_program(server)
    with serving(progress, plugin=True) as server:
        plugin = run_program(server)
        (tree,) = SglServer(server.url).tree()["engines"]
        comparison = Comparison(stock, plugin, tree)
        if as_json:
            print(comparison.to_json())
        else:
            show(comparison, Console(highlight=False))
    return comparison


def run_program(server: VllmServer) -> Arm:
    """Runs the program for one country after the other, and counts only that.

    Running them at the same time would take fewer forward passes on both servers, but the number
    would vary with how requests happen to be batched. (The branches of a fork still run together.)
    """
    backend = sgl.VLLM(server.url)
    _warm_up(server)
    before = server.counters()
    begun = time.monotonic()
    first = city_guide.run(FIRST_COUNTRY, temperature=0, backend=backend)
    more = city_guide.run_batch(
        [{"country": country} for country in MORE_COUNTRIES],
        temperature=0,
        backend=backend,
        num_threads=1,
    )
    wall_s = time.monotonic() - begun
    guides = tuple(state.ret_value for state in (first, *more))
    return Arm(guides, tuple(first.messages()), server.counters() - before, wall_s)


def _warm_up(server: VllmServer) -> None:
    """Sends a first request, so that one-time costs of a process do not count."""
    body = {"model": server.served_model_name, "prompt": "Input: cat\nOutput:", "max_tokens": 4}
    httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).raise_for_status()


@contextmanager
def serving(
    progress: Console,
    *,
    plugin: bool,
    port: int | None = None,
    plugin_config: Mapping[str, Any] | None = None,
    extra_args: Sequence[str] = (),
) -> Iterator[VllmServer]:
    """A server for the demo model, whose start is shown.

    Args:
        progress: where to show it.
        plugin: whether the server has the plugin.
        port: a port that is free, by default any.
        plugin_config: the plugin's options.
        extra_args: further flags of `vllm serve`.

    Raises:
        CommandError: there is no vLLM, or the port cannot be used.
        ServerFailed: the server does not start.
    """
    name = "vLLM with the plugin" if plugin else "stock vLLM"
    begun = time.monotonic()
    with progress.status(f"starting {name}") as status:
        try:
            server = VllmServer(
                MODEL_PATH,
                plugin=plugin,
                plugin_config=plugin_config,
                served_model_name="demo",
                max_model_len=MAX_MODEL_LEN,
                extra_args=(*_gpu_arguments(), *extra_args),
                env={"OMP_NUM_THREADS": "1"},  # it is too small to gain from a second thread
                port=port,
                stop_timeout_s=STOP_TIMEOUT_S,
                on_wait=lambda waited_s: status.update(f"starting {name}: {waited_s:.0f} s"),
            )
        except (OSError, OverflowError) as error:
            raise CommandError(
                f"port {port} cannot be used ({reason_of(error)}): set --port to another one"
            ) from None
        with server:
            progress.print(f"{name} is up after {time.monotonic() - begun:.0f} s")
            status.stop()
            yield server


def _gpu_arguments() -> tuple[str, ...]:
    """For a small model on a GPU: no compilation, and not all of the memory."""
    vllm = versions.installed_vllm()
    if vllm is None:
        raise CommandError(versions.unsupported_message(None) or "")
    if vllm.build == "cpu":
        return ()
    return ("--dtype", "float32", "--enforce-eager", "--gpu-memory-utilization", "0.5")


# -- showing


def show(comparison: Comparison, console: Console) -> None:
    first, *more = comparison.plugin.guides
    console.rule(f"The conversation about {first.country}")
    for message in comparison.plugin.messages:
        style = ROLE_STYLES.get(message["role"], "")
        console.print(Text.assemble((f"{message['role']:>9}  ", style), message["content"]))
    console.rule("The other countries")
    for guide in more:
        console.print(_guide_table(guide))
    console.rule("The radix tree afterwards")
    console.print(draw_nodes(comparison.tree, max_children=6))
    console.rule("The same program on both")
    console.print(
        f"vLLM's defaults, with KV blocks of {comparison.tree['block_size']} tokens.",
        style="dim",
    )
    console.print(Group(_counts_table(comparison), _verdict(comparison)))


def _guide_table(guide: Guide) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", style="dim", min_width=9)
    table.add_column()
    table.add_row("", f"[bold]{guide.country}[/bold]")
    table.add_row("gen", escape(f"{guide.capital} {guide.dish}"))
    table.add_row("fork", escape(" ".join(guide.tips)))
    table.add_row("regex", escape(guide.card))
    table.add_row("select", guide.continent)
    return table


def _counts_table(comparison: Comparison) -> Table:
    stock, plugin = comparison.stock, comparison.plugin
    table = Table(header_style="dim", box=None, pad_edge=False)
    table.add_column("")
    table.add_column("stock", justify="right")
    table.add_column("plugin", justify="right")
    for label, name in (
        ("forward passes", "forward_passes"),
        ("prompt tokens computed", "computed_prompt_tokens"),
        ("prompt tokens from the cache", "cached_prompt_tokens"),
        ("output tokens forced, not sampled", "forced_tokens"),
    ):
        table.add_row(label, *(str(getattr(arm.counters, name)) for arm in (stock, plugin)))
    table.add_row("time", f"{stock.wall_s:.1f} s", f"{plugin.wall_s:.1f} s")
    return table


def _verdict(comparison: Comparison) -> Text:
    if comparison.same_answers:
        return Text("same answers: yes", style="green")
    pairs = zip(comparison.stock.guides, comparison.plugin.guides, strict=True)
    lines = ["same answers: NO"]
    for stock, plugin in pairs:
        for name, expected in asdict(stock).items():
            if (got := asdict(plugin)[name]) != expected:
                lines += [f"{stock.country}, {name}:", f"  stock  {expected}", f"  plugin {got}"]
    return Text("\n".join(lines), style="red")
