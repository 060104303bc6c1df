"""The `sgl-vllm` command: argument parsing and printing; the work is in the modules it calls."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

import sgl_vllm
from sgl_vllm.commands import doctor, top
from sgl_vllm.commands import run as run_program
from sgl_vllm.commands import tree as tree_view
from sgl_vllm.vllm_api import versions

DESCRIPTION = """\
SGLang's ideas in an unforked vLLM, and SGLang's language as the client.

The server is vLLM's own, with one option more:
    vllm serve MODEL --plugin sgl_vllm
    vllm serve MODEL --plugin sgl_vllm --plugin-config '{"jump_forward": false}'
"""


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        return int(options.command(options))
    except tree_view.ServerError as error:
        print(f"sgl-vllm: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def version(options: argparse.Namespace) -> int:
    vllm = versions.installed_vllm()
    beside = f"{vllm.distribution} {vllm.version} ({vllm.support})" if vllm else "no vLLM (client)"
    print(f"sgl-vllm {sgl_vllm.__version__}, {beside}")
    return 0


def run_doctor(options: argparse.Namespace) -> int:
    report = doctor.examine()
    if options.fix and not report.healthy:
        for done in doctor.mend(report):
            print(f"mended: {done}", file=sys.stderr)
        report = doctor.examine()
    if options.json:
        print(report.to_json())
    else:
        _print_report(report, Console())
    return 0 if report.healthy else 1


def run_demo(options: argparse.Namespace) -> int:
    from sgl_vllm.commands import demo

    return demo.main(model=options.model, keep=options.keep, as_json=options.json)


def run_program_file(options: argparse.Namespace) -> int:
    return run_program.main(options)


def ray_serve(options: argparse.Namespace) -> int:
    from sgl_vllm.routing.ray import app as ray_app

    try:
        ray_app.run(options.config, host=options.host, port=options.port)
    except ray_app.RayServeError as error:
        print(f"sgl-vllm: {error}", file=sys.stderr)
        return 1
    return 0


def show_tree(options: argparse.Namespace) -> int:
    server = _server_of(options)
    console = Console(highlight=False)
    if options.json:
        print(json.dumps(server.tree(options.max_nodes)))
        return 0
    picture, is_on = _look(server, options.max_nodes)
    if options.watch is None:
        console.print(picture)
        return 0 if is_on else 1
    with Live(picture, console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while True:
            time.sleep(options.watch)
            try:
                live.update(_look(server, options.max_nodes)[0], refresh=True)
            except tree_view.ServerError as error:  # it may come back
                live.update(Text(f"{error}. Trying again.", "red"), refresh=True)


def _look(server: tree_view.SglServer, max_nodes: int | None) -> tuple[Group, bool]:
    """The picture, and whether any engine has a tree."""
    answer = server.tree(max_nodes)
    engines = answer["engines"]
    is_on = [bool(engine) for engine in engines]
    why_off = "" if all(is_on) else server.why_off()
    has_pins = any(engine.get("num_pinned_blocks") for engine in engines)
    return tree_view.draw(answer, server.pins() if has_pins else [], why_off), any(is_on)


def show_top(options: argparse.Namespace) -> int:
    console = Console(highlight=False)
    views = top.watch([_server_at(url, options) for url in options.urls], options.interval)
    first = next(views)  # without rates

    def show(rows: list[top.Row]) -> None:
        if options.json:
            print(json.dumps([dataclasses.asdict(row) for row in rows]), flush=True)
        else:
            console.print(top.draw(rows))

    if options.once:
        rows = next(views)
        show(rows)
        return 0 if all(row.answers for row in rows) else 1
    if options.json or not console.is_terminal or console.is_dumb_terminal:
        for rows in views:
            show(rows)
    with Live(top.draw(first), console=console, screen=True, auto_refresh=False) as live:
        for rows in views:
            live.update(top.draw(rows), refresh=True)
    return 0


def pin(options: argparse.Namespace) -> int:
    text = sys.stdin.read() if options.text == "-" else options.text
    answer = _server_of(options).pin(
        text,
        is_system_prompt=options.system,
        cache_salt=options.cache_salt,
        model=options.model,
    )
    for engine in answer["pins"]:
        print(
            f"pinned {engine['num_tokens']:,} of {answer['num_prompt_tokens']:,} tokens, "
            f"in {tree_view.plural(engine['num_blocks'], 'block')}",
            file=sys.stderr,
        )
    print(answer["pin_id"])
    return 0


def unpin(options: argparse.Namespace) -> int:
    _server_of(options).unpin(options.pin_id)
    return 0


def _server_of(options: argparse.Namespace) -> tree_view.SglServer:
    return _server_at(options.url, options)


def _server_at(url: str, options: argparse.Namespace) -> tree_view.SglServer:
    return tree_view.SglServer(url, options.api_key or os.environ.get("VLLM_API_KEY"))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sgl-vllm", description=DESCRIPTION, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("version", help="our version and the vLLM beside us")
    command.set_defaults(command=version)

    command = commands.add_parser(
        "doctor",
        help="what is installed, which parts would be on, what to mend",
        description="Exit status 0 if everything that is installed works, 1 if something is to be "
        "mended. Without vLLM this is a client, which is healthy.",
    )
    command.add_argument("--json", action="store_true", help="the same for programs")
    command.add_argument("--fix", action="store_true", help="run the mending commands, then look")
    command.set_defaults(command=run_doctor)

    command = commands.add_parser(
        "demo",
        help="one program on stock vLLM and with the plugin, side by side",
        description="Starts `vllm serve` twice on this machine, stock and with the plugin, runs "
        "the same program on both, prints its answers and what they cost, and stops everything.",
    )
    command.add_argument("--model", type=Path, metavar="PATH", help="default: the one we ship")
    command.add_argument("--keep", action="store_true", help="leave the plugin's server running")
    command.add_argument("--json", action="store_true", help="counts and answers for programs")
    command.set_defaults(command=run_demo)

    command = commands.add_parser(
        "run",
        help="a program of a file, with arguments from the command line",
        description=run_program.DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run_program.declare(command)
    command.set_defaults(command=run_program_file)

    command = commands.add_parser(
        "ray-serve",
        help="several replicas of a model on Ray Serve, routed by what they have cached",
        description="Serves the models of a file of Ray Serve LLM (its LLMServingArgs), each with "
        "the plugin and with our router of requests where the file names no other. An example is "
        "examples/serving/ray.yaml; docs/ray.md says what was tested.",
    )
    command.add_argument("config", type=Path, metavar="CONFIG.yaml", help="with `llm_configs`")
    command.add_argument("--host", default="127.0.0.1", help="to listen at (default: %(default)s)")
    command.add_argument("--port", type=int, default=8000, help="default: %(default)s")
    command.set_defaults(command=ray_serve)

    key = argparse.ArgumentParser(add_help=False)
    key.add_argument(
        "--api-key", metavar="KEY", help="the server's, if it has one (default: $VLLM_API_KEY)"
    )
    server = argparse.ArgumentParser(add_help=False, parents=[key])
    server.add_argument("url", metavar="URL", help="of the server, e.g. http://127.0.0.1:8000")

    command = commands.add_parser(
        "tree",
        parents=[server],
        help="what a server's prefix cache holds, as a tree",
        description="Prints the space of the cache and its radix tree: for each prefix its own "
        "tokens, hits, time since its last use, and whether it is pinned, in use by a running "
        "request, or wanted by a waiting one. Text is shown only if the server was started with "
        "the option tree_text. In a browser: URL/sgl/tree. Exit status 1 if there is no tree.",
    )
    command.add_argument(
        "--max-nodes", type=_positive(int), metavar="N", help="at most so many nodes per engine"
    )
    command.add_argument(
        "--watch", type=_positive(float), metavar="SECONDS", help="look again and again"
    )
    command.add_argument("--json", action="store_true", help="the server's answer, for programs")
    command.set_defaults(command=show_tree)

    command = commands.add_parser(
        "top",
        parents=[key],
        help="several servers at a glance: load, throughput, hits, jumps, parts that are off",
        description=top.DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument(
        "urls", nargs="+", metavar="URL", help="of servers, with the plugin or stock"
    )
    command.add_argument(
        "--interval",
        type=_positive(float),
        default=2.0,
        metavar="SECONDS",
        help="between two looks (default: 2)",
    )
    command.add_argument(
        "--once", action="store_true", help="one table, of one interval, then end; for scripts"
    )
    command.add_argument(
        "--json", action="store_true", help="a line of JSON per look: a list, a server each"
    )
    command.set_defaults(command=show_top)

    command = commands.add_parser(
        "pin",
        parents=[server],
        help="compute a prefix and keep it in a server's cache",
        description="Computes TEXT, as the beginning of prompts, and keeps it in the cache until "
        "it is unpinned or the server ends. Prints the id to unpin it by.",
    )
    command.add_argument("text", metavar="TEXT", help="the prefix; - reads it from standard input")
    command.add_argument(
        "--system",
        action="store_true",
        help="TEXT is a chat's system prompt; without it chats share nothing with TEXT, because "
        "their template puts something before it",
    )
    command.add_argument("--model", metavar="NAME", help="a LoRA adapter's name")
    command.add_argument("--cache-salt", metavar="SALT", help="of the requests it is for")
    command.set_defaults(command=pin)

    command = commands.add_parser(
        "unpin", parents=[server], help="let a pinned prefix be evicted again"
    )
    command.add_argument("pin_id", metavar="ID", help="as pin printed it, and tree lists it")
    command.set_defaults(command=unpin)
    return parser


def _positive(kind: type[int] | type[float]) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = kind(text)
        if not 0 < value < 1e9:
            raise ValueError
        return value

    parse.__name__ = "positive number"  # argparse says: invalid positive number value
    return parse


def _print_report(report: doctor.Report, console: Console) -> None:
    installed = Table(box=None, pad_edge=False, show_header=False)
    for component in report.components:
        installed.add_row(component.name, component.version or "-", f"[dim]{component.note}[/dim]")
    console.print("[bold]Installed[/bold]")
    console.print(installed)

    parts = Table(box=None, pad_edge=False, show_header=False)
    for part in report.parts:
        state = "[green]on[/green]" if part.on else "[yellow]off[/yellow]"
        parts.add_row(part.name, state, escape(part.reason))
    console.print("\n[bold]Parts[/bold]")
    console.print(parts)

    for note in report.notes:
        console.print(f"\n{note}", highlight=False, markup=False, soft_wrap=True)
    for problem in report.problems:
        console.print(f"\n[red]![/red] {escape(problem.text)}", highlight=False, soft_wrap=True)
        console.print(f"  {problem.command}", highlight=False, markup=False, soft_wrap=True)
    if report.healthy:
        console.print("\n[green]Nothing to mend.[/green]")


if __name__ == "__main__":
    sys.exit(main())
