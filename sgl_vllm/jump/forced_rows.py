"""Forced tokens on their way to the model runner, in the step that computes them.

Owns the message from the scheduler and the runners' copies of a request's tokens. Does not own
which tokens are forced, nor when (`jump.py`).

vLLM schedules a running request for all tokens that it has and has not computed, and its runners
know every token that they have sampled. They only have to be told the forced ones:

    the row of a request    prompt, output .. t            t is computed, s sampled in flight
    ForcedRow               start = after t, f1 .. fk
    the row afterwards      prompt, output .. t f1 .. fk   s is overwritten
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch

from sgl_vllm.vllm_api.patching import wrap
from sgl_vllm.vllm_api.runners import UNKNOWN, is_v1, is_v2

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as RunnerV1
    from vllm.v1.worker.gpu_worker import Worker

ATTRIBUTE = "sgl_forced"
"""Of a `SchedulerOutput`: its `ForcedRow`s by request id. Absent from steps without any."""


class ForcedRow(NamedTuple):
    """The end of a request's tokens, with forced ones among them.

    Attributes:
        start: position of the first of `tokens`, and of a running request the first one that the
            step computes.
        tokens: all tokens of the request from there on.
    """

    start: int
    tokens: list[int]


def send(output: SchedulerOutput, rows: dict[str, ForcedRow]) -> None:
    """Let the workers take these tokens before they compute this step."""
    vars(output)[ATTRIBUTE] = rows


def rows_of(output: SchedulerOutput) -> Mapping[str, ForcedRow]:
    rows: dict[str, ForcedRow] = vars(output).get(ATTRIBUTE) or {}
    return rows


def use_in_worker(worker: Worker) -> str | None:
    """Let a worker take forced tokens from now on. Called in its process.

    Returns:
        Why it cannot; None if it can.
    """
    runner = worker.model_runner
    if is_v2(runner):
        _use_in_v2(runner)
    elif is_v1(runner):
        _use_in_v1(runner, runner.input_batch)
    else:
        return UNKNOWN
    return None


def _use_in_v1(runner: RunnerV1, batch: InputBatch) -> None:
    """Before the step's changes, because the runner passes them on to logits processors, which look
    at how many tokens there are. A request that enters the batch gets its tokens then."""
    rows: Mapping[str, ForcedRow] = {}

    def update(
        original: Callable[[SchedulerOutput], object], scheduler_output: SchedulerOutput
    ) -> object:
        nonlocal rows
        rows = rows_of(scheduler_output)
        for request_id, row in rows.items():
            if request_id in runner.input_batch.req_id_to_index:
                _write_in_v1(runner, request_id, row)
        return original(scheduler_output)

    def enter(
        original: Callable[[CachedRequestState], object], request: CachedRequestState
    ) -> object:
        if (row := rows.get(request.req_id)) is not None:
            _write_output(request, row)
        return original(request)

    wrap(runner, "_update_states")(update)
    wrap(batch, "add_request")(enter)


def _use_in_v2(runner: RunnerV2) -> None:
    def add(original: Callable[[SchedulerOutput], None], scheduler_output: SchedulerOutput) -> None:
        rows = rows_of(scheduler_output)
        for request_id, row in rows.items():
            _write_in_v2(runner, request_id, row)
        # Staged writes are applied once a step, because their buffers rotate. vLLM applies them if
        # there are new requests.
        if rows and not scheduler_output.scheduled_new_reqs:
            runner.req_states.apply_staged_writes()
            runner.model_state.apply_staged_writes()
        original(scheduler_output)

    wrap(runner, "add_requests")(add)


def _write_in_v1(runner: RunnerV1, request_id: str, row: ForcedRow) -> None:
    batch, state = runner.input_batch, runner.requests[request_id]
    index, end = batch.req_id_to_index[request_id], row.start + len(row.tokens)
    _write_output(state, row)
    batch.token_ids_cpu[index, row.start : end] = row.tokens
    batch.is_token_ids[index, row.start : end] = True
    batch.num_tokens_no_spec[index] = end
    if batch.prev_req_id_to_index:  # the token on the device is stale, or among these
        batch.prev_req_id_to_index.pop(request_id, None)
    if runner.speculative_config is not None and runner.speculative_config.use_ngram_gpu():
        tokens = torch.tensor(row.tokens, device=runner.token_ids_gpu_tensor.device)
        runner.token_ids_gpu_tensor[index, row.start : end] = tokens
        runner.num_tokens_no_spec_gpu[index] = end


def _write_output(state: CachedRequestState, row: ForcedRow) -> None:
    """In place, because the sampler's metadata has the same list."""
    state.output_token_ids[row.start - state.num_prompt_tokens :] = row.tokens


def _write_in_v2(runner: RunnerV2, request_id: str, row: ForcedRow) -> None:
    """Makes the tokens part of what the runner calls the prefill: tokens that it does not sample.
    Its kernels read them from `all_token_ids`."""
    states = runner.req_states
    index, end = states.req_id_to_index[request_id], row.start + len(row.tokens)
    states.prefill_len.np[index] = end
    states.total_len.stage_write_elem(index, end)
    states.all_token_ids.stage_write(index, row.start, row.tokens)
    if runner.num_speculative_steps:  # the pass in flight may have accepted drafts
        states.num_computed_tokens.stage_write_elem(index, row.start)
    rope = getattr(runner.model_state, "rope_state", None)
    if rope is not None:
        delta = int(rope.prefill_delta.np[index])
        positions = [*range(row.start + delta, end + delta)]
        for number in range(rope.num_dims):
            place = rope.num_dims * index + number
            rope.prefill_positions.stage_write(place, row.start, positions)
    if runner.sampler is not None:  # on the last rank of a pipeline
        penalties = runner.sampler.penalties_state
        if penalties.use_penalty[index]:
            penalties._new_penalties_reqs.append(index)  # counted again, from all tokens
