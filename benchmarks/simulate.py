"""Compares the plugin's scheduler and cache with vLLM's own on a trace, without a model.

    python -m benchmarks.simulate --trace chat --cache-fraction 0.3
    python -m benchmarks.simulate --trace conversation_trace.jsonl --requests 2000 --scale 1/4 \\
        --cache-fraction 0.2 --load 0.8 --json result.json

Owns the command line, the table and the JSON. The run itself is `simulator`, the traces `traces`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import sys
from collections.abc import Sequence
from fractions import Fraction
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from benchmarks import traces
from benchmarks.traces import GENERATORS, Reuse, Trace
from sgl_vllm.config import OptionError, Options, words_to_mapping

if TYPE_CHECKING:
    from benchmarks.simulator import CostModel, EngineSettings, Result

ARMS = ("stock", "sgl")
COMMENT = """\
Both arms are the real classes with the real bookkeeping; a cost model turns scheduled tokens into
time. The same arguments give the same numbers, but for the scheduler's own CPU time.

Programs (chat, react, ...) send a call when the replies it builds on are there. With --load they
arrive at random (Poisson), at that part of what the modelled machine can serve at best; otherwise
--concurrency of them run at a time. A recorded trace keeps its arrival times unless --load or
--concurrency says otherwise. How to read the table: docs/simulator.md.
"""

# What the table shows: the name in the JSON, the words, the format, and which way is better:
# 1 if more is, -1 if less is, 0 if neither.
ROWS: tuple[tuple[str, str, str, int], ...] = (
    ("hit_rate", "hit rate", ".4f", 1),
    ("cached_prompt_tokens", "prompt tokens from the cache", ",d", 1),
    ("computed_prompt_tokens", "prompt tokens computed", ",d", -1),
    ("throughput_requests_s", "requests/s", ".3f", 1),
    ("ttft_p50_s", "time to first token, p50, s", ".3f", -1),
    ("ttft_p99_s", "p99, s", ".3f", -1),
    ("ttft_p999_s", "p99.9, s", ".3f", -1),
    ("max_wait_s", "longest wait for admission, s", ".3f", -1),
    ("max_passes", "most times passed over", "d", 0),
    ("steps", "forward passes", ",d", -1),
    ("preemptions", "preemptions", ",d", 0),
    ("copied_blocks", "blocks copied", ",d", 0),
    ("step_cpu_us_mean", "scheduler CPU per pass, us", ".0f", -1),
)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulate",
        description="Drive vLLM's schedulers and KV-cache managers through a trace, with no model.",
        epilog=COMMENT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument_group("what is asked").add_argument
    add(
        "--trace",
        required=True,
        metavar="FILE|NAME",
        help=f"a file in Mooncake's format, or programs to generate: {', '.join(GENERATORS)}",
    )
    add("--requests", type=_positive, metavar="N", help="so many calls (default: the file; 1000)")
    add("--scale", type=Fraction, default=Fraction(1), help="shorten a file's texts, e.g. 1/4")
    add("--seed", type=int, default=0, help="of generated texts and arrivals (default: 0)")
    rate = parser.add_argument_group("how fast").add_mutually_exclusive_group().add_argument
    rate("--load", type=float, metavar="X", help="arrivals at X times the capacity (1: saturated)")
    rate("--concurrency", type=_positive, metavar="N", help="programs at a time (default: 32)")
    engine = parser.add_argument_group("the engine")
    size = engine.add_mutually_exclusive_group(required=True).add_argument
    size("--cache-tokens", type=_positive, metavar="N", help="room for so many tokens")
    size("--cache-fraction", type=float, metavar="F", help="room for this part of the working set")
    add = engine.add_argument
    add("--block-size", type=_positive, default=16, metavar="B", help="tokens (default: 16)")
    add("--max-num-seqs", type=_positive, default=256, help="default: 256")
    add("--max-num-batched-tokens", type=_positive, default=8192, help="default: 8192")
    add("--no-async-scheduling", action="store_true", help="schedule only after the last pass")
    add = parser.add_argument_group("what is compared").add_argument
    add("--scheduler", choices=ARMS, help="only this one (default: both and their ratio)")
    add("--off", action="append", default=[], choices=("radix", "schedule"), help="a part, by name")
    add("--plugin-config", nargs="+", default=[], metavar="KEY=VALUE", help="as for the server")
    cost = parser.add_argument_group("the cost model, in seconds")
    for name, text in (
        ("step", "a forward pass"),
        ("prefill-token", "a token of a prompt"),
        ("decode-token", "a token of a reply"),
        ("context-token", "an earlier token that a request of the pass reads"),
    ):
        cost.add_argument(f"--{name}-s", type=float, metavar="S", help=text)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    parser.add_argument(
        "--check-kv", action="store_true", help="fail if a pass would read another token's KV"
    )
    return parser


def main(words: Sequence[str] | None = None) -> int:
    parser = build_parser()
    arguments = parser.parse_args(words)
    try:
        options = plugin_options(arguments)
        trace = load_trace(arguments)
    except (OptionError, OSError, ValueError) as error:
        parser.error(str(error))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
    from benchmarks import simulator  # vLLM takes seconds to import: not for --help

    costs = {
        field.name: getattr(arguments, field.name)
        for field in dataclasses.fields(simulator.CostModel)
        if getattr(arguments, field.name) is not None
    }
    cost = simulator.CostModel(**costs)
    reuse = traces.reuse(trace)
    num_blocks = num_cache_blocks(arguments, trace, reuse)
    settings = simulator.EngineSettings(
        num_blocks=num_blocks,
        block_size=arguments.block_size,
        max_model_len=trace.max_call_tokens + 1,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        async_scheduling=not arguments.no_async_scheduling,
        plugin=options.to_mapping(),
    )
    concurrency = arguments.concurrency
    if arguments.load is not None:
        span_s = least_time_s(trace, reuse, cost, settings) / arguments.load
        trace = traces.with_span(trace, span_s, arguments.seed)
    elif concurrency is None and not trace.is_timed:
        concurrency = 32
    results: dict[str, Result] = {}
    for arm in ARMS if arguments.scheduler is None else (arguments.scheduler,):
        with tqdm(
            total=trace.num_calls, desc=arm, unit="call", delay=2, leave=False, disable=None
        ) as bar:
            results[arm] = simulator.Simulation(
                trace,
                arm,
                settings,
                cost,
                concurrency=concurrency,
                check_kv=arguments.check_kv,
                on_call_done=bar.update,
            ).run()
    print(table(trace, reuse, settings, results))
    if arguments.json is not None:
        document = as_document(arguments, trace, reuse, settings, cost, results)
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")
    return 0


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return number


def plugin_options(arguments: argparse.Namespace) -> Options:
    """The plugin's options. Raises OptionError for what it does not have."""
    values = words_to_mapping(arguments.plugin_config)
    values |= dict.fromkeys(arguments.off, False)
    return Options.from_mapping(values)


