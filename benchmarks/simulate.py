"""Compares the plugin's scheduler and cache with vLLM's own on a trace, without a model.

    python -m benchmarks.simulate --trace chat --cache-fraction 0.3
    python -m benchmarks.simulate --trace conversation_trace.jsonl --requests 2000 --scale 1/4 \\
        --cache-fraction 0.2 --load 0.8 --json result.json
    python -m benchmarks.simulate --trace chat --policy fcfs --cache-fraction 0.1 --load 0.5
    python -m benchmarks.simulate --trace agent_sessions --scale 1/16 --cache-fraction 0.2

Owns the command line: what is run, and where the results go. A run is `simulator`'s, the table and
the JSON are `comparison`'s, the traces `traces`'.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

from rich.console import Console
from tqdm import tqdm

from benchmarks import session_model, traces
from benchmarks.arms import ARMS
from benchmarks.command import parser_of, positive, write_json
from benchmarks.comparison import Comparison
from benchmarks.cost_model import CostModel
from benchmarks.engine_settings import STOCK, EngineSettings
from benchmarks.traces import GENERATORS, Reuse, Trace
from sgl_vllm.config import Options, choices_of
from sgl_vllm.option import OptionError, words_to_mapping

DEFAULT_CONCURRENCY = 32
GENERATED = (*GENERATORS, session_model.NAME)
ABOUT = "Drive vLLM's schedulers and KV-cache managers through a trace, with no model."
COMMENT = """\
Both arms are the real classes with the real bookkeeping; a cost model turns scheduled tokens into
time. The same arguments give the same numbers, but for the scheduler's own CPU time.

Programs (chat, react, ...) send a call when the replies it builds on are there. With --load they
arrive at random (Poisson), at that part of what the modelled machine can serve at best; otherwise
--concurrency of them run at a time. A recorded trace and agent_sessions keep their times unless
--load, which stretches them, or --concurrency says otherwise. How to read the table:
docs/benchmarks.md.
"""


def build_parser() -> argparse.ArgumentParser:
    parser = parser_of("simulate", ABOUT)
    parser.epilog = COMMENT
    add = parser.add_argument_group("what is asked").add_argument
    add(
        "--trace",
        required=True,
        metavar="FILE|NAME",
        help=f"a file in Mooncake's format, or programs to generate: {', '.join(GENERATED)}",
    )
    add("--requests", type=positive, metavar="N", help="so many calls (default: the file; 1000)")
    add(
        "--scale",
        type=Fraction,
        default=Fraction(1),
        help=f"shorten a file's texts, or {session_model.NAME}' texts and times, e.g. 1/4",
    )
    add("--seed", type=int, default=0, help="of generated texts and arrivals (default: 0)")
    rate = parser.add_argument_group("how fast").add_mutually_exclusive_group().add_argument
    rate(
        "--load",
        type=_above_zero,
        metavar="X",
        help="arrivals at X times the capacity (1: saturated)",
    )
    rate(
        "--concurrency",
        type=positive,
        metavar="N",
        help=f"programs at a time (default: {DEFAULT_CONCURRENCY})",
    )
    engine = parser.add_argument_group("the engine")
    size = engine.add_mutually_exclusive_group(required=True).add_argument
    size("--cache-tokens", type=positive, metavar="N", help="room for so many tokens")
    size(
        "--cache-fraction",
        type=_above_zero,
        metavar="F",
        help="room for this part of the working set",
    )
    add = engine.add_argument
    add("--block-size", type=positive, default=16, metavar="B", help="tokens (default: 16)")
    add("--max-num-batched-tokens", type=positive, default=8192, help="default: 8192")
    add = parser.add_argument_group("what is compared").add_argument
    add("--scheduler", choices=ARMS, help="only this one (default: both and their ratio)")
    add(
        "--policy",
        choices=choices_of("schedule_policy"),
        help="the plugin's order of waiting requests; its default if not given",
    )
    add("--plugin-config", nargs="+", default=[], metavar="KEY=VALUE", help="as for the server")
    add(
        "--hints",
        action="store_true",
        help="tell the plugin which program each call belongs to, and which calls no later one "
        "extends",
    )
    cost = parser.add_argument_group("the cost model, in seconds")
    for name, text in (
        ("step", "a forward pass"),
        ("prefill-token", "a token of a prompt"),
        ("decode-token", "a token of a reply"),
        ("context-token", "an earlier token that a request of the pass reads"),
    ):
        default = getattr(CostModel(), f"{name.replace('-', '_')}_s")
        cost.add_argument(f"--{name}-s", type=float, default=default, metavar="S", help=text)
    return parser


def main(words: Sequence[str] | None = None) -> int:
    parser = build_parser()
    arguments = parser.parse_args(words)
    try:
        options = plugin_options(arguments)
        cost = cost_model(arguments)
        trace = load_trace(arguments)
    except (OptionError, OSError, ValueError) as error:
        parser.error(str(error))
    reuse = traces.reuse(trace)
    settings = make_settings(arguments, options, trace, reuse)
    concurrency = arguments.concurrency
    if arguments.load is not None:
        span_s = least_time_s(trace, reuse, cost, settings) / arguments.load
        trace = traces.with_span(trace, span_s, arguments.seed)
    elif concurrency is None and not trace.is_timed:
        concurrency = DEFAULT_CONCURRENCY
    silence_vllm()
    from benchmarks.simulator import Simulation  # vLLM takes seconds to import

    results = {}
    arms = ARMS if arguments.scheduler is None else (arguments.scheduler,)
    for arm in tqdm(arms, delay=2, leave=False, disable=None):
        results[arm] = Simulation(
            trace,
            arm,
            dataclasses.replace(settings, plugin={}) if arm == STOCK else settings,
            cost,
            concurrency=concurrency,
            sends_hints=arguments.hints and arm != STOCK,
        ).run()
    comparison = Comparison(trace, reuse, settings, results)
    comparison.show(Console(highlight=False, soft_wrap=True))
    write_json(arguments.json, comparison.as_document(vars(arguments), cost))
    return 0


def silence_vllm() -> None:
    """Before vLLM is imported: errors only, unless the environment asks for more."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])


