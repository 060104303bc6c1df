"""The cost of the waiting queue's order in a step of vLLM's scheduler.

    python -m benchmarks.schedule [--case NAME]

Drives vLLM's real scheduler and the plugin's, without a model, with a constant number of waiting
requests: one that ends is replaced. The two alternate at every step. The table shows the processor
time of `schedule()` and of a request's arrival, in microseconds, medians and means, and the
difference.

    unshared   nothing in common, so both admit the same requests in the same order
    full       nothing in common, and a cache so full that no request can be admitted
    groups     groups of ten share all but 100 tokens: the plugin admits more in a step
    few        one request waits
    programs   as unshared, after thousands of programs, most of which are expected to go on
    agents     as unshared, and half of what waits are agents whose contexts were evicted
"""

from __future__ import annotations

import random
import statistics
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tqdm import tqdm

from benchmarks.arms import ARMS
from benchmarks.command import parser_of, write_json
from benchmarks.engine_settings import EngineSettings
from benchmarks.simulate import silence_vllm

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import ModelRunnerOutput

NUM_WAITING = 1000
NUM_STEPS, NUM_WARM_UP_STEPS = 200, 20
NUM_PROGRAMS = 5000
NUM_AGENTS = 500
VOCABULARY = 128_000
PROMPT_TOKENS = 4000
OUTPUT_TOKENS = 8
GROUP_SIZE = 10
GROUP_SUFFIX = 100
PROGRAM_TOKENS = 64
PROGRAMS_AT_A_TIME = 100
FIGURES = (
    ("step_median_us", "a step: median", ".0f"),
    ("step_mean_us", "mean", ".0f"),
    ("admitted_per_step", "admitted", ".2f"),
    ("arrival_mean_us", "an arrival", ".0f"),
)
"""The columns of the table: what is measured of each arm, a heading, and a format."""


@dataclass(frozen=True)
class Case:
    """What waits, and how much room there is.

    Attributes:
        is_grouped: requests come in groups that share a prefix.
        cache_requests: so many requests fill the cache.
        after_programs: so many programs have been served before. Each has had two requests, the
            second of which continues the first.
        has_agents: these programs have long contexts, and their next requests are among those that
            wait.
    """

    name: str
    is_grouped: bool
    cache_requests: float
    num_waiting: int = NUM_WAITING
    after_programs: int = 0
    has_agents: bool = False


CASES = (
    Case("unshared", is_grouped=False, cache_requests=40),
    Case("full", is_grouped=False, cache_requests=1.5),
    Case("groups", is_grouped=True, cache_requests=40),
    Case("few", is_grouped=False, cache_requests=40, num_waiting=1),
    Case("programs", is_grouped=False, cache_requests=40, after_programs=NUM_PROGRAMS),
    Case("agents", is_grouped=False, cache_requests=40, after_programs=NUM_AGENTS, has_agents=True),
)


