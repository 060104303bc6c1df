"""Which CUDA graph vLLM chooses for a pass with a jump. None is captured here.

vLLM's own manager of graphs chooses among those that it would have captured. In the engine, the
model runs in place of a full graph, on what vLLM has prepared for it.
"""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.forward_context import set_forward_context
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
from vllm.v1.worker.gpu.model_runner import BatchReqState
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

from benchmarks.ab.workloads.json_regex import CHARACTER
from sgl_vllm.config import Options
from sgl_vllm.jump.full_graphs import IN_WORKER, FullGraphs, GraphsOutlook, add_graphs, why_not
from tests.engine.engine import MODEL, Ask, tokens_of, words

SIZES = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
PROMPT = 10
LONG_PROMPT = 400


def config(max_num_seqs: int = 256) -> Any:
    """As far as the manager of graphs and the hooks ask."""
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs),
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=SIZES, max_cudagraph_capture_size=max(SIZES)
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, data_parallel_size=1),
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
        speculative_config=None,
        num_speculative_tokens=0,
    )


def attention(support: AttentionCGSupport, bound: int | None = None) -> list[list[Any]]:
    """The layers of a model, with a backend that allows these graphs."""
    builder = SimpleNamespace(
        get_cudagraph_support=lambda *_: support,
        get_varlen_cudagraph_max_query_len=lambda *_: bound,
    )
    group = SimpleNamespace(
        layer_names=["layer"],
        kv_cache_spec=None,
        backend=type("Backend", (), {}),
        get_metadata_builder=lambda number: builder,
    )
    return [[group]]


class Runner:
    """What vLLM's runner does about graphs, in the order in which `execute_model` does it."""

    def __init__(self, mode: CUDAGraphMode, groups: list[list[Any]] | None = None, **more: Any):
        self.vllm_config = config(**more)
        self.mode = mode
        self.attn_groups = groups or attention(AttentionCGSupport.ALWAYS)
        self.model_state = DefaultModelState.__new__(DefaultModelState)
        self.cudagraph_manager: Any = None
        self.prepared: list[BatchReqState] = []
        self.has_prompt_lens = True

    def initialize_kv_cache(self, kv_cache_config: Any, is_profiling: bool = False) -> None:
        self.cudagraph_manager = CudaGraphManager(
            self.vllm_config, torch.device("cpu"), self.mode, decode_query_len=1
        )
        self.cudagraph_manager._graphs_captured = True

    def gather_batch_req_state(self, rows, dummy_run):
        prompt_lens = SimpleNamespace(np=np.array([row.prompt for row in rows]))
        self.req_states = SimpleNamespace(prompt_len=prompt_lens if self.has_prompt_lens else None)
        num_tokens = np.array([row.num_tokens for row in rows], np.int32)
        computed = np.array([row.computed for row in rows], np.int32)
        prefill = np.array([row.prefill for row in rows], np.int32)
        one = (computed < prefill) & (num_tokens == 1) & (computed > 0)
        has_prefill = bool((computed < prefill).any())
        known = {
            "num_scheduled_tokens": num_tokens,
            "num_tokens": int(num_tokens.sum()),
            "idx_mapping_np": np.arange(len(rows)),
            "num_computed_prefill_tokens_np": computed,
            "is_prefilling_np": computed < prefill,
            "has_prefill": has_prefill,
            "prefill_runs_as_decode_np": one if has_prefill else None,
        }
        state = BatchReqState(**(dict.fromkeys(BatchReqState._fields) | known))
        is_uniform = (one | (computed >= prefill)).all() and (num_tokens == 1).all()
        return state, 1 if is_uniform else None

    def prepare_inputs(self, rows, batch_req_state, batch_desc, num_active_loras):
        self.prepared.append(batch_req_state)
        return SimpleNamespace(max_query_len=None)

    def graph_of(self, *rows: SimpleNamespace) -> str:
        state, uniform = self.gather_batch_req_state(rows, False)
        max_query_len = None if state.has_prefill else int(state.num_scheduled_tokens.max())
        chosen = self.cudagraph_manager.dispatch(
            len(rows), state.num_tokens, uniform, 0, max_query_len=max_query_len
        )
        self.batch = self.prepare_inputs(rows, state, chosen, 0)
        assert chosen in self.cudagraph_manager._capture_descs.get(chosen.cg_mode, [chosen])
        return f"{chosen.cg_mode.name} {chosen.num_tokens}"


def row(num_tokens: int, prompt: int, computed: int, prefill: int) -> SimpleNamespace:
    return SimpleNamespace(num_tokens=num_tokens, prompt=prompt, computed=computed, prefill=prefill)


DECODE = row(1, PROMPT, PROMPT, PROMPT)


