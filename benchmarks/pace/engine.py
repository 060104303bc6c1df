"""vLLM's engine core over a real scheduler and a runner without a model, with its times.

The loop is vLLM's own (`step_with_batch_queue`): a step is scheduled while the one before is in
flight. Owns the measurement of a step's parts, and the programs that are under way.
"""

from __future__ import annotations

import itertools
import os
import queue
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any  # Any: what vLLM's loop asks of an engine
from unittest import mock

from vllm.config import StructuredOutputsConfig
from vllm.v1.engine.core import EngineCore

from benchmarks.engine_settings import SGL, EngineSettings
from benchmarks.pace.devices import GRAPHS, IO_S, Clock, Device
from benchmarks.pace.runner import PaceError, Runner, Text
from benchmarks.pace.workloads import Program, Vocabulary
from benchmarks.schedulers import engine_request, make_block_hasher, make_scheduler
from sgl_vllm.step_hooks import StepHooks

_BLOCK_SIZE = 16
_TOKENS_PER_REQUEST = 1600

STEP = {"schedule": "schedule", "bitmask": "get_grammar_bitmask", "update": "update_from_output"}
"""The parts of a step, and the scheduler's methods that are timed for them."""

ARRIVAL = "arrival"
"""Of requests: vLLM makes a request, and hashes its blocks, before the scheduler gets it."""

JUMP = "jump"
"""Part of the others."""

_JUMP_HOOKS = (
    StepHooks.before_schedule,
    StepHooks.while_scheduling,
    StepHooks.after_schedule,
    StepHooks.narrow,
    StepHooks.before_update,
    StepHooks.after_update,
)
"""Those that are called once a step: the time of shorter ones would be that of measuring it."""


@dataclass
class Tally:
    """What an engine has done since its tally was last taken.

    Attributes:
        counts: `programs` and `output_tokens`, what the runner counts, and the plugin's counters of
            jumps.
        cpu_s: processor time of this thread, by part.
    """

    counts: Counter[str]
    cpu_s: dict[str, float]

    @property
    def num_passes(self) -> int:
        return sum(self.counts[graph] for graph in GRAPHS)

    @property
    def steps_cpu_s(self) -> float:
        """Without arrivals."""
        return sum(self.cpu_s[part] for part in STEP)


@dataclass
class _Session:
    """A program under way: the turn that runs, and all tokens up to its end."""

    number: int
    program: Program
    tokens: list[int] = field(default_factory=list)
    num_prompt: int = 0
    turn: int = 0


