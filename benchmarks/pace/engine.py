"""vLLM's engine core over a real scheduler and a runner without a model, with its times.

The loop is vLLM's own (`step_with_batch_queue`): a step is scheduled while the one before is in
flight. Owns the measurement of a step's parts, and the programs that are under way.
"""

from __future__ import annotations

import os
import queue
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any  # Any: what vLLM's loop asks of an engine
from unittest import mock

from vllm.config import StructuredOutputsConfig
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore

from benchmarks.engine_settings import SGL, EngineSettings
from benchmarks.pace.devices import IO_S, Clock, Device
from benchmarks.pace.runner import Counts, PaceError, Runner, Text
from benchmarks.pace.vocabulary import Vocabulary
from benchmarks.pace.workloads import Program
from benchmarks.schedulers import make_block_hasher, make_scheduler
from sgl_vllm.step_hooks import StepHooks

MAX_MODEL_LEN = 4096
_BLOCK_SIZE = 16
_TOKENS_PER_REQUEST = 1600
_PARTS = {
    "schedule": "schedule",
    "get_grammar_bitmask": "bitmask",
    "update_from_output": "update",
    "add_request": "arrival",
}
"""Timed methods of a scheduler, and the names of the parts."""

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
        cpu_s: processor time of this thread, by part; `JUMP` is part of others, and `arrival` is no
            part of a step.
        jumps: the plugin's counters of jumps.
    """

    counts: Counts
    num_programs: int
    output_tokens: int
    cpu_s: dict[str, float] = field(default_factory=dict)
    jumps: dict[str, int] = field(default_factory=dict)

    @property
    def num_passes(self) -> int:
        return sum(self.counts.passes.values())

    @property
    def steps_cpu_s(self) -> float:
        return sum(s for part, s in self.cpu_s.items() if part not in (JUMP, "arrival"))


@dataclass
class _Session:
    """A program under way: the turn that runs, and all tokens up to its end."""

    program: Program
    tokens: list[int]
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
        plugin: dict[str, Any] | None = None,
        writes_text: bool = True,
        longest_query: int = 1,
    ) -> None:
        """`programs` makes the program of a number. `plugin` has options of the plugin.

        Raises PaceError if a part of the plugin is off that should be on.
        """
        settings = EngineSettings(
            num_blocks=batch * _TOKENS_PER_REQUEST // _BLOCK_SIZE + 1000,
            block_size=_BLOCK_SIZE,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=batch,
            plugin={"self_check": "off", **(plugin or {})},
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
        self._texts: dict[str, Text] = {}
        self.runner = Runner(vocabulary, self.clock, self._texts, longest_query=longest_query)
        self._vocabulary, self._batch, self._writes_text = vocabulary, batch, writes_text
        self._programs, self._num_begun = programs, 0
        self._sessions: dict[int, _Session] = {}
        self._num_done = self._num_output = 0
        self._cpu_s: dict[str, float] = {}
        self._jump = scheduler.parts.jump if arm == SGL else None
        self._jumps_before: dict[str, int] = {}
        for method, part in _PARTS.items():
            self._time(scheduler, method, part, moves_clock=True)
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
        tally = Tally(self.runner.counts, self._num_done, self._num_output, self._cpu_s)
        if self._jump is not None:
            now = asdict(self._jump.counters)
            tally.jumps = {name: n - self._jumps_before.get(name, 0) for name, n in now.items()}
            self._jumps_before = now
        self.runner.counts, self._cpu_s = Counts(), {}
        self._num_done = self._num_output = 0
        return tally

    def _time(self, owner: Any, method: str, part: str, *, moves_clock: bool = False) -> None:
        original = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.thread_time()
            try:
                return original(*args, **kwargs)
            finally:
                took_s = time.thread_time() - started
                self._cpu_s[part] = self._cpu_s.get(part, 0.0) + took_s
                if moves_clock:
                    self.clock.now_s += took_s

        setattr(owner, method, timed)

    # -- what runs --------------------------------------------------------------------------------

    def run_passes(self, number: int) -> None:
        """So many turns of the loop, with all programs under way."""
        for _ in range(number):
            self._fill(None)
            self._advance()

    def run_programs(self, number: int, *, to_the_end: bool = False) -> None:
        """Until so many programs have ended; others are under way then, unless `to_the_end`: then
        no more than these begin."""
        last = self._num_begun + number if to_the_end else None
        end = self._num_done + number
        while self._num_done < end or (to_the_end and self._is_busy):
            self._fill(last)
            self._advance()

    @property
    def _is_busy(self) -> bool:
        return bool(self.scheduler.has_requests() or self.batch_queue)

    def _fill(self, last: int | None) -> None:
        while len(self._sessions) < self._batch and self._num_begun != last:
            number, self._num_begun = self._num_begun, self._num_begun + 1
            program = self._programs(number)
            self._sessions[number] = _Session(program, [])
            self._send(number)

    def _send(self, number: int) -> None:
        session = self._sessions[number]
        turn = session.program[session.turn]
        session.tokens += turn.tokens
        session.num_prompt = len(session.tokens)
        request_id = f"{number}.{session.turn}"
        if turn.text is not None and self._writes_text:
            self._texts[request_id] = Text(turn.text, self._vocabulary)
        params = turn.params.clone()
        params.update_from_generation_config({}, self._vocabulary.tokenizer.eos_token_id)
        if params.structured_outputs is not None:  # as vLLM's frontend does
            params.structured_outputs._backend = "xgrammar"
        request, _ = self.preprocess_add_request(
            EngineCoreRequest(
                request_id=request_id,
                prompt_token_ids=[*session.tokens],
                mm_features=None,
                sampling_params=params,
                pooling_params=None,
                arrival_time=time.time(),
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
            )
        )
        self.scheduler.add_request(request)

    def _advance(self) -> None:
        self.clock.now_s += IO_S
        results, has_executed = self.step_with_batch_queue()
        self.post_step(has_executed)
        for result in (results or {}).values():
            for output in result.outputs:
                number = int(output.request_id.partition(".")[0])
                session = self._sessions[number]
                session.tokens += output.new_token_ids
                self._num_output += len(output.new_token_ids)
                if output.finish_reason is None:
                    continue
                self._check(output.request_id, str(output.finish_reason), session)
                session.turn += 1
                if session.turn < len(session.program):
                    self._send(number)
                else:
                    del self._sessions[number]
                    self._num_done += 1

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


def check_parts(engine: PaceEngine) -> Iterator[str]:
    """What is off of the plugin, and why, without what an option switches off."""
    for part, state in engine.scheduler.parts.states().items():
        if state not in ("on", "by option"):
            yield f"{part}: {state}"
