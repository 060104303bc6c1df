"""What a router's decision costs, by number of workers and size of their caches.

    python -m benchmarks.routing
    python -m benchmarks.routing --workers 8 --cached-tokens 100000 --source events

Fills a router's index with conversations (documents and questions with the lengths of Mooncake's
trace) until each worker has the given number of cached tokens. Then measures decisions on further
requests, of which about half continue a cached prompt. A decision is one call of `choose`: hashing
the prompt's prefixes, looking them up, the cost of each choice, and the bookkeeping. Times are CPU
time of the thread, in microseconds. Memory is what Python and numpy allocate for the index, traced
by `tracemalloc` in a second run, because tracing slows it down.

    approx   workers without KV events: their caches are guessed from the requests sent to them
    events   workers with KV events: blocks of 16 tokens, by vLLM's block hashes
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from benchmarks.medians import percentile
from benchmarks.traces import Tokens, generate
from sgl_vllm.routing.router import PrefixRouter

SOURCES = ("approx", "events")
BLOCK_SIZE = 16


class BlockStored(NamedTuple):
    """vLLM's event of this name, for one request's blocks."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: Tokens
    block_size: int = BLOCK_SIZE
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: None = None
    group_idx: int | None = 0


@dataclass(frozen=True)
class Cost:
    """The cost of decisions, in microseconds, and of the index, in bytes per cached token.

    Attributes:
        prompt_tokens_p50, prompt_tokens_p99: of the measured requests.
        matched_share: the share of prompt tokens that some worker has cached.
        fill_us: time to insert a request (approx) or a block (events).
    """

    decision_p50_us: float
    decision_p99_us: float
    decision_max_us: float
    prompt_tokens_p50: float
    prompt_tokens_p99: float
    matched_share: float
    fill_us: float
    bytes_per_cached_token: float


def prompts(seed: int) -> Iterator[Tokens]:
    """Prompts of `long_chat`: the calls of one program after those of another."""
    while True:
        for call in generate("long_chat", 1000, seed).calls():
            yield call.prompt
        seed += 1


class Filling:
    """A router whose workers have `cached_tokens` each."""

    def __init__(self, source: str, num_workers: int, cached_tokens: int, seed: int) -> None:
        self.router = PrefixRouter(
            block_size=BLOCK_SIZE, capacity_tokens=cached_tokens, max_age_s=float("inf")
        )
        for worker in range(num_workers):
            self.router.add_worker(worker, has_events=source == "events")
        self.num_reported = 0
        self.num_sent = 0
        self.seconds = 0.0
        self._hashes = iter(range(1 << 60))
        texts = prompts(seed)
        # Each worker has conversations of its own: the least sharing, hence the largest index.
        for worker in tqdm(range(num_workers), desc=source, leave=False, disable=None):
            left = cached_tokens
            while left > 0:
                text = next(texts)[:left]
                left -= len(text)
                begun_s = time.thread_time()
                if source == "events":
                    self._report(worker, text)
                else:
                    self._send(worker, text)
                self.seconds += time.thread_time() - begun_s

    def _send(self, worker: int, text: Tokens) -> None:
        """Inserts without choosing: where the request goes does not matter here."""
        hashed = self.router._hasher.hash_prompt(text)
        self.router._workers[worker].approx.insert(hashed.hashes, 0.0)
        self.num_sent += 1

    def _report(self, worker: int, text: Tokens) -> None:
        block_hashes = [next(self._hashes) for _ in range(len(text) // BLOCK_SIZE)]
        self.router.apply_events(worker, [BlockStored(block_hashes, None, text)])
        self.num_reported += len(block_hashes)


def measure(
    source: str, num_workers: int, cached_tokens: int, num_decisions: int, seed: int
) -> Cost:
    gc.collect()
    filling = Filling(source, num_workers, cached_tokens, seed)
    router = filling.router
    known = prompts(seed)  # the cached prompts again, for half of the requests
    new = prompts(seed + 1_000_000)
    rng = np.random.default_rng(seed)
    times_us, lengths, matched = [], [], 0
    for number in tqdm(range(num_decisions + 50), desc="decisions", leave=False, disable=None):
        text = next(known)
        if rng.random() < 0.5:
            text = next(new)
        matched += max(router.cached_tokens(text).values())
        begun = time.thread_time_ns()
        route = router.choose(text)
        took_us = (time.thread_time_ns() - begun) / 1e3
        router.finished(route)
        lengths.append(len(text))
        if number >= 50:  # the first ones fill caches and grow tables
            times_us.append(took_us)
    seconds, num = filling.seconds, filling.num_reported or filling.num_sent
    del filling, router
    return Cost(
        decision_p50_us=percentile(times_us, 50),
        decision_p99_us=percentile(times_us, 99),
        decision_max_us=max(times_us),
        prompt_tokens_p50=percentile(lengths, 50),
        prompt_tokens_p99=percentile(lengths, 99),
        matched_share=matched / sum(lengths),
        fill_us=seconds / num * 1e6,
        bytes_per_cached_token=memory(source, cached_tokens, seed),
    )


def memory(source: str, cached_tokens: int, seed: int) -> float:
    """Bytes per cached token of an index of four workers."""
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    filling = Filling(source, 4, cached_tokens, seed)
    gc.collect()
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    del filling
    return used / (4 * cached_tokens)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.routing",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--workers", type=int, default=64, metavar="N")
    parser.add_argument(
        "--cached-tokens",
        type=int,
        default=1_000_000,
        metavar="N",
        help="cached tokens of each worker",
    )
    parser.add_argument("--decisions", type=int, default=2000, metavar="N")
    parser.add_argument("--source", choices=SOURCES, help="only this one (default: both)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the results to this file"
    )
    arguments = parser.parse_args()
    document: dict[str, Any] = {}
    print(
        f"{arguments.workers} workers with {arguments.cached_tokens:,} cached tokens each\n"
        f"{'':8}{'decision: p50':>16}{'p99':>8}{'max':>9}{'of tokens: p50':>17}{'p99':>9}"
        f"{'cached':>9}{'fill, us':>10}{'bytes/token':>13}"
    )
    for source in SOURCES:
        if arguments.source not in (None, source):
            continue
        cost = measure(
            source,
            arguments.workers,
            arguments.cached_tokens,
            arguments.decisions,
            arguments.seed,
        )
        print(
            f"{source:8}{cost.decision_p50_us:13.0f} us{cost.decision_p99_us:8.0f}"
            f"{cost.decision_max_us:9.0f}{cost.prompt_tokens_p50:17,.0f}"
            f"{cost.prompt_tokens_p99:9,.0f}{cost.matched_share:9.0%}{cost.fill_us:10.1f}"
            f"{cost.bytes_per_cached_token:13.2f}",
            flush=True,
        )
        document[source] = asdict(cost)
    if arguments.json:
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
