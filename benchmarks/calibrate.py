"""Measures forward passes on this machine and fits the simulator's cost model to them.

    python -m benchmarks.calibrate --model demo
    python -m benchmarks.calibrate --model MODEL --max-num-batched-tokens 8192 --max-num-seqs 256 \\
        --json h100.json
    python -m benchmarks.simulate --cost-model h100.json ...

A real engine runs in this process, on whatever device vLLM finds, and serves batches of chosen
sizes: single and several prompts, decoding at many batch sizes and context lengths. The time of a
pass is taken from the end of `schedule()` to the beginning of `update_from_output()`, so the
scheduler's own time is not in it. Owns the batches and the measuring; the model and the fit are
`cost_model`'s.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.command import check_folders, positive
from benchmarks.cost_model import Batch, CostModel, Fit, Pass, fit
from benchmarks.models import resolve_model
from sgl_vllm.server_process import CPU_ENVIRONMENT

DECODE_PASSES = 4
"""So many passes with every batch that decodes; its context grows by one token a request."""

CONTEXT_BUDGETS = 8
"""The prompts of one experiment have at most so many times `max_num_batched_tokens`."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """So many requests at once, each with so many tokens of prompt and of reply."""

    num_requests: int
    num_prompt: int
    num_reply: int


def experiments(
    max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int, cache_tokens: int
) -> list[Experiment]:
    """What to run, so that prefill, decode and context vary independently of each other.

    Each number of requests is tried with each length of prompt, once with one token of reply and,
    with every other length, with as many as make `DECODE_PASSES` passes of one token a request.
    Prompts of more than `max_num_batched_tokens` together come in chunks, each with the ones
    before as its context, beside requests that decode already.
    """
    longest = min(max_model_len, cache_tokens) - DECODE_PASSES - 1
    lengths = [*_doubling(16, longest), longest]
    most = min(CONTEXT_BUDGETS * max_num_batched_tokens, cache_tokens // 2)
    found = []
    for num_requests in _doubling(1, max_num_seqs):
        for index, length in enumerate(lengths):
            if num_requests > 1 and num_requests * (length + DECODE_PASSES + 1) > most:
                continue
            found.append(Experiment(num_requests, length, 1))
            if index % 2 == 0:
                found.append(Experiment(num_requests, length, DECODE_PASSES + 1))
    return found


def _doubling(first: int, last: int) -> Iterable[int]:
    while first <= last:
        yield first
        first *= 2


def medians(repeats: Sequence[Sequence[Pass]]) -> list[Pass]:
    """The passes of an experiment, each with the median of its times: every repeat has the same
    batches in the same order."""
    passes = []
    for same in zip(*repeats, strict=True):
        (batch,) = {one.batch for one in same}
        passes.append(Pass(batch, statistics.median(one.seconds for one in same)))
    return passes


class PassTimer:
    """Watches an engine core and keeps every pass with its time, until they are taken.

    Asynchronous scheduling has to be off: each pass then begins and ends before the next.
    """

    def __init__(self, engine_core: Any) -> None:
        self.passes: list[Pass] = []
        scheduler = engine_core.scheduler
        schedule, update = scheduler.schedule, scheduler.update_from_output
        batch = Batch(0, 0, 0)
        started_s = 0.0

        def timed_schedule(*args: Any, **kwargs: Any) -> Any:
            nonlocal batch, started_s
            scheduled = schedule(*args, **kwargs)
            batch = Batch.of(
                # A request's computed tokens count this pass already.
                (scheduler.requests[request_id].num_computed_tokens - num_new, num_new)
                for request_id, num_new in scheduled.num_scheduled_tokens.items()
            )
            started_s = time.perf_counter()
            return scheduled

        def timed_update(*args: Any, **kwargs: Any) -> Any:
            seconds = time.perf_counter() - started_s
            if batch.prefill or batch.decode:
                self.passes.append(Pass(batch, seconds))
            return update(*args, **kwargs)

        scheduler.schedule, scheduler.update_from_output = timed_schedule, timed_update

    def take(self) -> list[Pass]:
        """The passes since the last call."""
        taken, self.passes = self.passes, []
        return taken


def measure(arguments: argparse.Namespace) -> tuple[list[Pass], str]:
    """The passes of all experiments, and the device's name."""
    for name, value in {**CPU_ENVIRONMENT, "VLLM_LOGGING_LEVEL": "ERROR"}.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams  # takes seconds: not for --help
    from vllm.platforms import current_platform

    llm = LLM(
        model=str(resolve_model(arguments.model)),
        dtype=arguments.dtype,
        max_model_len=arguments.max_model_len,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        max_num_seqs=arguments.max_num_seqs,
        # As a server runs it; a CPU would compile for minutes, and a server there is given this.
        enforce_eager=current_platform.is_cpu(),
        enable_prefix_caching=False,
        async_scheduling=False,
        skip_tokenizer_init=True,
        seed=0,
    )
    core = llm.llm_engine.engine_core.engine_core
    cache_config = core.vllm_config.cache_config
    todo = experiments(
        arguments.max_num_batched_tokens,
        arguments.max_num_seqs,
        arguments.max_model_len,
        cache_config.num_gpu_blocks * cache_config.block_size,
    )
    rng = random.Random(0)
    vocabulary = llm.model_config.get_vocab_size()

    timer = PassTimer(core)

    def perform(experiment: Experiment) -> list[Pass]:
        prompts = [
            {"prompt_token_ids": rng.choices(range(vocabulary), k=experiment.num_prompt)}
            for _ in range(experiment.num_requests)
        ]
        params = SamplingParams(
            temperature=0, max_tokens=experiment.num_reply, ignore_eos=True, detokenize=False
        )
        llm.generate(prompts, params, use_tqdm=False)
        return timer.take()

    repeats: dict[Experiment, list[list[Pass]]] = {experiment: [] for experiment in todo}
    with tqdm(
        total=len(todo) * (arguments.repeats + 1), desc="experiments", unit="", disable=None
    ) as bar:
        for repeat in range(arguments.repeats + 1):
            # In a new order each time, so that no batch always meets the same moment.
            for experiment in rng.sample(todo, len(todo)):
                passes = perform(experiment)
                if repeat:  # before, kernels are chosen and memory is allocated
                    repeats[experiment].append(passes)
                bar.update()
    device = current_platform.get_device_name() or current_platform.device_type
    llm.llm_engine.engine_core.shutdown()
    return [one for same in repeats.values() for one in medians(same)], device


