"""Compares vLLM with the plugin with stock vLLM, on real servers.

    python -m benchmarks.ab tight_cache
    python -m benchmarks.ab no_sharing --model shape:33m --rounds 5 --json result.json
    python -m benchmarks.ab tight_cache --quick --off radix
    python -m benchmarks.ab all --json FOLDER

Owns the command: its arguments and how it ends.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from benchmarks.ab import servers, table
from benchmarks.ab.plan import ALL, plans_of, urls_of
from benchmarks.ab.rounds import compare
from benchmarks.ab.servers import ArmFailed, Pool
from benchmarks.ab.variants import CAN_BE_OFF
from benchmarks.ab.workloads import WORKLOADS
from benchmarks.command import parser_of, positive, progress_bars
from sgl_vllm.config import choices_of
from sgl_vllm.server_process import ServerFailed, sigterm_as_interrupt

COMMENT = """\
Stock vLLM and vLLM with `--plugin sgl_vllm` run in alternating rounds, A B A B ..., one at a time:
same model, same flags, same programs, same concurrency, greedy. Each round begins with a warm
server and an empty prefix cache. Servers stay up between their rounds if they fit into memory, and
are started again otherwise: half a minute each on two cores.

The output shows medians over the rounds. A ratio above 1 always favors the plugin. Counts are the
servers' own and exact; times mean something only as ratios of one run.
docs/benchmarks.md says how to read the rest.

With servers that run elsewhere (both started with VLLM_SERVER_DEV_MODE=1, so that their cache can
be emptied, and with the server flags that the result names):

    python -m benchmarks.ab no_sharing --stock-url http://HOST:8000 --sgl-url http://HOST:8001 \\
        --model THEIR_MODEL
"""


def main(argv: Sequence[str] | None = None) -> int:
    """The command. 0 if it could compare, 1 on failure, 130 if interrupted."""
    command = parser()
    arguments = command.parse_args(argv)
    try:
        plans = plans_of(arguments)
        urls = urls_of(arguments)
    except ValueError as error:
        command.error(str(error))
    errors = Console(stderr=True, highlight=False)
    console = Console(highlight=False, soft_wrap=True)
    capacity = arguments.servers_at_once or servers.how_many_fit(plans[0].settings)
    all_done = True
    with sigterm_as_interrupt():
        try:
            with Pool(capacity) as pool:
                for plan in plans:
                    try:
                        with progress_bars(errors) as progress:
                            comparison = compare(plan, pool, urls, progress)
                    except (ArmFailed, ServerFailed) as failure:
                        said = f"[red]benchmarks.ab, {plan.workload.name}:[/red] "
                        errors.print(said + escape(str(failure)), soft_wrap=True)
                        all_done = False
                        continue
                    table.show(comparison, console)
                    if arguments.json:
                        file: Path = arguments.json
                        if file.is_dir():
                            file /= f"{plan.workload.name}.json"
                        file.write_text(comparison.to_json())
        except KeyboardInterrupt:
            errors.print("interrupted; everything is stopped")
            return 130
    return 0 if all_done else 1


def parser() -> argparse.ArgumentParser:
    """Of the command's arguments, which `benchmarks.ab.plan` gives their meaning."""
    listed = "\n".join(f"  {name:<20}{one.summary}" for name, one in WORKLOADS.items())
    json_help = "write all numbers there too; of all workloads, into files of this folder"
    made = parser_of("ab", f"{COMMENT}\nworkloads:\n{listed}", json_help)
    made.add_argument(
        "workloads",
        nargs="+",
        choices=(*WORKLOADS, ALL),
        metavar="WORKLOAD",
        help="see above, or all (with --model, those without images)",
    )
    made.add_argument(
        "--model",
        help="demo, shape:33m or another shape of benchmarks.models, a folder, a name; by default "
        "demo, or shape:vlm-33m where there are images",
    )
    made.add_argument(
        "--data", type=Path, metavar="DIR", help="real inputs, for workloads that name some"
    )
    made.add_argument(
        "--quick", action="store_true", help="one round of fewer programs: a look, not a result"
    )
    size = made.add_argument_group("how much")
    size.add_argument("--rounds", type=positive, default=3, metavar="N", help="default 3")
    size.add_argument("--requests", type=positive, metavar="N", help="programs in a round")
    size.add_argument("--concurrency", type=positive, metavar="N", help="programs at a time")
    servers_group = made.add_argument_group("the servers")
    servers_group.add_argument(
        "--server-args",
        default="",
        metavar="FLAGS",
        help="for both, as one word: --server-args='--max-num-seqs 16'; they win over others",
    )
    servers_group.add_argument(
        "--stock-args",
        default="",
        metavar="FLAGS",
        help="for stock vLLM only, such as its best setting for a model",
    )
    servers_group.add_argument(
        "--off",
        action="append",
        default=[],
        choices=CAN_BE_OFF,
        metavar="PART",
        help=f"the plugin without this ({', '.join(CAN_BE_OFF)}); may be repeated",
    )
    servers_group.add_argument(
        "--policy",
        choices=choices_of("schedule_policy"),
        help="the plugin's schedule_policy; its default if not given",
    )
    servers_group.add_argument(
        "--plugin-config",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="the plugin's options, as for the server",
    )
    servers_group.add_argument(
        "--ablations", action="store_true", help="also the plugin without one thing at a time"
    )
    servers_group.add_argument(
        "--servers-at-once",
        type=positive,
        metavar="N",
        help="how many may stay up; as many as fit into the memory if not given, on a GPU 1",
    )
    servers_group.add_argument("--stock-url", metavar="URL", help="a running stock server")
    servers_group.add_argument("--sgl-url", metavar="URL", help="a running one with the plugin")
    return made


if __name__ == "__main__":
    sys.exit(main())