class Arm:
    """One scheduler, kept at a number of waiting requests."""

    def __init__(self, name: str, case: Case) -> None:
        from benchmarks.schedulers import make_block_hasher, make_scheduler

        block_size = 16
        settings = EngineSettings(
            num_blocks=int(case.cache_requests * (PROMPT_TOKENS + OUTPUT_TOKENS)) // block_size + 8,
            block_size=block_size,
            max_model_len=2 * PROMPT_TOKENS,
        )
        self.scheduler: Scheduler = make_scheduler(name, settings)
        self._hasher = make_block_hasher(self.scheduler)
        self._case = case
        self._agents: deque[list[int]] = deque()
        self._prompts = self._with_agents(prompts(case))
        self._num_waiting = case.num_waiting
        self._num_sent = 0
        self._in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.step_us: list[float] = []
        self.arrival_us: list[float] = []
        self.num_admitted = 0

    def serve_programs(self) -> None:
        """Two requests of each, some programs at a time."""
        rng = random.Random(1)
        num_tokens = PROMPT_TOKENS if self._case.has_agents else PROGRAM_TOKENS
        for _ in range(self._case.after_programs // PROGRAMS_AT_A_TIME):
            prompts = [
                [rng.randrange(VOCABULARY) for _ in range(num_tokens)]
                for _ in range(PROGRAMS_AT_A_TIME)
            ]
            for num_more in (0, PROGRAM_TOKENS):
                prompts = [[*prompt, *range(num_more)] for prompt in prompts]
                for prompt in prompts:
                    self._send(prompt, is_measured=False)
                while self.scheduler.has_unfinished_requests():
                    self._step(is_measured=False)
            while self._in_flight:
                self.scheduler.update_from_output(*self._in_flight.popleft())
            if self._case.has_agents:
                self._agents += [[*prompt, *range(PROGRAM_TOKENS)] for prompt in prompts]

    def _with_agents(self, prompts: Iterator[list[int]]) -> Iterator[list[int]]:
        """Before each of these prompts, the next one of an agent if there is one."""
        for prompt in prompts:
            if self._agents:
                yield self._agents.popleft()
            yield prompt

    def step(self, is_measured: bool) -> None:
        while len(self.scheduler.waiting) < self._num_waiting:
            self._send(next(self._prompts), is_measured)
        self._step(is_measured)

    def _step(self, is_measured: bool) -> None:
        scheduler = self.scheduler
        started = time.thread_time_ns()
        scheduled = scheduler.schedule()
        if is_measured:
            self.step_us.append((time.thread_time_ns() - started) / 1e3)
            self.num_admitted += len(scheduled.scheduled_new_reqs)
        self._in_flight.append((scheduled, self._sample(scheduled)))
        if len(self._in_flight) > 1:  # a step late, as asynchronous scheduling has it
            scheduler.update_from_output(*self._in_flight.popleft())

    def _send(self, prompt: list[int], is_measured: bool) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        from benchmarks.schedulers import engine_request

        self._num_sent += 1
        sent = engine_request(
            SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True),
            request_id=str(self._num_sent),
            prompt_token_ids=prompt,
            arrival_time=time.time(),
        )
        request = Request.from_engine_core_request(sent, self._hasher)
        started = time.thread_time_ns()
        self.scheduler.add_request(request)
        if is_measured:
            self.arrival_us.append((time.thread_time_ns() - started) / 1e3)

    def _sample(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        from benchmarks.schedulers import runner_output

        request_ids = list(scheduled.num_scheduled_tokens)
        requests = [self.scheduler.requests[request_id] for request_id in request_ids]
        return runner_output(request_ids, [[] if r.is_prefill_chunk else [1] for r in requests])

    def cost(self) -> dict[str, float]:
        """Medians and means of microseconds of processor time, and how many requests a step admits
        in the mean."""
        return {
            "step_median_us": statistics.median(self.step_us),
            "step_mean_us": statistics.mean(self.step_us),
            "arrival_mean_us": statistics.mean(self.arrival_us) if self.arrival_us else 0.0,
            "admitted_per_step": self.num_admitted / len(self.step_us),
        }


def prompts(case: Case) -> Iterator[list[int]]:
    """The same ones for both arms. Of groups, the members come in turn, as in a mix of clients."""
    rng = random.Random(0)

    def text(num: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(num)]

    while True:
        if not case.is_grouped:
            yield text(PROMPT_TOKENS)
            continue
        prefixes = [text(PROMPT_TOKENS - GROUP_SUFFIX) for _ in range(100)]
        for _ in range(GROUP_SIZE):
            for prefix in prefixes:
                yield prefix + text(GROUP_SUFFIX)


def measure(case: Case) -> dict[str, dict[str, float]]:
    """Both arms in alternating steps, the first of which warm up."""
    from vllm.utils.gc_utils import freeze_gc_heap

    arms = {name: Arm(name, case) for name in ARMS}
    if case.after_programs:
        for arm in arms.values():
            arm.serve_programs()
    bar = tqdm(range(NUM_WARM_UP_STEPS + NUM_STEPS), desc=case.name, leave=False, disable=None)
    for number in bar:
        if number == NUM_WARM_UP_STEPS:
            freeze_gc_heap()  # as the engine does once it has started
        for arm in arms.values():
            arm.step(is_measured=number >= NUM_WARM_UP_STEPS)
    return {name: arm.cost() for name, arm in arms.items()}


def main() -> None:
    parser = parser_of("schedule", __doc__)
    parser.add_argument("--case", choices=[case.name for case in CASES], help="only this one")
    arguments = parser.parse_args()
    silence_vllm()
    print(
        f"{NUM_WAITING} waiting requests of {PROMPT_TOKENS} tokens, "
        f"microseconds of processor time\n{'':10}"
        + "".join(f"{heading:>20}{'difference':>12}" for _, heading, _ in FIGURES)
    )
    document = {}
    for case in CASES:
        if arguments.case not in (None, case.name):
            continue
        costs = measure(case)
        line = f"{case.name:10}"
        for name, _, form in FIGURES:
            stock, sgl = (costs[arm][name] for arm in ARMS)
            line += f"{stock:10{form}}{sgl:10{form}}{sgl - stock:12{form}}"
        print(line, flush=True)
        document[case.name] = costs
    write_json(arguments.json, document)


if __name__ == "__main__":
    main()
