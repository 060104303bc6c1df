"""What a tenant that means no good costs the others, in the simulator.

    python -m benchmarks.hostile --requests 1000 --cache-fraction 0.4 --load 0.8
    python -m benchmarks.hostile --plugin-config schedule_hold_s=8 --seed 1

Coding agents of one tenant (docs/simulator.md) are served alone, and beside a hostile tenant:

    lying tools       each request says that a tool of a new name runs for an hour, and that it
                      will be continued. None ever is
    the same, silent  the same requests without a word about tools: what they cost by themselves
    endless           four programs whose next request follows at once
    open sessions     many short sessions that are opened and never continued

The table shows the agents' time to first token, p99, with the hostile tenant as a multiple of that
without it, on stock vLLM and on the plugin; and what the plugin remembers of requests, in bytes of
host memory, once all are served. What an attack costs on stock vLLM, it costs by its mere work.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

from benchmarks import session_model, traces
from benchmarks.comparison import ARMS, percentile
from benchmarks.cost_model import CostModel
from benchmarks.simulate import least_time_s
from benchmarks.simulate_grid import silence_vllm
from benchmarks.traces import VOCABULARY, Call, Program, Trace
from sgl_vllm.config import OptionError, Options, words_to_mapping
from sgl_vllm.protocol.request_keys import NEXT_IN_S, NEXT_TOOL
from tools.engine_harness.settings import SGL, STOCK, EngineSettings

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

SCALE = Fraction(1, 16)
BLOCK_SIZE, BATCH_TOKENS, CONTEXT_TOKEN_S = 4, 512, 640e-9  # of the same scale

LYING, SILENT = "lying tools", "the same, silent"
TENANT = "hostile"
LIE_S = 3600.0
NUM_ENDLESS = 4
SESSION_TOKENS = 64
"""Of a session that is opened only: longer than what contexts are recognized by."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run came to.

    Attributes:
        ttft_p99_s: of the agents' calls.
        num_bytes: that the plugin remembers of requests; 0 for stock.
    """

    ttft_p99_s: float
    num_bytes: int


class Attacker:
    """Writes the hostile tenant's programs.

    Args:
        span_s: the agents arrive over so many seconds, and so do these.
        num_tokens: of prompts that nobody has, in all of an attack that computes.
        num_sessions: to be opened and not continued.
    """

    def __init__(self, seed: int, span_s: float, num_tokens: int, num_sessions: int) -> None:
        self._rng = np.random.default_rng((seed, 1))
        self._span_s = span_s
        self._num_tokens = num_tokens
        self._num_sessions = num_sessions

    def attacks(self) -> dict[str, list[Program]]:
        lying = list(self._lying_tools())
        return {
            LYING: lying,
            SILENT: list(map(traces.silent, lying)),
            "endless": list(self._endless()),
            "open sessions": list(self._open_sessions()),
        }

    def _text(self, num_tokens: int) -> traces.Tokens:
        return self._rng.integers(0, VOCABULARY, num_tokens, dtype=np.int32)

    def _lying_tools(self, num_prompt: int = 500) -> Iterator[Program]:
        for number in range(max(1, self._num_tokens // num_prompt)):
            hints: dict[str, str | int | float] = {NEXT_TOOL: f"tool {number}", NEXT_IN_S: LIE_S}
            call = Call(self._text(num_prompt), self._text(4), hints=hints)
            yield Program((call,), self._rng.uniform(0, self._span_s), TENANT)

    def _endless(self, num_new: int = 100, num_reply: int = 20) -> Iterator[Program]:
        num_calls = max(1, self._num_tokens // (NUM_ENDLESS * num_new))
        for _ in range(NUM_ENDLESS):
            prompt, calls = self._text(num_new), list[Call]()
            for number in range(num_calls):
                reply = self._text(num_reply)
                calls.append(Call(prompt, reply, (number - 1,) if number else ()))
                prompt = np.concatenate([prompt, reply, self._text(num_new)])
                if len(prompt) > 10_000:
                    prompt = self._text(num_new)
            yield Program(tuple(calls), 0.0, TENANT)

    def _open_sessions(self) -> Iterator[Program]:
        for _ in range(self._num_sessions):
            call = Call(self._text(SESSION_TOKENS), self._text(2))
            yield Program((call,), self._rng.uniform(0, self._span_s), TENANT)


def bookkeeping_bytes(scheduler: Scheduler) -> int:
    """Host memory of what the plugin remembers of requests that it has served: contexts, pauses,
    tenants, evicted prefixes, causes of misses and the queue. Not of the tree, whose size the cache
    bounds, nor of vLLM's objects. Walks all of it."""
    from sgl_vllm.scheduler.scheduler import SglSchedulerMixin

    assert isinstance(scheduler, SglSchedulerMixin)
    parts = scheduler.parts
    radix = parts.radix
    assert radix is not None and radix.tree is not None
    roots = (radix.contexts, radix.misses, radix.tree.evictions, parts.queue)
    borders = (scheduler, radix, radix.pool, radix.tree, parts, parts.engine)
    return sum(map(sys.getsizeof, _reachable(roots, set(map(id, borders)))))


