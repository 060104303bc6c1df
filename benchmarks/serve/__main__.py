"""Runs `vllm bench serve` against stock vLLM and vLLM with the plugin, in alternating rounds.

Owns the command: its arguments, whose turn it is, what is done in a turn, and how it ends.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from benchmarks.ab import servers
from benchmarks.ab.client import run_programs
from benchmarks.ab.servers import ARMS, NAMES, Arm, ArmFailed, Pool, ServerSettings
from benchmarks.ab.workloads import no_sharing
from benchmarks.ab.workloads.base import Item, Texts, Vocabulary
from benchmarks.command import check_folders, positive, progress_bars, show_wait, versions
from benchmarks.models import resolve_model
from benchmarks.serve import result
from benchmarks.serve.result import Comparison, DatasetResult, Round
from sgl_vllm.server_process import (
    QUIET_ENVIRONMENT,
    ServerFailed,
    read_counters,
    sigterm_as_interrupt,
)

RESULT_FILE = "result.json"
MOST_PREFIXES = 10
NUM_PROMPTS = 128
QUICK_NUM_PROMPTS = 32
MAX_CONCURRENCY = 8
WARM_UP_REQUESTS = 8
WARM_UP_SEED = 1


def _prefix_repetition(num_prompts: int) -> tuple[str, ...]:
    # It sends as many for each prefix: with any other number of them, fewer than was asked for.
    num_prefixes = max(
        number
        for number in range(1, MOST_PREFIXES + 1)
        if num_prompts % number == 0 and (number == 1 or num_prompts >= 2 * number)
    )
    return ("--prefix-repetition-num-prefixes", str(num_prefixes))


DATASETS: dict[str, Callable[[int], tuple[str, ...]]] = {
    "prefix_repetition": _prefix_repetition,  # prefixes of 256 tokens, each followed by other 256
    "random": lambda num_prompts: (),  # 1,024 random tokens; nothing is shared
}
"""vLLM's names, and the options that so many prompts take."""

COMMENT = """\
vLLM's own load generator, `vllm bench serve`, sends the same requests to stock vLLM and to vLLM
with `--plugin sgl_vllm`, A B A B ..., one server at a time, so that the result does not depend on
the client of benchmarks.ab. Each turn begins with a few requests that are not measured, each
dataset with an empty prefix cache. Requests are greedy and always of full length, so both arms read
and write the same number of tokens.

Times and rates are what `vllm bench serve` says (medians over the rounds here, and in --json word
for word); forward passes, computed and cached prompt tokens are the server's own counts. A ratio
above 1 is better for the plugin, always. Times mean something only as ratios of one run.

A server takes half a minute to start on two cores, and `vllm bench serve` some ten seconds.
"""

EPILOG = """\
    python -m benchmarks.serve --quick
    python -m benchmarks.serve --dataset random --model shape:33m --json serve.json
    python -m benchmarks.serve --dataset random --request-rate 4 --max-concurrency 32
    python -m benchmarks.serve --dataset random --bench-args='--random-input-len 256'
"""


