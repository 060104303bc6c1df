"""vLLM's schedulers with the plugin's parts in them: narrow overrides only.

Owns: when each part gets its turn in a step, and which parts this engine can have. The parts
themselves are elsewhere: `radix/manager.py`, `policy.py`, `jump.py`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any
from weakref import WeakKeyDictionary

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

from sgl_vllm.config import CONFIG_KEY, Options
from sgl_vllm.fsm.schema import SchemaSemantics
from sgl_vllm.fsm.vllm.backend import SglBackend
from sgl_vllm.fsm.vllm.executor import GrammarExecutor
from sgl_vllm.fsm.vllm.resources import bytes_of_tokens
from sgl_vllm.jump.jump import JumpForward
from sgl_vllm.jump.report import ForcedReports
from sgl_vllm.protocol.request_keys import SCORE_FROM
from sgl_vllm.radix import manager as radix_manager
from sgl_vllm.radix.manager import RadixKVCacheManager
from sgl_vllm.scheduler.control import EngineControl
from sgl_vllm.scheduler.fairness import DeficitCounters
from sgl_vllm.scheduler.policy import Bound, WaitingQueue
from sgl_vllm.scheduler.preemption import CheapestVictim
from sgl_vllm.scheduler.queue import CacheAwareQueue
from sgl_vllm.scheduler.stats import (
    ON,
    BitmaskCounters,
    SelectCounters,
    StepCounters,
)
from sgl_vllm.scheduler.traces import RequestTraces
from sgl_vllm.tiers.connector import Tiers
from sgl_vllm.tiers.load_rule import LoadRule
from sgl_vllm.version import __version__
from sgl_vllm.vllm_api.probe import PARTS, missing_hooks

logger = init_logger("vllm.sgl_vllm")


BY_OPTION = "by option"
"""Why a part is off that the user has switched off. All other reasons are worth a warning."""


class SglSchedulerMixin(Scheduler):
    """The parts, over whichever scheduler vLLM's resolved configuration asks for."""

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(vllm_config, kv_cache_config, *args, **kwargs)
        additional = vllm_config.additional_config or {}
        options = self._options = Options.from_mapping(additional.get(CONFIG_KEY, {}))
        self._off: dict[str, str] = {}
        for part in PARTS:
            if (reason := self._why_off(part, options, kv_cache_config)) is not None:
                self._off[part] = reason
        self._radix: RadixKVCacheManager | None = None
        if "radix" not in self._off:
            self._radix = RadixKVCacheManager.adopt(
                self.kv_cache_manager,
                policy=options.radix_policy,
                ttl_s=options.radix_ttl_s,
                pin_share=options.radix_pin_share,
                has_connector=self.connector is not None,
            )
        self._traces: RequestTraces | None = None
        if vllm_config.observability_config.otlp_traces_endpoint is not None:
            self._traces = RequestTraces(self.block_size)
        self._tiers: Tiers | None = None
        if self._radix is not None and self.connector is not None:
            rule = LoadRule(
                min_tokens=options.tier_min_tokens, measured=options.tier_rule == "measured"
            )
            self._tiers = Tiers(self.connector, self._radix, rule)
        self._queue: CacheAwareQueue | None = None
        if "schedule" not in self._off:
            bound = Bound(
                max_passes=options.schedule_max_overtakes,
                max_delay=options.schedule_max_delay,
                max_wait_s=options.schedule_max_wait_s or float("inf"),
            )
            quantum = options.schedule_fair_quantum
            self.waiting = self._queue = CacheAwareQueue(
                self,
                WaitingQueue(options.schedule_policy, bound, options.schedule_window),
                self._radix,
                DeficitCounters(quantum) if quantum else None,
                self._traces,
            )
            if self._radix is not None:
                self._radix.pool.wanted = self._queue.wanted
        self._victim: CheapestVictim | None = None
        if options.schedule_cheapest_victim:
            if reason := self._why_no_victim():
                logger.warning("sgl-vllm: schedule_cheapest_victim has no effect: %s", reason)
            else:
                assert self._radix is not None
                self._victim = CheapestVictim(self, self._radix)
        self._grammars: SglBackend | None = None
        if "fsm" not in self._off or (
            "jump_forward" not in self._off and options.jump_mode == "canonical"
        ):
            self._grammars = self._take_over_grammars(options)
        self._jump: JumpForward | None = None
        self._reports = ForcedReports(self._token_bytes)
        self._bytes_of_tokens: Sequence[bytes] | None = None
        if "jump_forward" not in self._off:
            self._jump = JumpForward(self, options.jump_mode, self._reports, self._traces)
        self._score_from: WeakKeyDictionary[Request, int] = WeakKeyDictionary()
        self._select_counters = SelectCounters()
        self._prompts_done: list[Request] = []
        if self._radix is not None:
            self._radix.score_from = self._score_from.get
        self._steps = StepCounters()
        self._bitmasks = BitmaskCounters()
        self.sgl_vllm = EngineControl(self)
        as_wanted = all(reason == BY_OPTION for reason in self._off.values())
        (logger.info if as_wanted else logger.warning)(
            "sgl-vllm %s: %s",
            __version__,
            "; ".join(f"{p} off ({self._off[p]})" if p in self._off else f"{p} on" for p in PARTS),
        )

    def _why_off(self, part: str, options: Options, kv_cache_config: KVCacheConfig) -> str | None:
        """Why a part is off in this engine; None if it is on."""
        if not getattr(options, part):
            return BY_OPTION
        if missing := missing_hooks(part):
            return f"this vLLM lacks {', '.join(missing)}"
        if part == "radix":
            if reason := radix_manager.unsupported_reason(self.vllm_config, kv_cache_config):
                return reason
            missing = radix_manager.missing_attributes(self.kv_cache_manager)
            return f"this vLLM lacks {', '.join(missing)}" if missing else None
        if part == "schedule":
            if not self.cache_config.enable_prefix_caching:
                return "prefix caching is off"
            if unknown := CacheAwareQueue.__abstractmethods__:
                return f"this vLLM wants its queue to have {', '.join(sorted(unknown))}"
            if not hasattr(self, "max_num_active_reqs"):
                return "this vLLM lacks Scheduler.max_num_active_reqs"
            return None
        if part == "fsm":
            stock = self.vllm_config.structured_outputs_config.backend
            if stock == "guidance" and options.schema_reading == "stock":
                return "guidance is asked for (schema_reading=spec reads schemas as it does)"
            return self._why_no_grammars()
        if not options.unverified:
            if self.use_v2_model_runner:
                return "not verified on a GPU with vLLM's V2 model runner (unverified=true)"
            if isinstance(self, AsyncScheduler):
                return "not verified on a GPU with asynchronous scheduling (unverified=true)"
        if part == "select":
            return "it needs radix" if "radix" in self._off else None
        if options.jump_mode == "canonical" and (reason := self._why_no_grammars()):
            return reason
        if self.vllm_config.speculative_config is not None:
            return "speculative decoding is configured"
        if self.vllm_config.model_config.logits_processors or entry_points(
            group="vllm.logits_processors"
        ):
            return "custom logits processors may look at the output, part of which it hides"
        if getattr(self, "return_sampling_mask", False):
            return "sampling masks are returned for every token"
        if not hasattr(self, "kv_holding_waiting"):
            return "this vLLM lacks Scheduler.kv_holding_waiting"
        if self.connector is not None:
            return "a KV connector would see a jumped request as new"
        if self.use_pp:
            return "pipeline parallelism keeps several steps in flight"
        return None

    def _why_no_grammars(self) -> str | None:
        backend = self.vllm_config.structured_outputs_config.backend
        if backend not in ("auto", "xgrammar", "guidance"):
            return f"the structured-output backend is {backend!r}"
        if self.vllm_config.model_config.skip_tokenizer_init:
            return "there is no tokenizer"
        return None

    def _take_over_grammars(self, options: Options) -> SglBackend:
        """Put our backend where vLLM would make its own with the first structured request."""
        manager = self.structured_output_manager
        stock = self.vllm_config.structured_outputs_config.backend
        by_spec = options.schema_reading == "spec" or stock == "guidance"
        manager.backend = backend = SglBackend(
            self.vllm_config,
            tokenizer=manager.tokenizer,
            vocab_size=self.vllm_config.model_config.get_vocab_size(),
            semantics=SchemaSemantics.SPEC if by_spec else SchemaSemantics.STRICT,
            use_automata="fsm" not in self._off,
            stock="guidance" if stock == "guidance" else "xgrammar",
        )
        manager.executor = GrammarExecutor(manager.executor, backend)
        return backend

    def _token_bytes(self) -> Sequence[bytes]:
        """The text of each token. Our grammars know it; where all are stock's (`jump_mode=exact`
        without fsm) the first report has the tokenizer read for it."""
        if self._grammars is not None:
            return self._grammars.resources.token_bytes
        if self._bytes_of_tokens is None:
            tokenizer = self.structured_output_manager.tokenizer
            vocab_size = self.vllm_config.model_config.get_vocab_size()
            xgrammar = XgrammarBackend(self.vllm_config, tokenizer=tokenizer, vocab_size=vocab_size)
            self._bytes_of_tokens, _ = bytes_of_tokens(xgrammar)
        return self._bytes_of_tokens

    def _why_no_victim(self) -> str | None:
        if self._queue is None:
            return f"schedule is off ({self._off['schedule']})"
        if self._radix is None:
            return f"radix is off ({self._off['radix']})"
        if self.policy != SchedulingPolicy.FCFS:
            return f"the scheduling policy {self.policy.value!r} says who is preempted"
        if self.connector is not None:
            return "a KV connector is in use"
        if self.use_pp:
            return "pipeline parallelism keeps several steps in flight"
        return None

    # -- a step -------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        if "select" not in self._off:
            self._read_score_from(request)
        if self._jump is not None:
            self._reports.expect(request)
        if self._traces is not None:
            self._traces.begin(request)
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        if self._radix is not None:
            for request in self._prompts_done:
                self._radix.index_prompt(request)
        if self._queue is not None:
            self._queue.step_starts()
        if self._victim is not None:
            self._victim.step_starts()
        output = super().schedule(*args, **kwargs)
        if self._tiers is not None:
            self._tiers.pass_begins(output)
        self._prompts_done = self._prompts_done_by(output)
        if self._queue is not None:
            self._queue.step_ends(output)
        if self._jump is not None:
            self._jump.rewrite_resumed(output)
            self._jump.release_one_if_stuck(output)
        self._steps.forward_passes += bool(output.num_scheduled_tokens)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        num_scored_tokens = {
            request.request_id: request.num_prompt_tokens - first_scored
            for request, first_scored in self._score_from.items()
        }
        if self._tiers is not None:
            self._tiers.pass_ends(scheduler_output)
        if self._jump is not None:
            self._jump.before_update(model_runner_output)
        results = super().update_from_output(scheduler_output, model_runner_output)
        outputs = [output for result in results.values() for output in result.outputs]
        for output in outputs if num_scored_tokens else ():
            tensors = output.new_prompt_logprobs_tensors
            num_scored = num_scored_tokens.get(output.request_id)
            if tensors is not None and num_scored is not None:
                output.new_prompt_logprobs_tensors = _last_rows(tensors, num_scored)
                self._select_counters.scored_requests += 1
        if self._jump is not None:
            self._jump.after_step(outputs)
            self._reports.attach(outputs, self.requests)
        if self._traces is not None:
            self._traces.attach(outputs, self.requests)
        return results

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        started = time.monotonic()
        masks: GrammarOutput | None = super().get_grammar_bitmask(scheduler_output)
        if masks is not None:
            self._bitmasks.masked_steps += 1
            self._bitmasks.mask_s += time.monotonic() - started
        return masks

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        waited_for_grammar = request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        is_ready: bool = super()._handle_blocked_waiting_request(request)
        can_cap_hit = self._radix is not None or hasattr(Scheduler, "_get_local_prefix_cache_hit")
        if is_ready and waited_for_grammar and self._jump is not None and can_cap_hit:
            self._jump.open(request)
        return is_ready

    def _get_local_prefix_cache_hit(self, request: Request, *limit: int | None) -> tuple[Any, ...]:
        """What the cache has of a request. At its first admission vLLM counts that as prompt, so of
        the forced text that an opened request has after its prompt nothing may be found. The tree's
        look-up knows; vLLM's own is asked with one token after the prompt, the one to compute."""
        if (
            self._radix is not None
            or request.num_output_tokens <= 1
            or getattr(request, "prefill_stats", None) is None
            or request.num_preemptions
        ):
            hit: tuple[Any, ...] = super()._get_local_prefix_cache_hit(request, *limit)
            return hit
        all_token_ids = request._all_token_ids
        request._all_token_ids = all_token_ids[: request.num_prompt_tokens + 1]
        try:
            hit = super()._get_local_prefix_cache_hit(request, *limit)
            return hit
        finally:
            request._all_token_ids = all_token_ids

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, *args: Any, **kw: Any
    ) -> bool:
        if reset_running_requests and self._jump is not None:
            self._jump.release_all()
        return super().reset_prefix_cache(reset_running_requests, *args, **kw)

    # -- inside -------------------------------------------------------------------------------

    def _prompts_done_by(self, scheduler_output: SchedulerOutput) -> list[Request]:
        """The requests whose whole prompt is computed with this step: the next may share it, also
        while this one is in flight, because its copies come after this one's forward pass."""
        if self._radix is None:
            return []
        return [
            request
            for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items()
            if (request := self.requests.get(request_id)) is not None
            and request.num_computed_tokens - num_tokens
            < request.num_prompt_tokens
            <= request.num_computed_tokens
        ]

    def _read_score_from(self, request: Request) -> None:
        params = request.sampling_params
        value = params.extra_args.get(SCORE_FROM) if params and params.extra_args else None
        if value is None:
            return
        assert params is not None
        valid = (
            isinstance(value, int)
            and not isinstance(value, bool)
            and 1 <= value <= request.num_prompt_tokens
            and params.prompt_logprobs is not None
        )
        if not valid:
            logger.warning(
                "%s=%r of request %s is not used: it takes an index from 1 to the prompt's length "
                "(%d), in a request with prompt_logprobs. The whole prompt is computed instead",
                SCORE_FROM,
                value,
                request.request_id,
                request.num_prompt_tokens,
            )
            return
        request.skip_reading_prefix_cache = False
        self._score_from[request] = value

    def part_states(self) -> dict[str, str]:
        """For each part "on", or why it is off."""
        failed = "switched off by errors: see the log"
        parts = {part: self._off.get(part, ON) for part in PARTS}
        if self._radix is not None and self._radix.tree is None:
            parts["radix"] = failed
        if self._queue is not None and self._queue.failed:
            parts["schedule"] = failed
        if self._grammars is not None and self._grammars.failed:
            parts["fsm"] = failed
        if self._jump is not None and self._jump.failed:
            parts["jump_forward"] = failed
        return parts


class SglScheduler(SglSchedulerMixin):
    """Over vLLM's synchronous scheduler."""


class SglAsyncScheduler(SglSchedulerMixin, AsyncScheduler):
    """Over vLLM's asynchronous scheduler, the default on GPUs."""


def _last_rows(tensors: Any, count: int) -> Any:
    """The last so many rows of prompt log-probabilities, of which there is one for each token but
    the first. How many of those before were computed depends on the cache; the V1 runner has
    uninitialized memory in place of the others, and the V2 runner nothing."""
    first = len(tensors.logprobs) - count
    return tensors._replace(
        logprob_token_ids=tensors.logprob_token_ids[first:],
        logprobs=tensors.logprobs[first:],
        selected_token_ranks=tensors.selected_token_ranks[first:],
    )
