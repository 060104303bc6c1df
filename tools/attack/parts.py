"""Sends odd requests to every entry point of a server, and asserts that all parts stay on.

    python -m tools.attack.parts [--requests N] [--seed N] [--json FILE]

The server is started here, on a loopback address, and ends with the command. Afterwards, all its
parts must be on, with no unexpected error in its log. Requests that it answers with 5xx are sent to
stock vLLM, which must answer with 5xx, too. Otherwise, the exit status is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any  # Any: JSON

import httpx
from rich.console import Console
from rich.progress import Progress

from sgl_vllm.demo import MODEL_PATH
from sgl_vllm.server_process import ServerFailed, VllmServer
from tools.attack.hostile import Attack
from tools.attack.odd import odd_requests
from tools.attack.target import CPU_SETTINGS

AT_ONCE = 24
TIMEOUT_S = 60.0
REPORT = "Please report this"
MAX_REPLAYED = 400
"""Answers of 5xx that are compared with stock's, at most."""

ARGUMENTS = (
    *("--num-gpu-blocks-override", "512", "--scheduling-policy", "priority"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
)


@dataclass
class Outcome:
    """What became of the requests.

    Attributes:
        statuses: how many answers of each status; -1 stands for none in `TIMEOUT_S`.
        failed: the requests that were answered with 5xx or not at all, with the answer.
        worse_than_stock: those of them that stock vLLM answers otherwise, with its status.
        parts: the state of each part afterwards.
        reports: lines of the server's log about unexpected errors.
    """

    statuses: Counter[int] = field(default_factory=Counter)
    failed: list[tuple[Attack, str]] = field(default_factory=list)
    worse_than_stock: list[tuple[Attack, str, int]] = field(default_factory=list)
    parts: dict[str, str] = field(default_factory=dict)
    reports: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        is_on = bool(self.parts) and set(self.parts.values()) == {"on"}
        return is_on and not self.reports and not self.worse_than_stock


def server(*, plugin: bool, log_path: Path | None = None) -> VllmServer:
    """A server of the demo's model, not started."""
    return VllmServer(
        MODEL_PATH,
        plugin=plugin,
        served_model_name="demo",
        max_model_len=512,
        block_size=32,
        extra_args=ARGUMENTS,
        env=CPU_SETTINGS,
        log_path=log_path,
    )


def fuzz(count: int, seed: int, log_path: Path, advance: Callable[[], None]) -> Outcome:
    """Send `count` requests to a server with the plugin, and what failed to a stock one."""
    outcome = Outcome()
    with server(plugin=True, log_path=log_path) as ours:
        requests = odd_requests(random.Random(seed), count)
        asyncio.run(_send_all(ours.url, requests, outcome, advance))
        stats = httpx.get(f"{ours.url}/v1/sgl/stats", timeout=TIMEOUT_S).json()
        outcome.parts = stats["parts"]
    lines = log_path.read_text(errors="replace").splitlines()
    outcome.reports = [line for line in lines if REPORT in line]
    if outcome.failed:
        with server(plugin=False) as stock:
            outcome.worse_than_stock = list(_otherwise_on(stock.url, outcome.failed[:MAX_REPLAYED]))
    return outcome


async def _send_all(
    url: str, requests: Iterable[Attack], outcome: Outcome, advance: Callable[[], None]
) -> None:
    waiting = iter(requests)

    async def worker(client: httpx.AsyncClient) -> None:
        for one in waiting:  # shared by all workers
            status, text = await _send(client, one)
            outcome.statuses[status] += 1
            if status < 0 or status >= 500:
                outcome.failed.append((one, text))
            advance()

    limits = httpx.Limits(max_connections=None, keepalive_expiry=2)
    async with (
        httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits) as client,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(AT_ONCE):
            group.create_task(worker(client))


async def _send(client: httpx.AsyncClient, one: Attack) -> tuple[int, str]:
    headers = {"Content-Type": "application/json", **one.headers}
    for attempt in range(2):
        try:
            answer = await client.request(one.method, one.path, content=one.body, headers=headers)
            return answer.status_code, answer.text[:300]
        except (httpx.ReadError, httpx.RemoteProtocolError) as error:
            # A server may close a connection that was idle while it is used again.
            if attempt:
                return -1, repr(error)
        except httpx.HTTPError as error:
            return -1, repr(error)
    raise AssertionError


def _otherwise_on(
    url: str, failed: Iterable[tuple[Attack, str]]
) -> Iterator[tuple[Attack, str, int]]:
    async def ask(one: Attack) -> int:
        async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:
            status, _ = await _send(client, one)
            return status

    for one, text in failed:
        status = asyncio.run(ask(one))
        if 0 <= status < 500:
            yield one, text, status


def _as_json(outcome: Outcome) -> dict[str, Any]:
    return {
        "statuses": outcome.statuses,
        "parts": outcome.parts,
        "reports": outcome.reports,
        "failed": [(one.kind, one.path, one.body.decode("latin-1"), text)
                   for one, text in outcome.failed],
        "worse_than_stock": [(one.kind, text, status)
                             for one, text, status in outcome.worse_than_stock],
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.attack.parts", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--requests", type=int, default=50_000, help="default: 50,000")
    parser.add_argument("--seed", type=int, default=0, help="of the random requests (default: 0)")
    parser.add_argument(
        "--log", type=Path, default=Path("attack-parts.log"), help="file for the server's log"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the figures to FILE as JSON"
    )
    args = parser.parse_args()
    console = Console()
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("odd requests", total=args.requests)
        try:
            outcome = fuzz(args.requests, args.seed, args.log, lambda: progress.advance(task))
        except ServerFailed as failed:
            console.print(f"the server has ended: {failed}", markup=False)
            return 1
    statuses = ", ".join(f"{n:,} x {status}" for status, n in sorted(outcome.statuses.items()))
    console.print(f"answers: {statuses}")
    console.print(f"parts: {outcome.parts}")
    console.print(f"unexpected errors in {args.log}: {len(outcome.reports)}", highlight=False)
    console.print(f"5xx that stock vLLM does not give: {len(outcome.worse_than_stock)}")
    for one, text, status in outcome.worse_than_stock[:20]:
        console.print(f"  {one.kind}: {text} (stock: {status})", markup=False)
        console.print(f"    {one.body[:300]!r}", markup=False)
    if args.json:
        args.json.write_text(json.dumps(_as_json(outcome), indent=1) + "\n")
    return 0 if outcome.passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
