"""Compares vLLM with the plugin with stock vLLM, on real servers.

    python -m benchmarks.ab tight_cache
    python -m benchmarks.ab no_sharing --model shape:33m --rounds 5 --json result.json
    python -m benchmarks.ab tight_cache --quick --off radix

Owns the command: its arguments, whose turn it is, what is done in a turn, and how it ends.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

import sgl_vllm as sgl
from benchmarks.ab import result, servers
from benchmarks.ab.client import Run, run_programs, unique_prompt_tokens
from benchmarks.ab.result import Comparison, Limits, Round
from benchmarks.ab.servers import ARMS, NAMES, Arm, ArmFailed, ServerSettings
from benchmarks.ab.workloads import WORKLOADS, Workload
from benchmarks.ab.workloads.base import Item, Texts, Vocabulary
from benchmarks.models import DEMO_MODEL, resolve_model
from sgl_vllm import compat
from sgl_vllm.config import SCHEDULE_POLICIES
from sgl_vllm.hooks import PARTS
from sgl_vllm.serving import ServerFailed, read_counters, sigterm_as_interrupt

MAX_WARM_UP_PROGRAMS = 8
SEED = 0
WARM_UP_SEED = 1

COMMENT = """\
Stock vLLM and vLLM with `--plugin sgl_vllm` run by turns, A B A B ..., one server at a time: same
model, same flags, same programs, same concurrency, greedy. Each turn begins with a new server, a
warm-up that is not measured, and an empty prefix cache. A server takes half a minute to start on
two cores, so three rounds take some minutes, and --quick one or two.

What is printed are medians over the rounds. A ratio above 1 is better for the plugin, always.
Counts are the servers' own and exact; times mean something only as ratios of one run.
docs/benchmarks.md says how to read the rest.

With servers that run elsewhere (both started with VLLM_SERVER_DEV_MODE=1, so that their cache can
be emptied, and with the server flags that the result names):

    python -m benchmarks.ab no_sharing --stock-url http://HOST:8000 --sgl-url http://HOST:8001 \\
        --model THEIR_MODEL
"""


def main(argv: Sequence[str] | None = None) -> int:
    """The command. 0 if it could compare, 1 on failure, 130 if interrupted."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        plan = plan_of(arguments)
    except ValueError as error:
        parser.error(str(error))
    console = Console(stderr=True, highlight=False)
    with sigterm_as_interrupt():
        try:
            comparison = compare(plan, console)
        except (ArmFailed, ServerFailed) as failure:
            console.print(f"[red]benchmarks.ab:[/red] {escape(str(failure))}", soft_wrap=True)
            return 1
        except KeyboardInterrupt:
            console.print("interrupted; everything is stopped")
            return 130
    result.show(comparison, Console(highlight=False, soft_wrap=True))
    if plan.json_file:
        plan.json_file.write_text(comparison.to_json())
    return 0


# -- what is asked for


@dataclass(frozen=True)
class Plan:
    """Everything that a comparison depends on. `urls` are those of running servers, if any."""

    workload: Workload
    model: str
    settings: ServerSettings
    items: tuple[Item, ...]
    warm_up_items: tuple[Item, ...]
    rounds: int
    concurrency: int
    urls: dict[Arm, str] | None
    json_file: Path | None
    arguments: dict[str, Any]

    @property
    def sequences_at_once(self) -> int:
        """What the concurrency and `--max-num-seqs`, the last one if several, allow."""
        parser = argparse.ArgumentParser(allow_abbrev=False)
        parser.add_argument("--max-num-seqs", type=int, default=self.concurrency)
        known, _ = parser.parse_known_args(self.settings.args)
        return min(self.concurrency, known.max_num_seqs)


