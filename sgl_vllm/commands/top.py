"""`sgl-vllm top`: load, throughput and cache hits of several servers.

Owns which figures are shown, how two samples of a server become rates, and the table. vLLM's own
figures come from `/metrics`, so stock servers are shown too. The plugin's come from
`/v1/sgl/stats`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from sgl_vllm.commands.arguments import URL_HELP, ApiKey, argument, flag, option, server_at
from sgl_vllm.commands.client import Json, NoPluginError, ServerError, SglServer
from sgl_vllm.commands.programs import MEANINGS, counts_in_words, turns_in_words
from sgl_vllm.commands.terminal import printable
from sgl_vllm.server_process import totals_of

TIMEOUT_S = 5.0

PROMPT_TOKENS, CACHED_TOKENS = "vllm:prompt_tokens_total", "vllm:prompt_tokens_cached_total"
"""Counters of vLLM that count each request once. The hit rate is their ratio."""

TOTALS = {
    "prompt tokens": PROMPT_TOKENS,
    "of them cached": CACHED_TOKENS,
    "output tokens": "vllm:generation_tokens_total",
    "of them forced": "forced_tokens",
}
"""The totals since a server's start, and their counters."""

RECOMPUTED = ("evicted", "expired", "flushed", "component", "whole_blocks")
"""Why once-cached tokens were not cached anymore. Recomputing them was avoidable."""

DESCRIPTION = f"""\
Shows one line per server and updates it at an interval. If the output is not
a terminal, prints one table and exits. Stock vLLM servers are shown with
vLLM's own figures.

The columns are:

  run, wait           running and waiting requests
  prompt/s, output/s  tokens of prompts and outputs, per second
  hit%, total hit%    share of prompt tokens found in the prefix cache, in the
                      last interval and since the server started
  tree, cache size    tokens in the radix tree, and those that fit in the cache
  jumps/s, forced/s   jumps, and the tokens that they appended, per second
  plugin              on: all parts are on; N off: N parts are off, the lines
                      below say why; none: a stock server; ?: the plugin's
                      figures cannot be read; down: no answer

Below the table: the totals of each server since it started. With the plugin,
also its programs by state, and the once-cached tokens recomputed per second in the last
interval, by cause ("sgl-vllm why" has the causes).

{MEANINGS}
All servers get the same API key. Without it, a server that requires one is
shown with the figures of its /metrics. With one table, exits with 1 if a
server is down.
"""


def command(
    urls: Annotated[
        list[str] | None, argument("[URL]...", f"The servers, with the plugin or stock {URL_HELP}.")
    ] = None,
    interval: Annotated[float, option("SECONDS", "The time between two samples.", min=0.01)] = 2.0,
    once: Annotated[bool, flag("--once", "Print one table, of one interval, and exit.")] = False,
    as_json: Annotated[
        bool, flag("--json", "Print one line of JSON per interval: a list of servers.")
    ] = False,
    api_key: ApiKey = None,
) -> int:
    console = Console(highlight=False)
    console.soft_wrap = not console.is_terminal
    servers = [server_at(url, api_key) for url in urls or (None,)]
    views = watch(servers, interval)
    first = next(views)  # without rates

    def show(rows: list[Row]) -> None:
        if as_json:
            print(json.dumps(rows), flush=True)
        else:
            console.print(draw(rows))

    if once or not (as_json or console.is_terminal):
        rows = next(views)
        show(rows)
        return 0 if all(row["answers"] for row in rows) else 1
    if as_json or console.is_dumb_terminal:
        for rows in views:
            show(rows)
    with Live(draw(first), console=console, screen=True, auto_refresh=False) as live:
        for rows in views:
            live.update(draw(rows), refresh=True)
    return 0


@dataclass(frozen=True, slots=True)
class Sample:
    """A server's figures at one moment.

    Attributes:
        at_s: monotonic seconds.
        counts: its `/metrics`, summed over labels, and the plugin's counters; None if it does not
            answer.
        stats: its `/v1/sgl/stats`; None without the plugin, or if they cannot be read.
        problem: what could not be read, in one line.
    """

    url: str
    at_s: float
    counts: dict[str, float] | None
    stats: Json | None
    problem: str = ""


Row = Json
"""A server's line, as `--json` prints it. A number is None where the server has no such figure, or
no earlier sample to compare with. `since_start` has tokens, `programs` the number in each state,
`admission` how agents take turns, `parts_off` the reasons, and `recomputed_tokens_per_s` the causes
that occurred in the interval."""

COLUMNS = {
    "run": "running",
    "wait": "waiting",
    "prompt\n/s": "prompt_tokens_per_s",
    "output\n/s": "output_tokens_per_s",
    "hit%": "hit_rate",
    "total\nhit%": "hit_rate_since_start",
    "tree": "tree_tokens",
    "cache\nsize": "cache_tokens",
    "jumps\n/s": "jumps_per_s",
    "forced\n/s": "forced_tokens_per_s",
}
"""The numbers of a row, by their headings."""


def watch(servers: Sequence[SglServer], interval_s: float) -> Iterator[list[Row]]:
    """The lines of all servers: at once without rates, then after each interval, without end."""
    samples = sample_all(servers)
    yield [compare(None, sample) for sample in samples]
    while True:
        time.sleep(interval_s)
        earlier, samples = samples, sample_all(servers)
        yield [compare(*pair) for pair in zip(earlier, samples, strict=True)]