def jump(num_tokens: int, num_left: int = 0) -> SimpleNamespace:
    """A row of forced tokens, `num_left` of which are for later passes."""
    return row(num_tokens, PROMPT, PROMPT + 5, PROMPT + 5 + num_tokens + num_left)


def prompt(num_tokens: int, num_cached: int = 0) -> SimpleNamespace:
    return row(num_tokens, LONG_PROMPT, num_cached, LONG_PROMPT)


@pytest.fixture(autouse=True)
def one_process_without_a_gpu(monkeypatch) -> None:
    """A manager of graphs asks for memory, and whether it is at the ends of a pipeline."""
    platform = cudagraph_utils.current_platform
    monkeypatch.setattr(platform, "get_global_graph_pool", lambda: None, raising=False)
    group = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: group)


def runner_with_graphs(**options: Any) -> tuple[Runner, FullGraphs]:
    runner = Runner(CUDAGraphMode.FULL_AND_PIECEWISE)
    graphs = FullGraphs(runner, Options(**options))
    runner.initialize_kv_cache(None, is_profiling=True)
    return runner, graphs


BATCHES = {
    # name: the rows, and the graphs without and with those for jumps
    "decode": ([DECODE] * 16, "FULL 16", "FULL 16"),
    "a jump": ([DECODE] * 15 + [jump(6)], "PIECEWISE 24", "FULL 24"),
    "jumps": ([jump(k) for k in (3, 12, 5, 5, 6, 4, 7, 9)] * 2, "PIECEWISE 104", "FULL 104"),
    "many": ([DECODE] * 200 + [jump(8)] * 3, "PIECEWISE 224", "FULL 224"),
    "a part of a long jump": ([DECODE, jump(16, num_left=30)], "PIECEWISE 24", "FULL 24"),
    "a row that is too long": ([DECODE] * 15 + [jump(17)], "PIECEWISE 32", "PIECEWISE 32"),
    "a pass that is too long": ([jump(16)] * 17, "PIECEWISE 272", "PIECEWISE 272"),
    "a prompt": ([DECODE] * 15 + [prompt(300)], "PIECEWISE 320", "PIECEWISE 320"),
    "a jump and a short prompt": (
        [DECODE] * 14 + [jump(6), prompt(5)],
        "PIECEWISE 32",
        "PIECEWISE 32",
    ),
    "a jump and a prompt with one token left": (
        [DECODE] * 14 + [jump(6), prompt(1, num_cached=LONG_PROMPT - 1)],
        "PIECEWISE 24",
        "FULL 24",
    ),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_pass_runs_in_a_full_graph_if_its_rows_are_short_and_after_the_prompts(name):
    rows, without, with_graphs = BATCHES[name]
    stock = Runner(CUDAGraphMode.FULL_AND_PIECEWISE)
    stock.initialize_kv_cache(None)
    assert stock.graph_of(*rows) == without
    runner, graphs = runner_with_graphs()
    assert graphs.outlook.reason is None
    assert runner.graph_of(*rows) == with_graphs
    seen, whole = runner.prepared[-1], stock.prepared[-1]
    assert seen.has_prefill == whole.has_prefill  # so that forced tokens are read
    if with_graphs == without:
        assert (seen.is_prefilling_np == whole.is_prefilling_np).all()
        assert runner.batch.max_query_len is None
    else:  # as when the graph was captured
        assert not seen.is_prefilling_np.any()
        assert runner.batch.max_query_len == 16


def test_there_is_a_graph_for_each_size_and_the_largest_are_captured_first():
    stock = Runner(CUDAGraphMode.FULL_AND_PIECEWISE)
    stock.initialize_kv_cache(None)
    runner, graphs = runner_with_graphs(jump_graph_tokens=8, jump_graph_batch=64)
    num_sizes = len([2, 4, *range(8, 65, 8)])
    full = runner.cudagraph_manager._capture_descs[CUDAGraphMode.FULL]
    ours = [graph for graph in full if graph.max_query_len is not None]
    assert graphs.outlook.num_graphs == len(ours) == num_sizes
    assert {graph.max_query_len for graph in ours} == {8}
    assert [graph for graph in full if graph not in ours] == (
        stock.cudagraph_manager._capture_descs[CUDAGraphMode.FULL]
    )
    assert [graph.num_tokens for graph in full] == sorted(
        (graph.num_tokens for graph in full), reverse=True
    )


def test_few_requests_get_graphs_for_more_tokens_than_they_decode():
    runner = Runner(CUDAGraphMode.FULL_DECODE_ONLY, max_num_seqs=4)
    FullGraphs(runner, Options())
    runner.initialize_kv_cache(None)
    assert runner.graph_of(*[jump(16)] * 4) == "FULL 64"
    assert runner.graph_of(*[DECODE] * 4) == "FULL 4"
    assert runner.batch.max_query_len is None


def test_decoding_rows_without_a_graph_of_their_own_may_run_in_one_for_jumps():
    stock = Runner(CUDAGraphMode.FULL_AND_PIECEWISE, max_num_seqs=250)
    stock.initialize_kv_cache(None)
    assert stock.graph_of(*[DECODE] * 249) == "PIECEWISE 256"
    runner = Runner(CUDAGraphMode.FULL_AND_PIECEWISE, max_num_seqs=250)
    FullGraphs(runner, Options())
    runner.initialize_kv_cache(None)
    assert runner.graph_of(*[DECODE] * 249) == "FULL 256"
    assert runner.batch.max_query_len == 16


@pytest.mark.parametrize(
    ("mode", "groups", "reason"),
    [
        (
            CUDAGraphMode.FULL_AND_PIECEWISE,
            attention(AttentionCGSupport.UNIFORM_BATCH),
            "Backend has no full graphs for rows of different lengths",
        ),
        (
            CUDAGraphMode.FULL_AND_PIECEWISE,
            attention(AttentionCGSupport.UNIFORM_BATCH, bound=15),
            "Backend has no full graphs for rows of different lengths",
        ),
        (CUDAGraphMode.FULL_AND_PIECEWISE, attention(AttentionCGSupport.UNIFORM_BATCH, 16), None),
        (CUDAGraphMode.FULL, None, "with cudagraph_mode=FULL, vLLM's own full graphs take them"),
        (CUDAGraphMode.PIECEWISE, None, "no full graphs are captured (cudagraph_mode=PIECEWISE)"),
    ],
)
def test_a_worker_says_why_it_adds_no_graphs(mode, groups, reason):
    runner = Runner(mode, groups)
    graphs = FullGraphs(runner, Options())
    runner.initialize_kv_cache(None)
    assert graphs.outlook.reason == reason
    descriptions = [
        graph for each in runner.cudagraph_manager._capture_descs.values() for graph in each
    ]
    has_ours = any(graph.max_query_len for graph in descriptions)
    assert has_ours == (reason is None)


def test_a_model_with_states_of_its_own_gets_no_graphs():
    runner = Runner(CUDAGraphMode.FULL_AND_PIECEWISE)
    runner.model_state = MambaHybridModelState.__new__(MambaHybridModelState)
    graphs = FullGraphs(runner, Options())
    runner.initialize_kv_cache(None)
    assert graphs.outlook.reason == "MambaHybridModelState may treat forced tokens as a prefill"
    assert runner.graph_of(DECODE, jump(6)) == "PIECEWISE 8"


def test_after_an_error_a_pass_runs_as_vllm_would_run_it(caplog):
    runner, _ = runner_with_graphs()
    rows, without, _ = BATCHES["a jump"]
    runner.has_prompt_lens = False
    assert runner.graph_of(*rows) == without
    assert "full graphs for jumps failed" in caplog.text


def test_if_they_cannot_be_captured_vllm_captures_its_own(monkeypatch, caplog):
    captured: list[list[Any]] = []

    def capture(manager, create_forward_fn):
        captured.append(manager._capture_descs[CUDAGraphMode.FULL][:])
        if any(graph.max_query_len for graph in captured[-1]):
            raise RuntimeError("out of memory")

    monkeypatch.setattr(CudaGraphManager, "capture", capture)
    runner, graphs = runner_with_graphs()
    runner.cudagraph_manager.capture(None)
    runner.initialize_kv_cache(None)  # after the memory was profiled
    runner.cudagraph_manager.capture(None)
    ours = [any(graph.max_query_len for graph in one) for one in captured]
    assert ours == [True, False, False]
    assert all(captured)
    assert graphs.outlook.num_graphs == 0
    assert "full graphs for jumps failed for all passes, at their capture" in caplog.text
    rows, without, _ = BATCHES["a jump"]
    assert runner.graph_of(*rows) == without


@pytest.fixture(scope="module")
def resolved() -> VllmConfig:
    return AsyncEngineArgs(model=MODEL, max_model_len=256).create_engine_config()


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("use_v2_model_runner", False, "V1 model runner has no full graphs"),
        ("speculative_config", SimpleNamespace(method="ngram"), "with speculative decoding"),
        ("parallel_config.pipeline_parallel_size", 2, "they have never run"),
        ("parallel_config.data_parallel_size", 2, "they have never run"),
        ("parallel_config.decode_context_parallel_size", 2, "they have never run"),
        ("parallel_config.prefill_context_parallel_size", 2, "they have never run"),
        ("parallel_config.enable_dbo", True, "they have never run"),
        ("model_config.is_encoder_decoder", True, "the model has an encoder"),
    ],
)
def test_a_configuration_says_why_there_are_no_graphs(monkeypatch, resolved, path, value, reason):
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", True)
    assert why_not(resolved, Options()) is None
    assert why_not(resolved, Options(jump_graph_tokens=0)) == "by option"
    assert why_not(resolved, Options(jump_forward=False)) == "by option"
    owner: Any = resolved
    *parts, name = path.split(".")
    for part in parts:
        owner = getattr(owner, part)
    if isinstance(getattr(type(owner), name, None), property) or name == "use_v2_model_runner":
        owner = type(owner)
    monkeypatch.setattr(owner, name, value)
    assert reason in str(why_not(resolved, Options()))