def main(argv: Sequence[str] | None = None) -> int:
    """The command. 0 if it could compare, 1 on failure, 130 if interrupted."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    console = Console(stderr=True, highlight=False)
    with sigterm_as_interrupt(), tempfile.TemporaryDirectory(prefix="bench-serve-") as folder:
        try:
            plan = plan_of(arguments, Path(folder))
        except ValueError as error:
            parser.error(str(error))
        try:
            comparison = compare(plan, console)
        except (ArmFailed, ServerFailed) as failure:
            console.print(f"[red]benchmarks.serve:[/red] {escape(str(failure))}", soft_wrap=True)
            return 1
        except KeyboardInterrupt:
            console.print("interrupted; everything is stopped")
            return 130
    result.show(comparison, Console(highlight=False, soft_wrap=True))
    if arguments.json:
        arguments.json.write_text(comparison.to_json())
    return 0


# -- what is asked for


@dataclass(frozen=True)
class Plan:
    """Everything that a comparison depends on. `datasets` are options of
    `vllm bench serve` by dataset, `words` those of all; `folder` is for the files of results."""

    model: str
    servers: ServerSettings
    words: tuple[str, ...]
    datasets: Mapping[str, tuple[str, ...]]
    num_prompts: int
    warm_up_items: tuple[Item, ...]
    rounds: int
    folder: Path


def plan_of(arguments: argparse.Namespace, folder: Path) -> Plan:
    """Raises ValueError for what does not fit together."""
    check_folders(json=arguments.json, data=None)
    bench_args = tuple(shlex.split(arguments.bench_args))
    model = resolve_model(arguments.model)
    tokenizer = _tokenizer_in(bench_args) or model
    vocabulary = Vocabulary.of(tokenizer)
    num_prompts = arguments.num_prompts or (QUICK_NUM_PROMPTS if arguments.quick else NUM_PROMPTS)
    return Plan(
        model=arguments.model,
        servers=ServerSettings.of(model, arguments.model, shlex.split(arguments.server_args)),
        words=(
            *("--num-prompts", str(num_prompts)),
            *("--model", arguments.model),
            *("--tokenizer", str(tokenizer)),
            *("--request-rate", arguments.request_rate),
            *("--max-concurrency", str(arguments.max_concurrency)),
            # Greedy and without an end of its own, so that both arms write as many tokens.
            *("--temperature", "0", "--ignore-eos"),
            *("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,99"),
            *bench_args,
        ),
        datasets={
            name: ("--dataset-name", name, *DATASETS[name](num_prompts))
            for name in arguments.dataset
        },
        num_prompts=num_prompts,
        warm_up_items=tuple(no_sharing.items(Texts(vocabulary, WARM_UP_SEED), WARM_UP_REQUESTS)),
        rounds=1 if arguments.quick else arguments.rounds,
        folder=folder,
    )


def _tokenizer_in(bench_args: tuple[str, ...]) -> Path | None:
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--tokenizer", type=Path)
    tokenizer: Path | None = parser.parse_known_args(bench_args)[0].tokenizer
    return tokenizer


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serve",
        description=COMMENT,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--dataset",
        nargs="+",
        choices=DATASETS,
        default=list(DATASETS),
        metavar="NAME",
        help=f"of vLLM's {' and '.join(DATASETS)}; default: both",
    )
    parser.add_argument(
        "--model",
        default="demo",
        help="demo (default), shape:33m or another shape of benchmarks.models, a folder, a name",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there too")
    parser.add_argument(
        "--quick", action="store_true", help="one round of fewer prompts: a look, not a result"
    )
    size = parser.add_argument_group("how much, for each dataset")
    size.add_argument("--rounds", type=positive, default=3, metavar="N", help="default 3")
    size.add_argument(
        "--num-prompts",
        type=positive,
        metavar="N",
        help=f"default {NUM_PROMPTS}",
    )
    size.add_argument(
        "--request-rate",
        type=_rate,
        default="inf",
        metavar="R",
        help="requests per second, at random times; default inf: as fast as they are answered",
    )
    size.add_argument(
        "--max-concurrency",
        type=positive,
        default=MAX_CONCURRENCY,
        metavar="N",
        help=f"requests under way at a time; default {MAX_CONCURRENCY}",
    )
    size.add_argument(
        "--bench-args",
        default="",
        metavar="OPTIONS",
        help="for `vllm bench serve`, as one word; `vllm bench serve --help=all` lists them",
    )
    servers_group = parser.add_argument_group("the servers")
    servers_group.add_argument(
        "--server-args",
        default="",
        metavar="FLAGS",
        help="for both, as one word: --server-args='--max-num-seqs 16'",
    )
    return parser


def _rate(text: str) -> str:
    """As it was written, which `vllm bench serve` reads in the same way."""
    if not float(text) > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return text


# -- the turns


def compare(plan: Plan, console: Console) -> Comparison:
    """Runs all rounds of both arms. ArmFailed or ServerFailed say which one could not."""
    rounds: dict[tuple[str, Arm], list[Round]] = {
        (name, arm): [] for name in plan.datasets for arm in ARMS
    }
    parts: dict[str, str] = {}
    capacity = servers.how_many_fit(plan.servers)
    with progress_bars(console) as progress, Pool(capacity) as pool:
        for number in range(1, plan.rounds + 1):
            for arm in ARMS:
                label = f"round {number} of {plan.rounds}, {NAMES[arm]}"
                task = progress.add_task(label, total=None)
                on_wait = partial(show_wait, progress, task, label)
                with pool.serving(arm, plan.servers, on_wait) as (url, _):
                    progress.update(task, description=f"{label}: warm-up")
                    warm_up(plan, url)
                    for name in plan.datasets:
                        progress.update(task, description=f"{label}: {name}")
                        turn_folder = plan.folder / f"{name}-{number}-{arm}"
                        turn_folder.mkdir()
                        done = take_turn(plan, name, url, turn_folder)
                        rounds[name, arm].append(done)
                    if arm == "sgl":
                        parts = servers.plugin_parts(url)
                progress.update(task, description=label)
                progress.stop_task(task)
    return Comparison(
        model=plan.model,
        datasets=tuple(
            DatasetResult(
                name=name,
                num_prompts=plan.num_prompts,
                command=("vllm", "bench", "serve", *options, *plan.words),
                stock=tuple(rounds[name, "stock"]),
                sgl=tuple(rounds[name, "sgl"]),
            )
            for name, options in plan.datasets.items()
        ),
        parts=parts,
        server_args=plan.servers.args,
        versions=versions("openai", "aiohttp", "transformers"),
    )


def warm_up(plan: Plan, url: str) -> None:
    """What the first requests of a process pay for is no part of the comparison."""
    run_programs(no_sharing.continuation, plan.warm_up_items, url, WARM_UP_REQUESTS)


def take_turn(plan: Plan, dataset: str, url: str, folder: Path) -> Round:
    """One arm's round with one dataset: from an empty cache, everything once."""
    before = servers.begin_turn(url)
    said = put_load((*plan.datasets[dataset], *plan.words), url, folder)
    return Round(result.joined(said, read_counters(url) - before), said)


def put_load(words: tuple[str, ...], url: str, folder: Path) -> dict[str, Any]:
    """What `vllm bench serve` writes about these options. `folder` is empty, for its file.

    Raises ArmFailed, also if it says that a request failed.
    """
    command = (
        *(sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "bench", "serve"),
        *words,
        *("--base-url", url),
        *("--save-result", "--result-dir", str(folder), "--result-filename", RESULT_FILE),
    )
    env = {**os.environ, **QUIET_ENVIRONMENT}
    if key := os.environ.get("VLLM_API_KEY"):
        env["OPENAI_API_KEY"] = key
    done = subprocess.run(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    end = "\n".join(done.stdout.splitlines()[-15:])
    file = folder / RESULT_FILE
    if not file.exists():
        raise ArmFailed(f"`vllm bench serve` failed. The end of its output:\n{end}")
    said: dict[str, Any] = json.loads(file.read_text())
    if said["failed"]:
        errors = re.findall(r"^Error \d+: .*$", done.stdout, re.MULTILINE)  # it lists the first ten
        raise ArmFailed(
            f"{said['failed']} requests failed, says `vllm bench serve`:\n"
            + ("\n".join(errors) or end)
        )
    return said


if __name__ == "__main__":
    sys.exit(main())
