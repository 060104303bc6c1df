"""Several servers at a glance: what `sgl-vllm top` shows.

Owns which figures are shown, how two looks at a server become rates, and the table. Knows no vLLM:
vLLM's own figures are from `/metrics`, so stock servers are shown too, the plugin's from
`/v1/sgl/stats`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from sgl_vllm.commands.tree import NoPluginError, ServerError, SglServer, printable
from sgl_vllm.server_process import totals_of

TIMEOUT_S = 5.0

DESCRIPTION = """\
A line per server, again and again: requests that run and wait, tokens per second, how much of the
prompts was found in the cache, the radix tree, jumps, and the parts of the plugin that are off.
Rates are those of the last interval. Stock vLLM servers have the columns that vLLM itself tells.

Exit status with --once: 1 if a server does not answer. The API key is one for all; without it, a
server that has one shows what vLLM's /metrics tells.
"""


@dataclass(frozen=True, slots=True)
class Look:
    """What a server said at one moment.

    Attributes:
        at_s: when, on the monotonic clock.
        totals: its `/metrics`, summed over labels; None if it does not answer.
        stats: the plugin's; None if it has none, or does not tell.
        problem: what could not be asked, in a line.
    """

    url: str
    at_s: float
    totals: dict[str, float] | None
    stats: dict[str, Any] | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """A server's line. None where it does not tell, or there is nothing to compare with."""

    url: str
    answers: bool
    plugin: bool
    running: int | None = None
    waiting: int | None = None
    prompt_tokens_per_s: float | None = None
    output_tokens_per_s: float | None = None
    hit_rate: float | None = None
    """Of the prompt tokens of the interval, from 0 to 1."""
    hit_rate_since_start: float | None = None
    tree_tokens: int | None = None
    cache_tokens: int | None = None
    jumps_per_s: float | None = None
    forced_tokens_per_s: float | None = None
    parts_off: dict[str, str] = field(default_factory=dict)
    """Each with the reason."""
    problem: str = ""


def watch(servers: Sequence[SglServer], interval_s: float) -> Iterator[list[Row]]:
    """The lines of all servers, at once without rates, and then after each interval; no end."""
    looks = look_at(servers)
    yield [compare(None, look) for look in looks]
    while True:
        time.sleep(interval_s)
        earlier, looks = looks, look_at(servers)
        yield [compare(*pair) for pair in zip(earlier, looks, strict=True)]


def look_at(servers: Sequence[SglServer]) -> list[Look]:
    """All at the same time; takes at most twice `TIMEOUT_S`, and never fails."""
    with ThreadPoolExecutor(len(servers)) as pool:
        return list(pool.map(_look_at, servers))


def _look_at(server: SglServer) -> Look:
    try:
        totals = totals_of(server.metrics(TIMEOUT_S))
    except ServerError as error:
        return Look(server.base, time.monotonic(), None, None, str(error))
    except ValueError:
        problem = f"{server.base}/metrics is not in Prometheus' format"
        return Look(server.base, time.monotonic(), None, None, problem)
    at_s, stats, problem = time.monotonic(), None, ""
    try:
        stats = server.stats(TIMEOUT_S)
    except NoPluginError:
        pass
    except ServerError as error:
        problem = str(error)
    return Look(server.base, at_s, totals, stats, problem)


def compare(earlier: Look | None, now: Look) -> Row:
    """The line of a server that was looked at twice, or for the first time."""
    if now.totals is None:
        return Row(now.url, answers=False, plugin=False, problem=now.problem)
    stats = now.stats or {}
    parts = stats.get("parts", {})
    radix, jumps = stats.get("radix", {}), stats.get("jump_forward", {})
    rates = _Rates(earlier, now)
    return Row(
        now.url,
        answers=True,
        plugin=now.stats is not None,
        running=_whole(now.totals.get("vllm:num_requests_running")),
        waiting=_whole(now.totals.get("vllm:num_requests_waiting")),
        prompt_tokens_per_s=rates.per_s("vllm:prompt_tokens_total"),
        output_tokens_per_s=rates.per_s("vllm:generation_tokens_total"),
        hit_rate=rates.share("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),
        hit_rate_since_start=_share(
            now.totals.get("vllm:prefix_cache_hits_total"),
            now.totals.get("vllm:prefix_cache_queries_total"),
        ),
        tree_tokens=radix.get("tree_tokens"),
        cache_tokens=radix.get("cache_tokens"),
        jumps_per_s=rates.per_s("jumps") if jumps else None,
        forced_tokens_per_s=rates.per_s("forced_tokens") if jumps else None,
        parts_off={part: str(why) for part, why in parts.items() if why != "on"},
        problem=now.problem,
    )


class _Rates:
    """What has been counted between two looks at a server that was not started again meanwhile."""

    def __init__(self, earlier: Look | None, now: Look) -> None:
        self._now = _counts(now)
        self._earlier = _counts(earlier) if earlier is not None else {}
        self._seconds = now.at_s - earlier.at_s if earlier is not None else 0.0

    def per_s(self, name: str) -> float | None:
        counted = self._counted(name)
        return counted / self._seconds if counted is not None and self._seconds > 0 else None

    def share(self, part: str, whole: str) -> float | None:
        return _share(self._counted(part), self._counted(whole))

    def _counted(self, name: str) -> float | None:
        now, before = self._now.get(name), self._earlier.get(name)
        return now - before if now is not None and before is not None and now >= before else None


def _counts(look: Look) -> dict[str, float]:
    return {**(look.totals or {}), **(look.stats or {}).get("jump_forward", {})}


def _share(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def draw(rows: Sequence[Row]) -> Group:
    table = Table(box=None, pad_edge=False, collapse_padding=True)  # fits 80 columns
    table.add_column("server", overflow="fold")
    numbers = ["run", "wait", "prompt\n/s", "output\n/s", "hits", "ever", "tree", "of"]
    numbers += ["jumps\n/s", "forced\n/s"]
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("plugin", no_wrap=True)
    notes = []
    for row in rows:
        name = printable(row.url.partition("://")[2])
        if not row.answers:
            table.add_row(Text(name, "red"), *["-"] * 10, Text("down", "red"))
        else:
            table.add_row(
                name,
                _count(row.running),
                _count(row.waiting),
                _count(row.prompt_tokens_per_s),
                _count(row.output_tokens_per_s),
                _percent(row.hit_rate),
                _percent(row.hit_rate_since_start),
                _count(row.tree_tokens),
                _count(row.cache_tokens),
                _count(row.jumps_per_s),
                _count(row.forced_tokens_per_s),
                _state(row),
            )
        if row.problem:
            notes.append(Text(printable(row.problem), "red"))
        for part, why in row.parts_off.items():
            notes.append(Text(f"{name}: {printable(part)} is off: {printable(why)}", "dim"))
    return Group(table, *notes)


def _state(row: Row) -> Text:
    if row.plugin:
        num_off = len(row.parts_off)
        return Text(f"{num_off} off", "yellow") if num_off else Text("on", "green")
    return Text("?" if row.problem else "none", "dim")


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