def plan_of(arguments: argparse.Namespace) -> Plan:
    """Raises ValueError for what does not fit together."""
    workload = WORKLOADS[arguments.workload]
    urls = _urls(arguments)
    if arguments.json and not arguments.json.parent.is_dir():
        raise ValueError(f"--json: there is no folder {arguments.json.parent}")
    if arguments.data and not arguments.data.is_dir():
        raise ValueError(f"--data: there is no folder {arguments.data}")
    plugin_config: dict[str, Any] = dict.fromkeys(arguments.off, False)
    if arguments.policy:
        plugin_config["schedule_policy"] = arguments.policy
    block_size_tokens = servers.default_block_size_tokens()
    model = resolve_model(arguments.model)
    settings = ServerSettings(
        model,
        served_model_name=arguments.model,
        args=(*workload.server_args(block_size_tokens), *shlex.split(arguments.server_args)),
        plugin_config=plugin_config,
        # The shipped model is so small that a second thread only waits for the first.
        env={"OMP_NUM_THREADS": "1"} if model == DEMO_MODEL else {},
    )
    usual = workload.quick_requests if arguments.quick else workload.num_requests
    vocabulary = Vocabulary.of(model)
    concurrency = arguments.concurrency or workload.concurrency
    num_warm_up = min(concurrency, MAX_WARM_UP_PROGRAMS)

    def texts(seed: int) -> Texts:
        return Texts(vocabulary, seed, arguments.data)

    return Plan(
        workload,
        arguments.model,
        settings,
        items=tuple(workload.items(texts(SEED), arguments.requests or usual)),
        warm_up_items=tuple(workload.items(texts(WARM_UP_SEED), num_warm_up)),
        rounds=1 if arguments.quick else arguments.rounds,
        concurrency=concurrency,
        urls=urls,
        json_file=arguments.json,
        arguments={name: _plain(value) for name, value in vars(arguments).items()},
    )


