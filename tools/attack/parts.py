"""Sends odd requests to every entry point of a server, and asserts that all parts stay on.

    python -m tools.attack.parts [--requests N] [--seed N] [--log FILE]

The server is started here, on a loopback address, and ends with the command. Afterwards, all its
parts must be on, with no unexpected error in its log. Requests that it answers with 5xx are sent to
stock vLLM, which must answer with 5xx, too. Otherwise, the exit status is 1.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from rich.console import Console
from rich.progress import Progress

from sgl_vllm.server_process import ServerFailed, VllmServer
from tools.attack.client import send_all
from tools.attack.hostile import Attack
from tools.attack.odd import odd_requests
from tools.attack.target import demo_server

AT_ONCE = 24
REPORT = "Please report this"
MAX_REPLAYED = 400
"""Answers of 5xx that are compared with stock's, at most."""

ARGUMENTS = (
    *("--scheduling-policy", "priority"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
)


@dataclass
class Outcome:
    """What became of the requests.

    Attributes:
        statuses: how many answers of each status; -1 stands for none.
        failed: the requests that were answered with 5xx or not at all, with the answer.
        worse_than_stock: those of them that stock vLLM answers otherwise, with both answers.
        parts: the state of each part afterwards.
        reports: lines of the server's log about unexpected errors.
    """

    statuses: Counter[int] = field(default_factory=Counter)
    failed: list[tuple[Attack, str]] = field(default_factory=list)
    worse_than_stock: list[tuple[Attack, str]] = field(default_factory=list)
    parts: dict[str, str] = field(default_factory=dict)
    reports: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        is_on = bool(self.parts) and set(self.parts.values()) == {"on"}
        return is_on and not self.reports and not self.worse_than_stock


def server(*, plugin: bool, log_path: Path | None = None) -> VllmServer:
    """A server of the demo's model, not started."""
    return demo_server(
        *ARGUMENTS, plugin=plugin, num_blocks=512, max_model_len=512, log_path=log_path
    )


def fuzz(count: int, seed: int, log_path: Path, advance: Callable[[], None]) -> Outcome:
    """Send `count` requests to a server with the plugin, and what failed to a stock one."""
    outcome = Outcome()

    def on_answer(one: Attack, status: int, text: str, seconds: float) -> None:
        outcome.statuses[status] += 1
        if status < 0 or status >= 500:
            outcome.failed.append((one, text[:300]))
        advance()

    with server(plugin=True, log_path=log_path) as ours:
        send_all(ours.url, odd_requests(random.Random(seed), count), AT_ONCE, on_answer)
        outcome.parts = httpx.get(f"{ours.url}/v1/sgl/stats", timeout=60).json()["parts"]
    lines = log_path.read_text(errors="replace").splitlines()
    outcome.reports = [line for line in lines if REPORT in line]
    texts = {id(one): text for one, text in outcome.failed}

    def on_stocks_answer(one: Attack, status: int, text: str, seconds: float) -> None:
        if 0 <= status < 500:
            outcome.worse_than_stock.append((one, f"{texts[id(one)]} (stock: {status})"))

    if outcome.failed:
        replayed = [one for one, _ in outcome.failed[:MAX_REPLAYED]]
        with server(plugin=False) as stock:
            send_all(stock.url, replayed, 1, on_stocks_answer)
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.attack.parts", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--requests", type=int, default=50_000, help="default: 50,000")
    parser.add_argument("--seed", type=int, default=0, help="of the random requests (default: 0)")
    parser.add_argument(
        "--log", type=Path, default=Path("attack-parts.log"), help="file for the server's log"
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
    console.print(f"answers by status: {dict(outcome.statuses)}")
    console.print(f"parts: {outcome.parts}")
    console.print(f"unexpected errors in {args.log}: {len(outcome.reports)}", highlight=False)
    console.print(f"5xx that stock vLLM does not give: {len(outcome.worse_than_stock)}")
    for one, text in outcome.worse_than_stock[:20]:
        console.print(f"  {one.kind}: {text}\n    {one.body[:300]!r}", markup=False)
    return 0 if outcome.passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