def _above_zero(text: str) -> float:
    if not (number := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def make_settings(
    arguments: argparse.Namespace, options: Options, trace: Trace, reuse: Reuse
) -> EngineSettings:
    """The engine with the plugin. Says so if the cache has to be larger than was asked."""
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
    return EngineSettings(
        num_blocks=max(num_blocks, least),
        block_size=arguments.block_size,
        max_model_len=trace.max_call_tokens + 1,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        plugin=options.to_mapping(),
    )


def cost_model(arguments: argparse.Namespace) -> CostModel:
    names = [field.name for field in dataclasses.fields(CostModel)]
    return CostModel(**{name: getattr(arguments, name) for name in names})


def plugin_options(arguments: argparse.Namespace) -> Options:
    """Raises OptionError for what the plugin does not have."""
    values = words_to_mapping(arguments.plugin_config)
    if arguments.policy is not None:
        values["schedule_policy"] = arguments.policy
    return Options.from_mapping(values)


def load_trace(arguments: argparse.Namespace) -> Trace:
    """Raises ValueError or OSError for a trace that is neither a known name nor a good file."""
    if arguments.trace in GENERATORS:
        return traces.generate(arguments.trace, arguments.requests or 1000, arguments.seed)
    if arguments.trace == session_model.NAME:
        return session_model.trace(arguments.requests or 1000, arguments.seed, arguments.scale)
    path = Path(arguments.trace)
    if not path.exists():
        raise ValueError(
            f"--trace {path} is neither a file nor one of {', '.join(GENERATED)}; "
            "docs/benchmarks.md says where to get recorded traces"
        )
    return traces.read_mooncake(path, arguments.requests, arguments.scale)


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


if __name__ == "__main__":
    sys.exit(main())
