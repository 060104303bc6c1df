"""A gate on counts: what each workload costs with the plugin, compared with recorded counts.

    python -m benchmarks.counts             # compares, and prints what changed
    python -m benchmarks.counts --update    # records the present counts

Times vary from run to run, which hides a change of 10 %. Counts do not vary: with the shipped model
(or that for images) and one program at a time, the forward passes, the prompt tokens computed and
cached, and the forced tokens are the same each time. Record the new counts with a change that is
meant to alter them, so that the difference shows in review.

A processor that adds in a different order may produce a different text, and then the counts differ
too. A checksum of the texts is therefore recorded: where it matches, counts must be equal,
otherwise within 5 %, except those that depend on what was generated (`BY_TEXT`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from itertools import chain
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from benchmarks.ab.__main__ import parser as ab_parser
from benchmarks.ab.client import ClientOptions
from benchmarks.ab.plan import Plan, plans_of
from benchmarks.ab.rounds import take_turn
from benchmarks.ab.servers import ArmFailed, Pool, default_block_size_tokens
from benchmarks.ab.workloads import WORKLOADS, Workload
from benchmarks.ab.workloads.base import TEXT_MODEL, usual_server_args
from benchmarks.command import figures_table, parser_of, progress_bars, write_json
from sgl_vllm.server_process import ServerFailed, sigterm_as_interrupt
from sgl_vllm.vllm_api import versions

FILE = Path(__file__).with_name("results") / "counts.json"
MAX_PROGRAMS = 2
COUNTS = (
    "forward_passes",
    "prompt_tokens",
    "computed_prompt_tokens",
    "cached_prompt_tokens",
    "output_tokens",
    "forced_tokens",
)

BY_CHANCE = {
    (name, "forward_passes") for name in ("hellaswag", "hellaswag_best", "image_qa", "video_qa")
}
"""Not compared: choices of several tokens, or after an image, are several requests at once, and
whether they meet in one pass is chance. What they compute is exact all the same."""

BY_TEXT = {
    ("api_speculation", name)
    for name in ("forward_passes", "prompt_tokens", "cached_prompt_tokens", "output_tokens")
}
"""Compared only if the texts are the recorded ones: whether a generation that runs on answers the
next field depends on what it says, and with two programs one more request is half as much again.
What it says beyond the field is not in the programs' texts, but in the number of output tokens."""

WITH_OWN_SERVER = ("tight_cache", "agent_sessions")
"""Their flags say how large the cache is. The other workloads of text share a server that has the
flags of all of them, because a start takes longer than most workloads."""

TEXTS = "texts"
TOLERANCE_WITH_OTHER_TEXTS = 0.05

Counts = Mapping[str, int | str]
"""The counts of a workload by their names, and the checksum of what its programs wrote."""


def measure(names: Sequence[str], progress: Progress) -> Iterator[tuple[str, dict[str, int | str]]]:
    """The counts of each workload, on servers that are started here, one at a time."""
    plans = [plan for name in names for plan in _plans(name)]
    with Pool(capacity=1) as pool:
        for plan in sorted(plans, key=lambda plan: repr(plan.settings)):
            name = plan.workload.name
            task = progress.add_task(name, total=len(plan.items))
            plugin = replace(plan.variants[1], client=ClientOptions(parallel=False))
            settings = plan.settings_of(plugin)
            with pool.serving("sgl", settings, lambda waited_s: None) as (url, _):
                done, _ = take_turn(plan, plugin, url, partial(progress.advance, task))
            checksum = sha256("\0".join(done.texts).encode()).hexdigest()[:16]
            yield name, {TEXTS: checksum, **{name: getattr(done.figures, name) for name in COUNTS}}