def sample_all(servers: Sequence[SglServer]) -> list[Sample]:
    """Samples all servers at the same time. Takes at most twice `TIMEOUT_S`, and never fails."""
    with ThreadPoolExecutor(len(servers)) as pool:
        return list(pool.map(_sample, servers))


def _sample(server: SglServer) -> Sample:
    try:
        counts = totals_of(server.metrics(TIMEOUT_S))
    except ServerError as error:
        return Sample(server.base, time.monotonic(), None, None, str(error))
    except ValueError:
        problem = f"{server.base}/metrics is not in Prometheus' text format"
        return Sample(server.base, time.monotonic(), None, None, problem)
    at_s, stats, problem = time.monotonic(), None, ""
    try:
        stats = server.stats(TIMEOUT_S)
        misses = stats.get("misses", {})
        counts |= stats.get("jump_forward", {})
        counts |= {cause: misses[cause] for cause in RECOMPUTED if cause in misses}
    except NoPluginError:
        pass
    except ServerError as error:
        problem = str(error)
    return Sample(server.base, at_s, counts, stats, problem)


def compare(earlier: Sample | None, now: Sample) -> Row:
    """The line of a server, from its last two samples or its first one."""
    counts, stats = now.counts or {}, now.stats or {}
    before = (earlier.counts if earlier is not None else None) or {}
    seconds = now.at_s - earlier.at_s if earlier is not None else 0.0
    # A server that was restarted in between has lower counts.
    counted = {
        name: value - before[name]
        for name, value in counts.items()
        if name in before and value >= before[name]
    }

    def per_s(name: str) -> float | None:
        return counted[name] / seconds if name in counted and seconds > 0 else None

    def hit_rate(tokens: dict[str, float]) -> float | None:
        cached, prompt = tokens.get(CACHED_TOKENS), tokens.get(PROMPT_TOKENS)
        return cached / prompt if cached is not None and prompt else None

    recomputed = {cause: per_s(cause) for cause in RECOMPUTED}
    return {
        "url": now.url,
        "answers": now.counts is not None,
        "plugin": now.stats is not None,
        "running": counts.get("vllm:num_requests_running"),
        "waiting": counts.get("vllm:num_requests_waiting"),
        "prompt_tokens_per_s": per_s(PROMPT_TOKENS),
        "output_tokens_per_s": per_s("vllm:generation_tokens_total"),
        "hit_rate": hit_rate(counted),
        "hit_rate_since_start": hit_rate(counts),
        "tree_tokens": stats.get("radix", {}).get("tree_tokens"),
        "cache_tokens": stats.get("radix", {}).get("cache_tokens"),
        "jumps_per_s": per_s("jumps"),
        "forced_tokens_per_s": per_s("forced_tokens"),
        "since_start": {key: counts[name] for key, name in TOTALS.items() if name in counts},
        "programs": dict(stats.get("programs", {})),
        "admission": dict(stats.get("admission", {})),
        "recomputed_tokens_per_s": {cause: rate for cause, rate in recomputed.items() if rate},
        "parts_off": {part: why for part, why in stats.get("parts", {}).items() if why != "on"},
        "problem": now.problem,
    }


def draw(rows: Sequence[Row]) -> Group:
    table = Table(box=None, pad_edge=False, collapse_padding=True)  # fits 80 columns
    table.add_column("server", overflow="fold")
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("plugin", no_wrap=True)
    notes = []
    for row in rows:
        name = printable(row["url"].partition("://")[2])
        if row["answers"]:
            texts = [
                (_percent if "%" in heading else _count)(row[key])
                for heading, key in COLUMNS.items()
            ]
            table.add_row(name, *texts, _state(row))
        else:
            table.add_row(Text(name, "red"), *["-"] * len(COLUMNS), Text("down", "red"))
        if row["problem"]:
            notes.append(Text(printable(row["problem"]), "red"))
        if any((totals := row["since_start"]).values()):
            parts = ", ".join(f"{number:,.0f} {what}" for what, number in totals.items())
            notes.append(Text(f"{name}: since start: {parts}"))
        if counts := counts_in_words(row["programs"]):
            notes.append(Text(f"{name}: programs: {counts}"))
        if turns := turns_in_words(row["admission"]):
            notes.append(Text(f"{name}: {turns}"))
        if recomputed := row["recomputed_tokens_per_s"]:
            causes = sorted(recomputed, key=recomputed.__getitem__, reverse=True)
            parts = ", ".join(f"{cause} {_count(recomputed[cause])}" for cause in causes)
            total = _count(sum(recomputed.values()))
            notes.append(Text(f"{name}: recomputed tokens/s: {total} ({parts})"))
        for part, why in row["parts_off"].items():
            notes.append(Text(f"{name}: {printable(part)} is off: {printable(str(why))}", "dim"))
    return Group(table, *notes)


def _state(row: Row) -> Text:
    if row["plugin"]:
        num_off = len(row["parts_off"])
        return Text(f"{num_off} off", "yellow") if num_off else Text("on", "green")
    return Text("?" if row["problem"] else "none", "dim")


def _count(value: float | None) -> str:
    if value is None:
        return "-"
    if 0 < value < 10 and value != int(value):
        return f"{value:.1f}"
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= 10 * size:
            return f"{value / size:.0f}{unit}"
    return f"{value:.0f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}%"
