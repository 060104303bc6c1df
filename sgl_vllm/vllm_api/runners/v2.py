"""vLLM's V2 model runner, its default."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sgl_vllm.vllm_api.patching import wrap
from sgl_vllm.vllm_api.runners.runner import ForcedRow, Runner, forced_in

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    from sgl_vllm.vllm_api.runners.runner import Act, Update


class V2(Runner):
    name = "V2"
    updates_by = "update_requests"
    live: GPUModelRunner

    def take_forced(self) -> None:
        @wrap(self.live, "add_requests")
        def add(original: Update, scheduler_output: SchedulerOutput) -> None:
            rows = forced_in(scheduler_output)
            for request_id, row in rows.items():
                self._write(request_id, row)
            # Staged writes are applied once a step, because their buffers rotate. vLLM applies them
            # if there are new requests.
            if rows and not scheduler_output.scheduled_new_reqs:
                self.live.req_states.apply_staged_writes()
                self.live.model_state.apply_staged_writes()
            original(scheduler_output)

    def _write(self, request_id: str, row: ForcedRow) -> None:
        """Makes the tokens part of what the runner calls the prefill: tokens that it does not
        sample. Its kernels read them from `all_token_ids`."""
        states = self.live.req_states
        index, end = states.req_id_to_index[request_id], row.start + len(row.tokens)
        states.prefill_len.np[index] = end
        states.total_len.stage_write_elem(index, end)
        states.all_token_ids.stage_write(index, row.start, row.tokens)
        if self.live.num_speculative_steps:  # the pass in flight may have accepted drafts
            states.num_computed_tokens.stage_write_elem(index, row.start)
        rope = getattr(self.live.model_state, "rope_state", None)
        if rope is not None:
            delta = int(rope.prefill_delta.np[index])
            positions = [*range(row.start + delta, end + delta)]
            for number in range(rope.num_dims):
                place = rope.num_dims * index + number
                rope.prefill_positions.stage_write(place, row.start, positions)
        if self.live.sampler is not None:  # on the last rank of a pipeline
            penalties = self.live.sampler.penalties_state
            if penalties.use_penalty[index]:
                penalties._new_penalties_reqs.append(index)  # counted again, from all tokens

    def before_forward(self, act: Act) -> None:
        """The runner keeps the position of each request itself, so it is told of the moved ones."""

        @wrap(self.live, "update_requests")
        def update(original: Update, scheduler_output: SchedulerOutput) -> None:
            original(scheduler_output)
            moved, states = act(scheduler_output), self.live.req_states
            cached = scheduler_output.scheduled_cached_reqs
            positions = zip(cached.req_ids, cached.num_computed_tokens, strict=True)
            for name, position in positions if moved else ():
                if name in moved:  # in the order of the stream, so after the passes before this one
                    states.num_computed_tokens.gpu[states.req_id_to_index[name]] = position