def report(model: str, device: str, passes: Sequence[Pass], found: Fit) -> str:
    """The coefficients, ready to paste, and how far the fit is off, by kind of pass."""
    kinds = {
        "prefill only": [one for one in passes if not one.batch.decode],
        "prefill and decode": [one for one in passes if one.batch.prefill and one.batch.decode],
        "decode only": [one for one in passes if not one.batch.prefill],
    }
    lines = [
        f"{model} on {device}: {found.num_passes:,} passes",
        f"relative error: half of them below {found.relative_error_p50:.1%}, "
        f"nine of ten below {found.relative_error_p90:.1%}; R2 of the seconds "
        f"{found.r_squared:.4f}",
    ]
    for name, some in kinds.items():
        if some:
            errors = [found.cost.batch_s(one.batch) / one.seconds - 1 for one in some]
            times_ms = [1e3 * one.seconds for one in some]
            lines.append(
                f"  {name + ':':20}{len(some):6,} of {min(times_ms):.2f} to {max(times_ms):.2f} "
                f"ms, predicted {statistics.median(errors):+.1%} in the median"
            )
    return "\n".join([*lines, "", options(found.cost)])


def options(cost: CostModel) -> str:
    """For the command line of `benchmarks.simulate`."""
    return " ".join(
        f"--{name.replace('_', '-')} {value:.4g}"
        for name, value in dataclasses.asdict(cost).items()
    )


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.calibrate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default="demo", help="demo, shape:33m, a folder, a hub name (default: demo)")
    add("--dtype", default="auto", help="of the weights (default: auto)")
    add("--max-num-batched-tokens", type=positive, default=2048, metavar="N", help="default: 2048")
    add("--max-num-seqs", type=positive, default=64, metavar="N", help="default: 64")
    add("--max-model-len", type=positive, default=2048, metavar="N", help="default: 2048")
    add("--repeats", type=positive, default=3, metavar="N", help="of every batch (default: 3)")
    add("--json", type=Path, metavar="FILE", help="write it there, for simulate --cost-model")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    parser = build_parser()
    arguments = parser.parse_args(words)
    try:
        check_folders(json=arguments.json, data=None)
        resolve_model(arguments.model)
        if arguments.max_num_batched_tokens < 16 or arguments.max_model_len < 32:
            raise ValueError("a pass needs 16 tokens or more, and a request 32")
    except ValueError as error:
        parser.error(str(error))
    passes, device = measure(arguments)
    found = fit(passes)
    print(report(arguments.model, device, passes, found))
    if arguments.json is not None:
        document = {
            "model": arguments.model,
            "device": device,
            "arguments": {name: str(value) for name, value in vars(arguments).items()},
            "cost_model": dataclasses.asdict(found.cost),
            "fit": dataclasses.asdict(found),
            "passes": [{**dataclasses.asdict(p.batch), "seconds": p.seconds} for p in passes],
        }
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
