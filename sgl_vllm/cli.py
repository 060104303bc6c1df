"""The `sgl-vllm` command: argument parsing and printing; the work is in the modules it calls."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

import sgl_vllm
from sgl_vllm import compat, doctor

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
    except KeyboardInterrupt:
        return 130


def version(options: argparse.Namespace) -> int:
    vllm = compat.installed_vllm()
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
    from sgl_vllm.demo import run

    return run.main(model=options.model, keep=options.keep, as_json=options.json)


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
    return parser


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
