"""Plays random programs on random settings of the engine for as long as asked (`make soak`).

    python -m tests.engine.soak --requests 20000
    python -m tests.engine.soak --vllm-platform v2-async --minutes 15
    python -m tests.engine.soak --model gemma3 --requests 2000

Every round has a seed of its own and stands alone (`rounds.py`). Exits with 1 if an engine did not
give the reference's answers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import random
import sys
import tempfile
import time
import warnings
from pathlib import Path

import pytest
from tqdm import tqdm

from tests.effort import requests
from tests.platforms.platform import PLATFORMS, VLLMS_CHOICE_ON_A_CPU


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=20_000, help="stop after so many (20000)")
    parser.add_argument("--minutes", type=float, help="stop after so long, if that is earlier")
    parser.add_argument("--seed", type=int, help="of the first round; the next ones count on")
    parser.add_argument(
        "--vllm-platform",
        choices=sorted(PLATFORMS),
        default=VLLMS_CHOICE_ON_A_CPU.name,
        help="the model runner and scheduling of all engines (tests/platforms)",
    )
    parser.add_argument(
        "--model",
        default="demo",
        help="demo, or a small one with random weights: gemma3, gemma4, gpt_oss, llama4 (windows), "
        "qwen3_next, granite4 (recurrent layers), deepseek_v2 (MLA), glm4_moe, deepseek_v3, "
        "exaone_moe, qwen3_next_mtp (multi-token prediction)",
    )
    parser.add_argument(
        "--calls", type=int, help="requests of a program (250; fewer where a pass is slow)"
    )
    parser.add_argument("--engines", type=int, default=4, help="that play each program (4)")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--verbose", action="store_true", help="with vLLM's log")
    options = parser.parse_args()
    with pytest.MonkeyPatch.context() as patch:
        PLATFORMS[options.vllm_platform].set_up(patch)
        with tempfile.TemporaryDirectory() as folder:
            return play_rounds(options, Path(folder), patch)


def play_rounds(options: argparse.Namespace, folder: Path, patch: pytest.MonkeyPatch) -> int:
    """All rounds that are asked for; the exit status."""
    # vLLM is imported only now that the platform is set up.
    from tests.engine import starts
    from tests.engine.conftest import ENVIRONMENT
    from tests.engine.models import MODELS
    from tests.engine.rounds import ROWS, Soak

    os.environ.update(ENVIRONMENT)
    os.environ.pop("VLLM_PLUGINS", None)
    if not options.verbose:
        logging.disable(logging.ERROR)
        warnings.simplefilter("ignore")
    if options.model not in MODELS:
        print(f"--model: {options.model!r} is none of {', '.join(MODELS)}")
        return 2
    model = MODELS[options.model]
    engine_args = model.prepare(folder / options.model, patch)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    print(f"{options.vllm_platform}, {options.model}, first seed {seed}", flush=True)
    calls = options.calls or requests(250)
    soak = Soak(options.vllm_platform, options.model, model, engine_args, calls, options.engines)
    begin = time.monotonic()
    first_seed = seed
    with (
        starts.small_heap(),
        starts.nothing_twice(),
        contextlib.suppress(KeyboardInterrupt),  # the figures so far are worth as much
        tqdm(total=options.requests, unit=" requests", smoothing=0) as progress,
    ):
        while soak.counts["requests compared"] < options.requests:
            if options.minutes and time.monotonic() - begin > options.minutes * 60:
                break
            if soak.counts["failed engines"] >= 20:
                break
            soak.round(seed, progress)
            seed += 1
            progress.set_postfix(seed=seed, problems=len(soak.problems))
    seconds = time.monotonic() - begin
    figures = {
        **{row: soak.counts[row] for row in ROWS},
        "seconds": round(seconds),
        "requests/s": round(soak.counts["requests compared"] / seconds, 1),
    }
    print("\n".join(f"{row:20}{value:>12,}" for row, value in figures.items()))
    print(f"seeds {first_seed} to {seed - 1}")
    if options.json:
        report = {"first_seed": first_seed, "last_seed": seed - 1, **figures}
        options.json.write_text(json.dumps({**report, "problems": soak.problems}, indent=2) + "\n")
    return 1 if soak.problems else 0


if __name__ == "__main__":
    sys.exit(main())
