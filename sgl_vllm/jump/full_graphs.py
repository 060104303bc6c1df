"""Full CUDA graphs for passes with jumps, on vLLM's V2 model runner. Not run on a GPU yet.

Owns which graphs are captured beside vLLM's, and which passes may run in them. Does not own how the
runner gets forced tokens (`vllm_api/runners/`).

vLLM captures full graphs for rows of one token. Forced tokens count as a prefill, and a batch with
a prefill runs in piecewise graphs, or in none. For adaptive verification, vLLM also has full graphs
for rows of different lengths. Here these are captured for rows of 1 to `jump_graph_tokens` tokens:

    tokens of the rows              vLLM        here
    1 1 1 1                         full        full
    1 1 6 1      6 are forced       piecewise   full, for rows of different lengths
    1 1 90 1     a prompt, or more  piecewise   piecewise
                 forced tokens
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any  # Any: arguments of vLLM's

import numpy as np
from vllm.config.compilation import CUDAGraphMode
from vllm.logger import init_logger

from sgl_vllm.config import CONFIG_KEY, Options
from sgl_vllm.degrade import Guard
from sgl_vllm.jump.part import why_unsupported
from sgl_vllm.part import BY_OPTION
from sgl_vllm.vllm_api.patching import wrap
from sgl_vllm.vllm_api.probe import missing_hooks
from sgl_vllm.vllm_api.runners import V2, kind_of, runner_in

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import BatchReqState, GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker
    from vllm.v1.worker.utils import AttentionGroup

logger = init_logger("vllm.sgl_vllm")

IN_WORKER = "_sgl_vllm_full_graphs"
"""Attribute of a worker: its `FullGraphs`."""


@dataclass(frozen=True, slots=True)
class GraphsOutlook:
    """How many graphs an engine captures for jumps, or why it captures none."""

    num_graphs: int = 0
    reason: str | None = None


FAILED = GraphsOutlook(reason="an error: see the log")


def why_not(vllm_config: VllmConfig, options: Options) -> str | None:
    """Why an engine captures no graphs for jumps, as far as its configuration says."""
    parallel = vllm_config.parallel_config
    if not (options.jump_forward and options.jump_graph_tokens and options.jump_graph_batch):
        return BY_OPTION
    if missing := missing_hooks("jump_graph_tokens"):
        return f"this vLLM lacks {', '.join(missing)}"
    if not (runner := kind_of(vllm_config)).has_ragged_graphs:
        return f"vLLM's {runner.name} model runner has no full graphs for rows of different lengths"
    if vllm_config.speculative_config is not None:
        return "with speculative decoding, full graphs are for rows with drafts"
    sizes = parallel.pipeline_parallel_size, parallel.data_parallel_size
    contexts = parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size
    if max(*sizes, *contexts) > 1 or parallel.use_ubatching:
        return "with pipeline, data or context parallelism, or microbatches, they have never run"
    return why_unsupported(vllm_config, options)


def why_not_with(
    groups: list[list[AttentionGroup]],
    vllm_config: VllmConfig,
    options: Options,
    mode: CUDAGraphMode | None,
) -> str | None:
    """The same, as far as the attention backends and the graphs that they allow say."""
    from vllm.v1.worker.gpu.attn_utils import get_varlen_cudagraph_unsupported_backend

    if mode is None or mode.decode_mode() != CUDAGraphMode.FULL:
        return f"no full graphs are captured (cudagraph_mode={mode and mode.name})"
    length = options.jump_graph_tokens
    if refused := get_varlen_cudagraph_unsupported_backend(groups, vllm_config, length):
        return f"{refused[0]} has no full graphs for rows of different lengths"
    if mode == CUDAGraphMode.FULL:
        return "with cudagraph_mode=FULL, vLLM's own full graphs take them"
    return None


def sizes_of(vllm_config: VllmConfig, options: Options) -> list[int]:
    """The tokens of the batches that the graphs are for, in increasing order. A pass with more than
    one token in a row has at least two."""
    most = vllm_config.scheduler_config.max_num_seqs * options.jump_graph_tokens
    most = min(most, options.jump_graph_batch)
    sizes = vllm_config.compilation_config.cudagraph_capture_sizes or ()
    return [size for size in sorted(sizes) if 1 < size <= most]


def prepare(vllm_config: VllmConfig, collective_rpc: Callable[..., Sequence[Any]]) -> None:
    """Let workers capture these graphs. To be called before their memory is profiled: vLLM's
    estimate then includes the graphs."""
    options = Options.from_mapping(vllm_config.additional_config[CONFIG_KEY])
    if why_not(vllm_config, options) is None:
        _guard().run(collective_rpc, _use_in_worker, args=(options,))


def outlook_of(
    vllm_config: VllmConfig, options: Options, collective_rpc: Callable[..., Sequence[Any]]
) -> GraphsOutlook:
    """To be called when the workers have captured their graphs."""
    if (reason := why_not(vllm_config, options)) is not None:
        return GraphsOutlook(reason=reason)
    found = _guard().run(collective_rpc, _outlook_in_worker)
    return found[0] if found else FAILED


def _use_in_worker(worker: Worker, options: Options) -> None:
    if isinstance(runner := runner_in(worker), V2):
        vars(worker)[IN_WORKER] = FullGraphs(runner.live, options)


def _outlook_in_worker(worker: Worker) -> GraphsOutlook:
    graphs: FullGraphs | None = vars(worker).get(IN_WORKER)
    return graphs.outlook if graphs is not None else FAILED


def _guard() -> Guard:
    return Guard("full graphs for jumps", "passes with jumps run as vLLM runs prefills", logger)


class FullGraphs:
    """Those of one model runner. On an error, a pass runs in the graphs that vLLM chooses."""

    def __init__(self, runner: GPUModelRunner, options: Options) -> None:
        self.outlook = FAILED
        self._runner = runner
        self._options = options
        self._guard = _guard()
        self._capture_failed = False
        self._whole: BatchReqState | None = None
        """The state of this pass, if its graph is chosen as if the pass had no prefill."""
        wrap(runner, "initialize_kv_cache")(self._initialize)
        wrap(runner, "gather_batch_req_state")(self._gather)
        wrap(runner, "prepare_inputs")(self._prepare_inputs)

    def _initialize(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        self._guard.run(self._add_graphs)

    def _add_graphs(self) -> None:
        """To those that the runner's new manager of graphs will capture."""
        from vllm.v1.worker.gpu.model_states.default import DefaultModelState

        runner, options = self._runner, self._options
        manager = runner.cudagraph_manager
        if manager is None or self._capture_failed:
            return
        config = runner.vllm_config
        reason = why_not_with(runner.attn_groups, config, options, manager.cudagraph_mode)
        if type(runner.model_state) is not DefaultModelState:
            reason = f"{type(runner.model_state).__name__} may treat forced tokens as a prefill"
        self.outlook = GraphsOutlook(reason=reason)
        if reason is None:
            num_graphs = add_graphs(manager, sizes_of(config, options), options.jump_graph_tokens)
            self.outlook = GraphsOutlook(num_graphs)
            self._watch_capture(manager)

    def _watch_capture(self, manager: CudaGraphManager) -> None:
        """Without these graphs, vLLM captures its own after an error."""

        def capture(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
            try:
                original(*args, **kwargs)
                return
            except Exception:
                self._guard.record("all passes, at their capture")
            self.outlook, self._capture_failed = FAILED, True
            for graphs in (*manager._capture_descs.values(), *manager._candidates.values()):
                graphs[:] = [graph for graph in graphs if graph.max_query_len is None]
            manager.graphs.clear()
            original(*args, **kwargs)

        wrap(manager, "capture")(capture)

    def _gather(
        self,
        original: Callable[..., tuple[BatchReqState | None, int | None]],
        scheduler_output: SchedulerOutput,
        dummy_run: bool,
    ) -> tuple[BatchReqState | None, int | None]:
        """The choice of the graph sees a batch without a prefill if all rows of the prefill are
        like decoding ones. Everything else sees one: forced tokens are read from the request's row,
        as those of a prompt."""
        state, uniform = original(scheduler_output, dummy_run)
        self._whole = None
        if state is None or not state.has_prefill or not self.outlook.num_graphs:
            return state, uniform
        if self._guard.run(self._is_like_decoding, state):
            self._whole, state = state, state._replace(has_prefill=False)
        return state, uniform

    def _is_like_decoding(self, state: BatchReqState) -> bool:
        """Whether all rows are short and after a prompt, where forced tokens are."""
        prompt_lens = self._runner.req_states.prompt_len.np[state.idx_mapping_np]
        may = ~state.is_prefilling_np | (state.num_computed_prefill_tokens_np >= prompt_lens)
        if state.prefill_runs_as_decode_np is not None:  # vLLM's: the last token of a prompt
            may |= state.prefill_runs_as_decode_np
        is_short = state.num_scheduled_tokens <= self._options.jump_graph_tokens
        return bool((may & is_short).all())

    def _prepare_inputs(
        self,
        original: Callable[..., InputBatch],
        scheduler_output: SchedulerOutput,
        batch_req_state: BatchReqState,
        batch_desc: BatchExecutionDescriptor,
        num_active_loras: int,
    ) -> InputBatch:
        state, self._whole = self._whole or batch_req_state, None
        if batch_desc.max_query_len is None:
            return original(scheduler_output, state, batch_desc, num_active_loras)
        # Attention is prepared as at the capture: no prefill, the same longest row.
        state = state._replace(is_prefilling_np=np.zeros_like(state.is_prefilling_np))
        batch = original(scheduler_output, state, batch_desc, num_active_loras)
        batch.max_query_len = batch_desc.max_query_len
        return batch


def add_graphs(manager: CudaGraphManager, sizes: Sequence[int], max_query_len: int) -> int:
    """Let a manager capture full graphs for batches of at most `sizes` tokens, in rows of 1 to
    `max_query_len`, and choose them before piecewise ones. Returns how many."""
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

    full = CUDAGraphMode.FULL
    captured = manager._capture_descs.setdefault(full, [])
    num_before = len(captured)
    for num_loras in manager.lora_capture_cases:
        for smaller, size in pairwise([1, *sizes]):
            graph = BatchExecutionDescriptor(
                cg_mode=full,
                num_tokens=size,
                num_reqs=min(size, manager.max_num_reqs),
                max_query_len=max_query_len,
                num_active_loras=num_loras,
            )
            captured.append(graph)
            for num_tokens in range(smaller + 1, size + 1):
                chosen_by = manager._candidates.setdefault((num_tokens, num_loras), [])
                chosen_by.insert(sum(one.cg_mode == full for one in chosen_by), graph)
    captured.sort(key=lambda graph: -graph.num_tokens)  # smaller ones use the memory of larger ones
    return len(captured) - num_before
