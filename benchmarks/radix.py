"""What the prefix cache costs: the radix tree against vLLM's own, in one run, on one machine.

    python -m benchmarks.radix [--block-size 16 128] [--windows TOKENS ...] [--json FILE]

For every request both sides do what the engine does: build the `Request` (with vLLM's block hashes
where the side needs them), look it up, allocate, free, which indexes it. Rounds of the two sides
alternate, and the ratio is of their medians. The requests share the first half of their prompts;
the cache holds `cached` tokens of other prompts, and room for all, so nothing is evicted, except in
the rows that say so: there every request evicts as much as it takes.

With `--windows`, the model has a KV-cache group of a sliding window for each number, as `--windows
1024 1024 1024 1024 1024` for Gemma 3, and vLLM's side is its coordinator for hybrid models.

"cached tokens" is what the measured requests found in all. Absolute times mean little on a shared
machine; `ratio` (radix / vLLM) is what counts: 1 or less.
"""

from __future__ import annotations

import gc
import random
import statistics
import sys
import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version

from tqdm import tqdm
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request, RequestStatus

from benchmarks.arms import ARMS
from benchmarks.command import parser_of, write_json
from benchmarks.engine_settings import EngineSettings
from benchmarks.schedulers import make_block_hasher, make_scheduler
from benchmarks.simulate import silence_vllm

CACHED_TOKENS = (1_000, 10_000, 100_000)
PROMPT_TOKENS = (200, 2_000, 20_000)
VOCABULARY = 100_000
ROUNDS, ROUNDS_OF_LONG_PROMPTS = 60, 15
_PARAMS = SamplingParams(max_tokens=1)


class Side:
    """One prefix cache with the engine's way of calling it."""

    def __init__(
        self,
        arm: str,
        block_size: int,
        num_blocks: int,
        max_model_len: int,
        windows: Sequence[int] = (),
    ) -> None:
        settings = EngineSettings(
            num_blocks, block_size, max_model_len, sliding_windows=tuple(windows)
        )
        scheduler = make_scheduler(arm, settings)
        self.manager = scheduler.kv_cache_manager
        self.hasher = make_block_hasher(scheduler)
        self.num_served = 0

    def serve(self, token_ids: list[int]) -> tuple[float, int]:
        """One request from its arrival to its end: seconds, and how many tokens were cached."""
        manager = self.manager
        self.num_served += 1
        started = time.perf_counter()
        request = Request(str(self.num_served), token_ids, _PARAMS, None, block_hasher=self.hasher)
        manager.new_step_starts()
        blocks, num_cached, _ = manager.get_computed_blocks(request)
        allocated = manager.allocate_slots(
            request, request.num_tokens - num_cached, num_cached, blocks
        )
        manager.record_prefix_cache_stats(request, num_cached)
        request.num_computed_tokens = request.num_tokens
        copied = manager.take_kv_cache_block_copies()[1]
        # It ends with its first token, so the engine frees it in the step that computes its prompt.
        manager.block_pool.free_blocks(copied)
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        manager.free(request)
        assert allocated is not None
        return time.perf_counter() - started, num_cached


@dataclass(frozen=True)
class Row:
    """One case. Times are medians per request, in microseconds."""

    block_size: int
    cached_tokens: int
    prompt_tokens: int
    evicting: bool
    vllm_us: float
    radix_us: float
    vllm_cached: int
    radix_cached: int

    @property
    def ratio(self) -> float:
        return self.radix_us / self.vllm_us


