"""An engine under test: runs requests, counts what was computed, checks what is left."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.outputs import RequestOutput
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.request import Request

from sgl_vllm.demo import MODEL_PATH
from tests.engine.machine import check_nothing_is_left

MODEL = os.environ.get("SGL_VLLM_TEST_MODEL", str(MODEL_PATH))

KV_CACHE_BYTES = 128 << 20
"""vLLM fills the cache with zeros at each start. For a GiB, that takes as long as all else."""


def words(count: int, seed: int = 0) -> list[int]:
    """A prompt of so many random tokens."""
    rng = random.Random(seed)
    return [rng.randrange(10, 2000) for _ in range(count)]


def greedy(max_tokens: int = 1, **more: Any) -> SamplingParams:
    """So many of the likeliest tokens."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **more)


def in_format(max_tokens: int, form: dict[str, Any], **more: Any) -> SamplingParams:
    """So many of the likeliest tokens at most, in a format such as `{"regex": "a+"}`."""
    held = StructuredOutputsParams(**form)
    return SamplingParams(temperature=0, max_tokens=max_tokens, structured_outputs=held, **more)


@dataclass(frozen=True)
class Ask:
    """One request: prompt token ids and how to continue them."""

    prompt: list[int]
    params: SamplingParams
    cache_salt: str | None = None

    @property
    def as_prompt(self) -> dict[str, Any]:
        salt = {"cache_salt": self.cache_salt} if self.cache_salt else {}
        return {"prompt_token_ids": self.prompt, **salt}


def random_asks(num_asks: int, groups: list[list[int]], seed: int) -> list[Ask]:
    """Each begins as one of `groups`; some are equal."""
    rng = random.Random(seed)
    return [
        Ask(
            rng.choice(groups) + words(rng.randrange(1, 60), seed=1000 + number % 12),
            greedy(rng.randrange(1, 40)),
        )
        for number in range(num_asks)
    ]


def tokens_of(result: RequestOutput) -> list[int]:
    return list(result.outputs[0].token_ids)


class Engine:
    """`forward_passes` and `computed_tokens` count since the start or the last `reset_counts`."""

    def __init__(self, plugin: dict[str, Any] | None, **engine_args: Any) -> None:
        arguments: dict[str, Any] = {
            "model": MODEL,
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 1024,
            "max_num_seqs": 16,
            "block_size": 32,
            "disable_log_stats": False,
            "kv_cache_memory_bytes": KV_CACHE_BYTES,
            **engine_args,
        }
        if plugin is not None:
            arguments["additional_config"] = {"sgl_vllm": plugin}
        torch.set_num_threads(1)
        self.llm = LLM(**arguments)
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.tokenizer = self.llm.get_tokenizer()
        self.reset_counts()
        execute = self.core.model_executor.execute_model

        def counted(scheduler_output: Any, **kwargs: Any) -> Any:
            self.forward_passes += scheduler_output.total_num_scheduled_tokens > 0
            self.computed_tokens += scheduler_output.total_num_scheduled_tokens
            return execute(scheduler_output, **kwargs)

        self.core.model_executor.execute_model = counted
        step = self.core.step_fn

        def step_or_wait() -> Any:
            """As the loop of vLLM's engine process, which an engine in this process lacks: a step
            that computes nothing waits for threads, which compile grammars or read files."""
            outputs, model_executed = step()
            if not model_executed and self.scheduler.has_requests():
                time.sleep(0.001)
            return outputs, model_executed

        self.core.step_fn = step_or_wait

    @property
    def is_async(self) -> bool:
        """Whether a step is scheduled while the one before it runs."""
        return self.core.batch_queue is not None

    def may_take(self, num_passes: int, stale_tokens: int = 0) -> range:
        """How many forward passes a request may take that needs `num_passes`.

        With asynchronous scheduling there is one more for each stale token, and one if the next
        pass was in flight when the request ended.
        """
        return range(num_passes + stale_tokens, num_passes + stale_tokens + 1 + self.is_async)

    def reset_counts(self) -> None:
        self.forward_passes = 0
        self.computed_tokens = 0

    def run(self, asks: Sequence[Ask]) -> list[RequestOutput]:
        return self.llm.generate(
            [ask.as_prompt for ask in asks], [ask.params for ask in asks], use_tqdm=False
        )

    def tokens(self, asks: Sequence[Ask]) -> list[tuple[list[int], str | None]]:
        """What every request got: its tokens and why it ended."""
        return [(tokens_of(out), out.outputs[0].finish_reason) for out in self.run(asks)]

    def begin(
        self,
        name: str,
        prompt: list[int] | dict[str, Any],
        params: SamplingParams,
        num_steps: int = 0,
    ) -> list[RequestOutput]:
        """Send a request and run so many steps. Returns their outputs."""
        as_prompt = prompt if isinstance(prompt, dict) else {"prompt_token_ids": prompt}
        self.llm.llm_engine.add_request(name, as_prompt, params)
        return [output for _ in range(num_steps) for output in self.llm.llm_engine.step()]

    def finish(self) -> dict[str, RequestOutput]:
        """Run what is there to the end. Returns the last outputs, by request id."""
        last = {}
        while self.llm.llm_engine.has_unfinished_requests():
            last.update({one.request_id: one for one in self.llm.llm_engine.step()})
        return last

    def kv_of(
        self, prompt: list[int] | dict[str, Any], params: SamplingParams
    ) -> list[torch.Tensor]:
        """What the cache holds of a prompt's whole blocks once it is computed, layer by layer. Of
        layers with windows, the blocks that these still reach."""
        self.begin("seen", prompt, params)
        while not (request := next(iter(self.scheduler.requests.values()))).num_output_tokens:
            self.llm.llm_engine.step()
        layers = self.core.vllm_config.compilation_config.static_forward_context
        groups = self.scheduler.kv_cache_config.kv_cache_groups
        blocks = self.scheduler.kv_cache_manager.get_blocks(request.request_id).blocks
        kv = []
        for group, of_group in zip(groups, blocks, strict=True):
            whole = of_group[: request.num_prompt_tokens // group.kv_cache_spec.block_size]
            block_ids = [block.block_id for block in whole if not block.is_null]
            kv += [layers[name].kv_cache[block_ids].clone() for name in group.layer_names]
        self.llm.llm_engine.abort_request(["seen"])
        self.settle()
        return kv

    def preempt(self, request: Request) -> None:
        """Take a running request's blocks, as the scheduler does in the middle of a step."""
        self.scheduler.running.remove(request)
        self.scheduler._preempt_request(request, time.monotonic())
        self.scheduler.prev_step_scheduled_req_ids.discard(request.request_id)

    def settle(self) -> None:
        """Let what a KV connector still sends or loads come to its end."""
        while self.scheduler.has_requests() or self.core.batch_queue:
            self.core.step_fn()

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def check_nothing_is_left(self) -> None:
        while self.core.batch_queue:  # asynchronous scheduling: what was in flight at the last end
            self.llm.llm_engine.step()
        check_nothing_is_left(self.scheduler)

    def stop(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()