def changes(before: Mapping[str, Counts], now: Mapping[str, Counts]) -> list[tuple[str, ...]]:
    """Workload, count, before and now, of all that differs; a workload that is new differs."""
    found: list[tuple[str, ...]] = []
    for name, counts in now.items():
        old = before.get(name, {})
        by_text = {count for count in COUNTS if (name, count) in BY_TEXT}
        shows_texts = {TEXTS, *({"output_tokens"} & by_text)}
        same_texts = all(old.get(field) == counts[field] for field in shows_texts)
        tolerance = 0 if same_texts else TOLERANCE_WITH_OTHER_TEXTS
        for count in COUNTS:
            if (name, count) in BY_CHANCE or (not same_texts and count in by_text):
                continue
            was, value = old.get(count), counts[count]
            if was is None or abs(int(value) - int(was)) > tolerance * int(was):
                found.append((name, count, "none" if was is None else str(was), str(value)))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """The command. 0 if all is as before, 1 if not or on failure, 130 if interrupted."""
    parser = parser_of("counts", __doc__)
    parser.add_argument("--update", action="store_true", help=f"write {FILE.name} anew")
    parser.add_argument(
        "--workload", action="append", choices=WORKLOADS, metavar="NAME", help="only this; repeat"
    )
    arguments = parser.parse_args(argv)
    errors, console = Console(stderr=True, highlight=False), Console(highlight=False)
    names = arguments.workload or list(WORKLOADS)
    with sigterm_as_interrupt():
        try:
            with progress_bars(errors) as progress:
                now = dict(measure(names, progress))
        except (ArmFailed, ServerFailed) as failure:
            errors.print(f"[red]benchmarks.counts:[/red] {escape(str(failure))}", soft_wrap=True)
            return 1
        except KeyboardInterrupt:
            errors.print("interrupted; everything is stopped")
            return 130
    vllm = versions.installed_vllm()
    version = vllm.version if vllm else None
    write_json(arguments.json, {"vllm": version, "counts": now})
    recorded = json.loads(FILE.read_text()) if FILE.exists() else {"vllm": version, "counts": {}}
    if arguments.update:
        all_of_them = {**recorded["counts"], **now}
        counts = {name: all_of_them[name] for name in WORKLOADS if name in all_of_them}
        write_json(FILE, {"vllm": version, "counts": counts})
        console.print(f"{len(now)} workloads written to {FILE}")
        return 0
    return _tell(recorded, version, now, console)


def _plans(name: str) -> list[Plan]:
    num_programs = min(MAX_PROGRAMS, WORKLOADS[name].quick_requests)
    words = [name, "--quick", "--requests", str(num_programs), "--concurrency", "1"]
    return [_on_shared_server(plan) for plan in plans_of(ab_parser().parse_args(words))]


def _on_shared_server(plan: Plan) -> Plan:
    """The plan with the flags of all workloads that share its server."""
    if not _shares_server(plan.workload):
        return plan
    return replace(plan, settings=replace(plan.settings, args=_shared_args()))


def _shares_server(workload: Workload) -> bool:
    return workload.model == TEXT_MODEL and workload.name not in WITH_OWN_SERVER


def _shared_args() -> tuple[str, ...]:
    """vLLM uses the last value of a repeated flag, so the usual ones come last."""
    block_size_tokens = default_block_size_tokens()
    sharing = filter(_shares_server, WORKLOADS.values())
    different = dict.fromkeys(one.server_args(block_size_tokens) for one in sharing)
    return (*chain.from_iterable(different), *usual_server_args(block_size_tokens))


def _tell(
    recorded: Mapping[str, object], version: str | None, now: Mapping[str, Counts], console: Console
) -> int:
    before = recorded["counts"]
    assert isinstance(before, dict)
    found = changes(before, now)
    if not found:
        console.print(f"{len(now)} workloads, {len(COUNTS)} counts each: all as before")
        return 0
    table = figures_table("workload", "count", "before", "now", num_left=2)
    for row in found:
        table.add_row(*row)
    console.print(table)
    if version != recorded["vllm"]:
        console.print(f"(before: vLLM {recorded['vllm']}, now: {version})")
    console.print("If that is meant: python -m benchmarks.counts --update")
    return 1


if __name__ == "__main__":
    sys.exit(main())