_NOT_OURS = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, logging.Logger)


def _reachable(roots: Sequence[object], seen: set[int]) -> Iterator[object]:
    """All that `roots` refer to, but for what is in `seen`, by `id`."""
    from sgl_vllm.radix.node import Node

    pending = [*roots]
    while pending:
        one = pending.pop()
        is_vllms = type(one).__module__.startswith("vllm.")
        if id(one) in seen or is_vllms or isinstance(one, (*_NOT_OURS, Node)):
            continue
        seen.add(id(one))
        yield one
        pending += gc.get_referents(one)


def settings_for(trace: Trace, cache_fraction: float, options: Options) -> EngineSettings:
    """An engine whose cache holds this part of the trace's working set."""
    num_tokens = cache_fraction * traces.reuse(trace).working_set_tokens
    return EngineSettings(
        num_blocks=int(max(num_tokens, 12_000, trace.max_call_tokens)) // BLOCK_SIZE + 2,
        block_size=BLOCK_SIZE,
        max_model_len=max(12_000, trace.max_call_tokens + 1),
        max_num_batched_tokens=BATCH_TOKENS,
        async_scheduling=True,
        plugin=options.to_mapping(),
    )


def run(agents: Trace, attack: Sequence[Program], arm: str, settings: EngineSettings) -> Outcome:
    from benchmarks.simulator import Simulation  # vLLM takes seconds to import

    if arm == STOCK:
        settings = dataclasses.replace(settings, plugin={})
    trace = Trace("hostile", (*agents.programs, *attack))
    simulation = Simulation(trace, arm, settings, CostModel(context_token_s=CONTEXT_TOKEN_S))
    result = simulation.run()
    ttfts_s = sorted(
        ttft_s
        for call, ttft_s in result.ttfts_s.items()
        if int(call.split(".")[0]) < len(agents.programs)
    )
    num_bytes = bookkeeping_bytes(simulation.scheduler) if arm == SGL else 0
    return Outcome(percentile(ttfts_s, 0.99), num_bytes)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hostile",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--requests", type=int, default=1000, metavar="N", help="of the agents (default: 1000)")
    add("--seed", type=int, default=0)
    add("--cache-fraction", type=float, default=0.4, help="of the agents' working set")
    add("--load", type=float, default=0.8, help="of the agents alone")
    add(
        "--share",
        type=float,
        default=0.1,
        help="new prompt tokens of the attacks that compute, as a share of the agents'",
    )
    add("--sessions", type=int, default=10_000, metavar="N", help="opened and not continued")
    add("--plugin-config", nargs="+", default=[], metavar="KEY=VALUE", help="as for the server")
    add("--json", type=Path, metavar="FILE", help="write the numbers there too")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    parser = build_parser()
    arguments = parser.parse_args(words)
    try:
        options = Options.from_mapping(words_to_mapping(arguments.plugin_config))
    except OptionError as error:
        parser.error(str(error))
    silence_vllm()
    agents = session_model.trace(arguments.requests, arguments.seed, SCALE)
    reuse = traces.reuse(agents)
    settings = settings_for(agents, arguments.cache_fraction, options)
    cost = CostModel(context_token_s=CONTEXT_TOKEN_S)
    span_s = least_time_s(agents, reuse, cost, settings) / arguments.load
    agents = traces.with_span(agents, span_s, arguments.seed)
    num_tokens = int(arguments.share * reuse.must_compute_tokens)
    attacks = Attacker(arguments.seed, span_s, num_tokens, arguments.sessions).attacks()
    attacks = {"none": [], **attacks}
    outcomes: dict[str, dict[str, Outcome]] = {}
    plans = list(itertools.product(attacks, ARMS))
    for name, arm in tqdm(plans, leave=False, disable=None):
        is_known = arm == STOCK and name == SILENT  # stock does not read what the others tell
        found = outcomes[LYING][arm] if is_known else run(agents, attacks[name], arm, settings)
        outcomes.setdefault(name, {})[arm] = found
    print(f"{'':18}{'calls':>8}{'TTFT p99, s: stock':>20}{'':>8}{'sgl':>8}{'':>8}{'bytes':>12}")
    for name, arms in outcomes.items():
        cells = "".join(
            f"{arms[arm].ttft_p99_s:{width}.3f}"
            f"{arms[arm].ttft_p99_s / outcomes['none'][arm].ttft_p99_s:7.2f}x"
            for arm, width in zip(ARMS, (20, 8), strict=True)
        )
        num_calls = sum(len(program.calls) for program in attacks[name])
        print(f"{name:18}{num_calls:8,}{cells}{arms[SGL].num_bytes:12,}")
    if arguments.json is not None:
        document = {
            name: {arm: dataclasses.asdict(one) for arm, one in arms.items()}
            for name, arms in outcomes.items()
        }
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