def load_trace(arguments: argparse.Namespace) -> Trace:
    """Raises ValueError or OSError for a trace that is neither a known name nor a good file."""
    if arguments.trace in GENERATORS:
        return traces.generate(arguments.trace, arguments.requests or 1000, arguments.seed)
    path = Path(arguments.trace)
    if not path.exists():
        raise ValueError(
            f"--trace {path} is neither a file nor one of {', '.join(GENERATORS)}; "
            "docs/simulator.md says where to get recorded traces"
        )
    return traces.read_mooncake(path, arguments.requests, arguments.scale)


def num_cache_blocks(arguments: argparse.Namespace, trace: Trace, reuse: Reuse) -> int:
    """The cache's size; at least what the longest call needs to be served at all."""
    num_tokens = arguments.cache_tokens
    if num_tokens is None:
        num_tokens = int(arguments.cache_fraction * reuse.working_set_tokens)
    num_blocks = -(-num_tokens // arguments.block_size)
    least = -(-trace.max_call_tokens // arguments.block_size) + 1
    if num_blocks < least:
        print(
            f"the longest call needs {least} blocks: the cache is made so large, not {num_blocks}",
            file=sys.stderr,
        )
    return max(num_blocks, least)


def least_time_s(trace: Trace, reuse: Reuse, cost: CostModel, settings: EngineSettings) -> float:
    """In how many seconds the modelled machine could serve the trace at best: nothing computed
    twice, and every pass as full as the cache and `max_num_seqs` allow. `--load 1` offers the trace
    in this time."""
    num_decode = sum(len(call.reply) - 1 for call in trace.calls())
    num_context = sum(len(c.reply) * (len(c.prompt) + len(c.reply) / 2) for c in trace.calls())
    mean_tokens = sum(call.num_tokens for call in trace.calls()) / trace.num_calls
    batch = max(1.0, min(settings.max_num_seqs, settings.cache_tokens / mean_tokens))
    num_prefill = reuse.must_compute_tokens
    return cost.seconds(
        steps=max(num_decode / batch, num_prefill / settings.max_num_batched_tokens),
        prefill=num_prefill,
        decode=num_decode,
        context=num_context,
    )


def ratio(name: str, better: int, results: dict[str, Result]) -> float | None:
    """Above 1 is better for the plugin, always; None where there is nothing to divide."""
    if len(results) < 2 or not better:
        return None
    stock, sgl = (float(getattr(results[arm], name)) for arm in ARMS)
    over, under = (sgl, stock) if better > 0 else (stock, sgl)
    return over / under if under else None


def table(trace: Trace, reuse: Reuse, settings: EngineSettings, results: dict[str, Result]) -> str:
    """The comparison as text, a row for each of `ROWS`."""
    lines = [
        f"{trace.name}: {trace.num_calls:,} calls of {len(trace.programs):,} programs, "
        f"{reuse.prompt_tokens:,} prompt tokens, working set {reuse.working_set_tokens:,}",
        f"cache: {settings.cache_tokens:,} tokens in blocks of {settings.block_size} "
        f"({settings.cache_tokens / reuse.working_set_tokens:.2f} of the working set); "
        f"best possible hit rate {reuse.best_hit_rate:.4f}",
        *(
            f"off in the plugin: {part} ({reason})"
            for part, reason in (results["sgl"].parts if "sgl" in results else {}).items()
            if reason != "on" and part in ("radix", "schedule")
        ),
        "",
        f"{'':32}"
        + "".join(f"{arm:>14}" for arm in results)
        + f"{'ratio' * (len(results) > 1):>9}",
    ]
    for name, text, form, better in ROWS:
        times = ratio(name, better, results)
        cells = "".join(f"{format(getattr(result, name), form):>14}" for result in results.values())
        lines.append(f"{text:32}{cells}" + (f"{times:9.3f}" if times is not None else ""))
    if len(results) > 1:
        lines += ["", "ratio: above 1 is better for the plugin"]
    return "\n".join(lines)


def as_document(
    arguments: argparse.Namespace,
    trace: Trace,
    reuse: Reuse,
    settings: EngineSettings,
    cost: CostModel,
    results: dict[str, Result],
) -> dict[str, Any]:
    """All numbers, and what it takes to get them again."""
    given = {
        name: value if isinstance(value, str | int | float | list | None) else str(value)
        for name, value in vars(arguments).items()
    }
    ratios = {name: ratio(name, better, results) for name, _, _, better in ROWS}
    return {
        "versions": {name: _version(name) for name in ("sgl-vllm", "vllm")},
        "arguments": given,
        "engine": dataclasses.asdict(settings),
        "cost_model": dataclasses.asdict(cost),
        "trace": {
            "name": trace.name,
            "programs": len(trace.programs),
            "requests": trace.num_calls,
            "prompt_tokens": reuse.prompt_tokens,
            "working_set_tokens": reuse.working_set_tokens,
        },
        "arms": {
            arm: {**dataclasses.asdict(result), "best_hit_rate": reuse.best_hit_rate}
            for arm, result in results.items()
        },
        "ratio": {name: value for name, value in ratios.items() if value is not None},
    }


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