class PaceEngine(EngineCore):
    """An engine that keeps a number of programs under way, and sends their turns."""

    def __init__(
        self,
        arm: str,
        batch: int,
        vocabulary: Vocabulary,
        programs: Callable[[int], Program],
        *,
        plugin: dict[str, Any],
        longest_query: int,
        writes_noise: bool = False,
    ) -> None:
        """`programs` makes the program of a number. `plugin` has options of the plugin. With noise,
        programs write no texts."""
        settings = EngineSettings(
            num_blocks=batch * _TOKENS_PER_REQUEST // _BLOCK_SIZE + 1000,
            block_size=_BLOCK_SIZE,
            max_model_len=4096,
            max_num_seqs=batch,
            plugin={"self_check": "off", **plugin},
        )
        with (  # the scheduler of an engine with the V2 runner, which needs Triton only to run
            mock.patch.dict(os.environ, VLLM_USE_V2_MODEL_RUNNER="1"),
            mock.patch("vllm.config.vllm.HAS_TRITON", True),
        ):
            scheduler: Any = make_scheduler(
                arm,
                settings,
                with_tokenizer=True,
                tokenizer=vocabulary.folder,
                vocab_size=vocabulary.size,
                structured_outputs_config=StructuredOutputsConfig(
                    backend="xgrammar", disable_any_whitespace=True
                ),
            )
        self.clock = Clock()
        self._counts: Counter[str] = Counter()
        self._cpu_s = dict.fromkeys((*STEP, JUMP), 0.0)
        self._texts: dict[str, Text] = {}
        self.runner = Runner(
            vocabulary, self.clock, self._texts, self._counts, longest_query=longest_query
        )
        self._vocabulary, self._batch, self._programs = vocabulary, batch, programs
        self._writes_noise = writes_noise
        self._numbers: Iterator[int] = itertools.count()
        self._sessions: dict[str, _Session] = {}
        for part, method in STEP.items():
            self._time(scheduler, method, part, self.clock)
        self._time(scheduler, "add_request", ARRIVAL, self.clock)
        self._time(self, "preprocess_add_request", ARRIVAL)  # by another thread of vLLM's
        self._jump = scheduler.parts.jump if arm == SGL else None
        for hook in _JUMP_HOOKS if self._jump is not None else ():
            self._time(self._jump, hook.__name__, JUMP)
        # What vLLM's loop reads of an engine core.
        self.scheduler: Any = scheduler
        self.vllm_config = scheduler.vllm_config
        self.model_executor: Any = self.runner
        self.structured_output_manager = scheduler.structured_output_manager
        self.structured_output_manager._use_async_grammar_compilation = False
        self.request_block_hasher = make_block_hasher(scheduler)
        self.mm_receiver_cache = None
        self.batch_queue_size = 2
        self.batch_queue: deque[Any] = deque(maxlen=2)
        self.is_mm_encoder_only = self.is_pooling_model = self.log_stats = False
        self.check_for_draft_tokens, self.async_scheduling = False, True
        self.aborts_queue: queue.Queue[list[str]] = queue.Queue()
        self._weight_version = None

    # -- what is measured -------------------------------------------------------------------------

    def run_on(self, device: Device) -> None:
        """From now on the clock counts what passes take on this device."""
        self.runner.device = device
        self.clock.reset()

    def take_tally(self) -> Tally:
        """All since the last one."""
        if self._jump is not None:
            self._counts.update(asdict(self._jump.counters))
        tally = Tally(self._counts.copy(), self._cpu_s.copy())
        self._counts.clear()
        if self._jump is not None:
            self._counts.subtract(asdict(self._jump.counters))
        self._cpu_s.update(dict.fromkeys(self._cpu_s, 0.0))
        return tally

    def _time(self, owner: Any, method: str, part: str, clock: Clock | None = None) -> None:
        """Adds the time of the method to its part, and to the clock."""
        original = getattr(owner, method)
        self._cpu_s[part] = 0.0

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.thread_time()
            try:
                return original(*args, **kwargs)
            finally:
                took_s = time.thread_time() - started
                self._cpu_s[part] += took_s
                if clock is not None:
                    clock.now_s += took_s

        setattr(owner, method, timed)

    # -- what runs --------------------------------------------------------------------------------

    def run_passes(self, number: int) -> None:
        """So many turns of the loop, with all programs under way."""
        for _ in range(number):
            self._advance(self._numbers)

    def run_programs(self, number: int, *, first: int | None = None) -> None:
        """Until so many programs have ended, others being under way; or only these, if the number
        of the `first` is given."""
        end = self._counts["programs"] + number
        numbers = self._numbers if first is None else iter(range(first, first + number))
        while self._counts["programs"] < end or (first is not None and self._is_busy):
            self._advance(numbers)

    @property
    def _is_busy(self) -> bool:
        return bool(self.scheduler.has_requests() or self.batch_queue)

    def _advance(self, numbers: Iterator[int]) -> None:
        """A turn of the loop; programs of these numbers begin before, while there is room."""
        for number in itertools.islice(numbers, self._batch - len(self._sessions)):
            self._send(_Session(number, self._programs(number)))
        self.clock.now_s += IO_S
        results, has_executed = self.step_with_batch_queue()
        self.post_step(has_executed)
        for output in (one for result in (results or {}).values() for one in result.outputs):
            session = self._sessions[output.request_id]
            session.tokens += output.new_token_ids
            self._counts["output_tokens"] += len(output.new_token_ids)
            if output.finish_reason is not None:
                del self._sessions[output.request_id]
                self._check(output.request_id, str(output.finish_reason), session)
                session.turn += 1
                if session.turn < len(session.program):
                    self._send(session)
                else:
                    self._counts["programs"] += 1

    def _send(self, session: _Session) -> None:
        turn = session.program[session.turn]
        session.tokens += turn.tokens
        session.num_prompt = len(session.tokens)
        request_id = f"{session.number}.{session.turn}"
        self._sessions[request_id] = session
        if turn.text is not None and not self._writes_noise:
            self._texts[request_id] = Text(turn.text, self._vocabulary)
        params = turn.params.clone()
        params.update_from_generation_config({}, self._vocabulary.tokenizer.eos_token_id)
        if params.structured_outputs is not None:  # as vLLM's frontend does
            params.structured_outputs._backend = "xgrammar"
        request, _ = self.preprocess_add_request(
            engine_request(
                params,
                request_id=request_id,
                prompt_token_ids=[*session.tokens],
                arrival_time=time.time(),
            )
        )
        self.scheduler.add_request(request)

    def _check(self, request_id: str, finish_reason: str, session: _Session) -> None:
        """That a request that has ended has written its text, or begun it."""
        if finish_reason == "error":
            raise PaceError(f"{request_id} ended with an error")
        if (text := self._texts.pop(request_id, None)) is None:
            return
        output = session.tokens[session.num_prompt :]
        written = b"".join(self._vocabulary.token_bytes[token] for token in output)
        if not text.data.startswith(written) or (finish_reason == "stop" and written != text.data):
            raise PaceError(f"{request_id}: {written!r} was written instead of {text.data!r}")