# -- in the engine ------------------------------------------------------------------------------


class RunInstead(CudaGraphManager):
    """In place of a full graph, the model runs. No batch is padded, because the CPU's attention
    takes none that is."""

    def __init__(self, runner: Any) -> None:
        settings = config(runner.max_num_reqs)
        super().__init__(settings, runner.device, CUDAGraphMode.FULL_DECODE_ONLY, 1)
        self._graphs_captured = True
        self._runner = runner
        self.replayed: list[int | None] = []
        self._noted: dict[str, Any] = {}
        self._note("slots", runner)
        self._note("attention", runner.model_state)

    def _note(self, what: str, owner: Any) -> None:
        prepare = owner.prepare_attn

        def prepare_attn(*args: Any, **kwargs: Any) -> Any:
            self._noted[what] = prepared = prepare(*args, **kwargs)
            return prepared

        owner.prepare_attn = prepare_attn

    def dispatch(self, num_reqs: int, num_tokens: int, *args: Any, **kwargs: Any) -> Any:
        chosen = super().dispatch(num_reqs, num_tokens, *args, **kwargs)
        return replace(chosen, num_reqs=num_reqs, num_tokens=num_tokens)

    def run_fullgraph(self, desc: Any) -> torch.Tensor:
        self.replayed.append(desc.max_query_len)
        runner, num_tokens = self._runner, desc.num_tokens
        _, slots = self._noted["slots"]
        with set_forward_context(
            self._noted["attention"],
            runner.vllm_config,
            num_tokens=num_tokens,
            slot_mapping=cudagraph_utils.build_slot_mappings_by_layer(
                slots, runner.kv_cache_config
            ),
        ):
            return runner.model(
                input_ids=runner.input_buffers.input_ids[:num_tokens],
                positions=runner.input_buffers.positions[:num_tokens],
                intermediate_tensors=None,
                inputs_embeds=None,
            )