def measure(
    block_size: int,
    cached: int,
    prompt: int,
    evicting: bool,
    windows: Sequence[int],
) -> Row:
    rng = random.Random(cached + prompt)

    def words(count: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(count)]

    rounds = ROUNDS_OF_LONG_PROMPTS if prompt > 10_000 else ROUNDS
    room = prompt + 2 * block_size if evicting else (rounds + 4) * (prompt + 2 * block_size)
    num_blocks = 1 + (cached + room) // block_size * (1 + len(windows))
    max_model_len = max(prompt + 1, 1024)
    sides = [Side(arm, block_size, num_blocks, max_model_len, windows) for arm in ARMS]
    filling = [words(min(cached, 1000)) for _ in range(max(1, cached // 1000))]
    shared = words(prompt // 2)
    prompts = [shared + words(prompt - prompt // 2) for _ in range(rounds + 2)]
    times: list[list[float]] = [[], []]
    hits = [0, 0]
    for token_ids in filling:
        for side in sides:
            side.serve(token_ids)
    gc.collect()
    gc.disable()
    try:
        for number, token_ids in enumerate(prompts):
            order = (0, 1) if number % 2 else (1, 0)
            for index in order:
                seconds, num_cached = sides[index].serve(list(token_ids))
                if number >= 2:
                    times[index].append(seconds)
                    hits[index] += num_cached
    finally:
        gc.enable()
    vllm_us, radix_us = (1e6 * statistics.median(t) for t in times)
    return Row(block_size, cached, prompt, evicting, vllm_us, radix_us, *hits)


def bytes_per_cached_token(block_size: int) -> dict[str, float]:
    """Python memory that each side keeps for a cached token, over 400 prompts of 500 tokens that
    share their first 100."""
    result = {}
    for name, arm in zip(("vllm", "radix"), ARMS, strict=True):
        rng = random.Random(0)
        shared = [rng.randrange(VOCABULARY) for _ in range(100)]
        side = Side(arm, block_size, 400 * 600 // block_size, 1024)
        side.serve(shared)
        tracemalloc.start()
        for _ in range(400):
            side.serve(shared + [rng.randrange(VOCABULARY) for _ in range(400)])
        gc.collect()
        result[name] = tracemalloc.get_traced_memory()[0] / (400 * 400)
        tracemalloc.stop()
    return result


def main() -> None:
    parser = parser_of("radix", __doc__)
    parser.add_argument("--block-size", type=int, nargs="+", default=[16, 128], metavar="N")
    parser.add_argument(
        "--windows",
        type=int,
        nargs="+",
        default=[],
        metavar="TOKENS",
        help="sliding windows, each of a KV-cache group beside full attention",
    )
    arguments = parser.parse_args()
    silence_vllm()
    cases = [
        (block_size, cached, prompt, evicting)
        for block_size in arguments.block_size
        for cached in CACHED_TOKENS
        for prompt in PROMPT_TOKENS
        for evicting in (False, True)
    ]
    rows = []
    for block_size, cached, prompt, evicting in tqdm(cases, unit="case", file=sys.stderr):
        rows.append(measure(block_size, cached, prompt, evicting, arguments.windows))
    print(f"vLLM {version('vllm')}; per request: match, allocate, free, and vLLM's hashing")
    print("block  cached  prompt  evicts    vLLM us  radix us  ratio   cached tokens vLLM / radix")
    for row in rows:
        print(
            f"{row.block_size:5} {row.cached_tokens:7} {row.prompt_tokens:7}  "
            f"{'yes' if row.evicting else 'no':6} {row.vllm_us:9.1f} {row.radix_us:9.1f}  "
            f"{row.ratio:5.2f}   {row.vllm_cached:9} / {row.radix_cached}"
        )
    memory = {size: bytes_per_cached_token(size) for size in arguments.block_size}
    for size, by_side in memory.items():
        print(
            f"memory per cached token at block {size}: "
            f"vLLM {by_side['vllm']:.1f} bytes, radix {by_side['radix']:.1f} bytes"
        )
    worst = max(rows, key=lambda row: row.ratio)
    print(f"worst ratio {worst.ratio:.2f} (1 or less: not slower than vLLM)")
    shown = [{**asdict(row), "ratio": row.ratio} for row in rows]
    write_json(arguments.json, {"rows": shown, "bytes_per_cached_token": memory})


if __name__ == "__main__":
    main()
