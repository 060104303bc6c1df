"""vLLM's V1 model runner: deprecated, and still the default on CPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from sgl_vllm.vllm_api.patching import wrap
from sgl_vllm.vllm_api.runners.runner import ForcedRow, Runner, forced_in

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from sgl_vllm.vllm_api.runners.runner import Act, Update


class V1(Runner):
    name = "V1"
    updates_by = "_update_states"
    is_proven = True
    has_ragged_graphs = adds_with_output = draws_by_position = False
    why_no_draft_model = "vLLM's V1 runner gives a draft model the first group's blocks"
    live: GPUModelRunner

    def take_forced(self) -> None:
        """Writes forced tokens before the runner applies a step's changes, because it then calls
        logits processors, which count tokens. Requests outside the batch get theirs on entry."""
        rows: Mapping[str, ForcedRow] = {}

        @wrap(self.live, "_update_states")
        def update(original: Update, scheduler_output: SchedulerOutput) -> object:
            nonlocal rows
            rows = forced_in(scheduler_output)
            for request_id, row in rows.items():
                if request_id in self.live.input_batch.req_id_to_index:
                    self._write(request_id, row)
            return original(scheduler_output)

        batch: InputBatch = self.live.input_batch

        @wrap(batch, "add_request")
        def enter(
            original: Callable[[CachedRequestState], object], request: CachedRequestState
        ) -> object:
            if (row := rows.get(request.req_id)) is not None:
                _write_output(request, row)
            return original(request)

    def _write(self, request_id: str, row: ForcedRow) -> None:
        live, batch = self.live, self.live.input_batch
        index, end = batch.req_id_to_index[request_id], row.start + len(row.tokens)
        _write_output(live.requests[request_id], row)
        batch.token_ids_cpu[index, row.start : end] = row.tokens
        batch.is_token_ids[index, row.start : end] = True
        batch.num_tokens_no_spec[index] = end
        if batch.prev_req_id_to_index:  # the token on the device is stale, or among these
            batch.prev_req_id_to_index.pop(request_id, None)
        if live.speculative_config is not None and live.speculative_config.use_ngram_gpu():
            on_device = live.token_ids_gpu_tensor
            on_device[index, row.start : end] = on_device.new_tensor(row.tokens)
            live.num_tokens_no_spec_gpu[index] = end

    def before_forward(self, act: Act) -> None:
        @wrap(self.live, "_update_states")
        def update(original: Update, scheduler_output: SchedulerOutput) -> object:
            result = original(scheduler_output)
            act(scheduler_output)
            return result


def _write_output(state: CachedRequestState, row: ForcedRow) -> None:
    """In place, because the sampler's metadata has the same list."""
    state.output_token_ids[row.start - state.num_prompt_tokens :] = row.tokens