def mixed_asks(count: int) -> list[Ask]:
    rng = random.Random(3)
    trunk = words(90)
    patterns = [
        CHARACTER,
        r"The answer to your question is [a-z ]{3,9}\.",
        r'\{"the city where it all began": "[A-Z][a-z]{2,5}", "seen": (true|false)\}',
    ]
    extras: list[dict[str, Any]] = [
        *({}, {"min_tokens": 7}, {"repetition_penalty": 1.3}, {"frequency_penalty": 0.7}),
        *({"logprobs": 2}, {"seed": 3, "temperature": 0.8}),
    ]
    asks = []
    for number in range(count):
        pattern = None if number % 4 == 0 else patterns[number % 3]
        more = extras[number % len(extras)]
        if pattern:
            more = more | {"structured_outputs": StructuredOutputsParams(regex=pattern)}
        params = SamplingParams(**{"temperature": 0, "max_tokens": 30, **more})
        asks.append(Ask(trunk[: rng.randrange(20, 90)], params))
    return asks


@pytest.mark.platforms
def test_answers_are_the_same_when_passes_with_jumps_are_chosen_full_graphs(start):
    engine = start({"self_check": "off"}, max_num_seqs=6, max_model_len=256, cudagraph_metrics=True)
    if not engine.scheduler.use_v2_model_runner:
        pytest.skip("vLLM's V1 runner has no such graphs")
    asks = mixed_asks(18)
    counters = engine.scheduler.parts.jump.counters
    want = [tokens_of(out) for out in engine.run(asks)]
    num_outside = counters.outside_full_graphs
    assert num_outside > 5

    engine.llm.reset_prefix_cache()
    runner = engine.core.model_executor.driver_worker.worker.model_runner
    [graphs] = engine.core.model_executor.collective_rpc(lambda worker: vars(worker)[IN_WORKER])
    assert "cudagraph_mode=NONE" in graphs.outlook.reason
    runner.cudagraph_manager = manager = RunInstead(runner)
    add_graphs(manager, [2, 4, 8, 16, 32, 64, 96], 16)
    graphs.outlook = GraphsOutlook(7)
    assert [tokens_of(out) for out in engine.run(asks)] == want
    assert counters.outside_full_graphs - num_outside < num_outside / 2  # beside prompts
    assert manager.replayed.count(16) > num_outside / 2
    engine.check_nothing_is_left()
