"""vLLM's engine core and its real schedulers over a runner without a model (`late_runners.py`).

The engine core's `step` and `step_with_batch_queue` are vLLM's own, so that with asynchronous
scheduling a step is scheduled before the tokens of the one before are known.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm import SamplingParams
from vllm.v1.engine.core import EngineCore

from benchmarks.engine_settings import HEADS, SGL, STOCK, EngineSettings
from benchmarks.schedulers import engine_request, make_block_hasher, make_scheduler
from tests.engine.late_runners import Drafter, Runner, V2Runner
from tests.engine.machine import check_nothing_is_left

MAX_MODEL_LEN = 256


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    scores: list[float] | None = None
    report: dict[str, Any] | None = None


class LateCore(EngineCore):
    """An engine without a model. `answers` has what was sent for each request so far.

    `stock` makes it vLLM's own, without the plugin. `speculation` is vLLM's name of a method, for
    which `drafter` stands.
    """

    def __init__(
        self,
        plugin: dict[str, Any] | None = None,
        *,
        stock: bool = False,
        runner: type[Runner] = V2Runner,
        async_scheduling: bool = True,
        num_blocks: int = 400,
        block_size: int = 32,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 512,
        sliding_windows: tuple[int, ...] = (),
        attention_chunks: tuple[int, ...] = (),
        num_recurrent_groups: int = 0,
        full_block_scale: int = 1,
        full_attention: str | None = HEADS,
        kv_events: bool = False,
        speculation: str | None = None,
        drafter: Drafter | None = None,
        **scheduler_args: Any,
    ) -> None:
        settings = EngineSettings(
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            async_scheduling=async_scheduling,
            plugin={"self_check": "off", **(plugin or {})},
            sliding_windows=sliding_windows,
            attention_chunks=attention_chunks,
            num_recurrent_groups=num_recurrent_groups,
            full_block_scale=full_block_scale,
            full_attention=full_attention,
            kv_events=kv_events,
            speculation=speculation,
            num_drafts=drafter.num_drafts if drafter is not None else 0,
        )
        arm = STOCK if stock else SGL
        scheduler: Any = make_scheduler(arm, settings, with_tokenizer=True, **scheduler_args)
        scheduler.use_v2_model_runner = runner is V2Runner
        self.scheduler = scheduler
        self.runner = runner(scheduler, num_blocks, drafter)
        self.answers: dict[str, Answer] = {}
        # What the engine core makes of its configuration, as far as its steps read it.
        self.vllm_config = scheduler.vllm_config
        self.model_executor = self.runner
        self.structured_output_manager = scheduler.structured_output_manager
        self.structured_output_manager._use_async_grammar_compilation = False
        self.request_block_hasher = make_block_hasher(scheduler)
        self.mm_receiver_cache = None
        self.batch_queue_size = 2 if async_scheduling else 1
        self.batch_queue: deque[Any] | None = deque(maxlen=2) if async_scheduling else None
        self.step_fn = self.step_with_batch_queue if async_scheduling else self.step
        self.is_mm_encoder_only = self.is_pooling_model = False
        self.check_for_draft_tokens = drafter is not None
        self.async_scheduling = async_scheduling
        self.log_stats = False
        self.aborts_queue: queue.Queue[list[str]] = queue.Queue()
        self._weight_version = None

    def send(
        self,
        name: str,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        resumable: bool = False,
    ) -> None:
        """`resumable`: more input follows, under the same name, and last of all some that is not;
        only this, which is not read, ends the session."""
        params = params.clone()
        params.update_from_generation_config({}, self._eos_token_id)
        if params.structured_outputs is not None:  # as vLLM's frontend does
            params.structured_outputs._backend = "xgrammar"
        request, _ = self.preprocess_add_request(
            engine_request(
                params,
                request_id=name,
                prompt_token_ids=list(prompt),
                cache_salt=cache_salt,
                priority=priority,
                resumable=resumable,
            )
        )
        if resumable:
            self.runner.sessions.add(name)
        self.answers.setdefault(name, Answer())
        self.scheduler.add_request(request)

    @property
    def _eos_token_id(self) -> int:
        return self.structured_output_manager.tokenizer.eos_token_id

    @property
    def is_busy(self) -> bool:
        return bool(self.scheduler.has_requests() or self.batch_queue)

    def advance(self) -> None:
        """One turn of the engine core's loop."""
        results, has_executed = self.step_fn()
        self.post_step(has_executed)
        for result in (results or {}).values():
            for output in result.outputs:
                answer = self.answers[output.request_id]
                assert answer.finish_reason is None or output.request_id in self.runner.sessions
                answer.tokens += output.new_token_ids
                if output.new_prompt_logprobs_tensors is not None:
                    answer.scores = output.new_prompt_logprobs_tensors.logprobs[:, 0].tolist()
                if output.finish_reason is not None:
                    answer.finish_reason = str(output.finish_reason)
                    answer.stop_reason = output.stop_reason
                    answer.report = output.kv_transfer_params

    def finish(self, max_steps: int = 20_000) -> None:
        """Until nothing is left to do, of which nothing may be left."""
        for _ in range(max_steps):
            if not self.is_busy:
                break
            self.advance()
        self.check_nothing_is_left()

    def check_nothing_is_left(self) -> None:
        check_nothing_is_left(self.scheduler)
        assert not self.runner.rows