def _urls(arguments: argparse.Namespace) -> dict[Arm, str] | None:
    stock, sgl_url = arguments.stock_url, arguments.sgl_url
    if stock is None and sgl_url is None:
        return None
    if stock is None or sgl_url is None:
        raise ValueError("--stock-url and --sgl-url go together")
    if arguments.off or arguments.policy or arguments.server_args:
        raise ValueError("--off, --policy and --server-args are for servers started here")
    return {"stock": stock.rstrip("/"), "sgl": sgl_url.rstrip("/")}


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _parser() -> argparse.ArgumentParser:
    listed = "\n".join(f"  {name:<14}{one.summary}" for name, one in WORKLOADS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ab",
        description=f"{COMMENT}\nworkloads:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("workload", choices=WORKLOADS, metavar="WORKLOAD", help="see above")
    parser.add_argument(
        "--model",
        default="demo",
        help="demo (default), shape:33m or another shape of benchmarks.models, a folder, a name",
    )
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="real inputs, for workloads that name some"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there too")
    parser.add_argument(
        "--quick", action="store_true", help="one round of fewer programs: a look, not a result"
    )
    size = parser.add_argument_group("how much")
    size.add_argument("--rounds", type=_positive, default=3, metavar="N", help="default 3")
    size.add_argument("--requests", type=_positive, metavar="N", help="programs in a round")
    size.add_argument("--concurrency", type=_positive, metavar="N", help="programs at a time")
    servers_group = parser.add_argument_group("the servers")
    servers_group.add_argument(
        "--server-args",
        default="",
        metavar="FLAGS",
        help="for both, as one word: --server-args='--max-num-seqs 16'; they win over others",
    )
    servers_group.add_argument(
        "--off",
        action="append",
        default=[],
        choices=PARTS,
        metavar="PART",
        help=f"without this part of the plugin ({', '.join(PARTS)}); may be repeated",
    )
    servers_group.add_argument(
        "--policy",
        choices=SCHEDULE_POLICIES,
        help="the plugin's schedule_policy; its default if not given",
    )
    servers_group.add_argument("--stock-url", metavar="URL", help="a running stock server")
    servers_group.add_argument("--sgl-url", metavar="URL", help="a running one with the plugin")
    return parser


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


# -- the turns


def compare(plan: Plan, console: Console) -> Comparison:
    """Runs all rounds of both arms. ArmFailed or ServerFailed say which one could not."""
    rounds: dict[Arm, list[Round]] = {arm: [] for arm in ARMS}
    parts: dict[str, str] = {}
    unique = 0
    with _progress(console) as progress:
        for number in range(1, plan.rounds + 1):
            for arm in ARMS:
                label = f"round {number} of {plan.rounds}, {NAMES[arm]}"
                task = progress.add_task(label, total=len(plan.items))
                with _server(arm, plan, progress, task, label) as url:
                    progress.update(task, description=f"{label}: warm-up")
                    warm_up(plan, url)
                    progress.update(task, description=label)
                    progress.reset(task)
                    done, run = take_turn(plan, url, partial(progress.advance, task))
                    rounds[arm].append(done)
                    if arm == "sgl":
                        parts = servers.plugin_parts(url)
                    if not unique:
                        progress.update(task, description=f"{label}: counting unique tokens")
                        unique = unique_prompt_tokens(run, url)
                progress.update(task, description=f"{label}: {done.figures.wall_s:.1f} s")
    stock = rounds["stock"][0].figures
    compute_bound = result.is_compute_bound(plan.sequences_at_once, on_cpu=servers.on_cpu())
    limits = Limits(
        unique_prompt_tokens=unique,
        prompt_tokens=stock.prompt_tokens,
        output_tokens=stock.output_tokens,
        sequences_at_once=plan.sequences_at_once,
        compute_bound=compute_bound if plan.urls is None else None,
    )
    return Comparison(
        workload=plan.workload.name,
        model=plan.model,
        requests=len(plan.items),
        stock=tuple(rounds["stock"]),
        sgl=tuple(rounds["sgl"]),
        limits=limits,
        parts=parts,
        server_args=plan.settings.args,
        started_here=plan.urls is None,
        structured=plan.workload.structured,
        arguments=plan.arguments,
        versions=_versions(),
    )


def warm_up(plan: Plan, url: str) -> None:
    """What the first requests of a process pay for is no part of the comparison."""
    run_programs(plan.workload.program, plan.warm_up_items, url, plan.concurrency)


def take_turn(plan: Plan, url: str, on_done: Callable[[], object]) -> tuple[Round, Run]:
    """One arm's round: from an empty cache, everything once."""
    read_counters(url)  # waits until it is idle
    servers.empty_cache(url)
    before, cpu_before_s = read_counters(url), servers.started_cpu_s()
    run = run_programs(plan.workload.program, plan.items, url, plan.concurrency, on_done)
    server_cpu_s = servers.started_cpu_s() - cpu_before_s
    figures = result.figures(
        wall_s=run.wall_s,
        latencies_s=run.latencies_s,
        ttfts_s=run.ttfts_s,
        counters=read_counters(url) - before,
        client_cpu_s=run.client_cpu_s,
        server_cpu_s=server_cpu_s if plan.urls is None else None,
    )
    return Round(figures, run.texts), run


def _server(
    arm: Arm, plan: Plan, progress: Progress, task: TaskID, label: str
) -> AbstractContextManager[str]:
    if plan.urls is not None:
        return servers.attached(arm, plan.urls[arm])

    def on_wait(waited_s: float) -> None:
        progress.update(task, description=f"{label}: starting, {waited_s:.0f} s")

    return servers.started(arm, plan.settings, on_wait)


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


def _versions() -> dict[str, str]:
    """Of what runs here; servers that run elsewhere may have others."""
    vllm = compat.installed_vllm()
    found = {"sgl_vllm": sgl.__version__, "python": sys.version.split()[0]}
    if vllm is not None:
        found["vllm"] = f"{vllm.version} ({vllm.build})"
    for package in ("torch", "openai"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    sys.exit(main())
