"""Which tokens of reused segments deviate most, found in the worker (CacheBlend, Yao et al., arXiv
2405.16444).

Owns the measure, the choice, and what a worker does with it before its forward pass. Does not own
how many tokens are chosen (`plan.py`) nor the rows that compute them (`chunk_rows.py`).

A token's value in the second layer depends on the tokens before it, by what it has read of them in
the first. So the difference from the cached value says how much of the token's context is new. In
the first layer, keys and values depend on the token and its position alone. So finding the values
needs nothing of the KV cache, and leaves nothing there:

    layer 1     keys and values of all tokens of the prompt; the rest for one of `SAMPLE_EVERY`
    layer 2     up to keys and values;  deviation = |value - cached value|^2

It takes a share of the time that a layer takes for the prompt, and memory for the first layer's
keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.forward_context import set_forward_context
from vllm.logger import init_logger

from sgl_vllm.approximate.chunk_rows import move_row
from sgl_vllm.approximate.kv_layout import KVLayout
from sgl_vllm.approximate.part import reason_in
from sgl_vllm.approximate.plan import Chunk, Reuse
from sgl_vllm.vllm_api.patching import wrap
from sgl_vllm.vllm_api.runners import install, is_known

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention.attention import Attention
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as RunnerV1
    from vllm.v1.worker.gpu_worker import Worker

logger = init_logger("vllm.sgl_vllm.approximate")

ATTRIBUTE = "sgl_vllm_windows_to_choose"
"""Of a `SchedulerOutput`: the step's `WindowsToChoose`. Absent from steps without any."""

SAMPLE_EVERY = 4
"""One token in this many is compared. A window has several of them."""

MAX_FAILURES = 3
"""After this many failed passes in a row, no more are tried."""

MAX_QUERIES = 128
"""Queries whose mask is in memory at a time."""


class WindowsToChoose(NamedTuple):
    """Rows of a step that compute windows of a request's reused segments. Until they are moved,
    they are at the first tokens of each.

    Attributes:
        prompt_token_ids: up to the end of the last segment, and one after it.
        reuses: the segments of which tokens are to be chosen. Their KV is copied in this step.
        row_ids: of the rows.
        size: tokens of each.
    """

    prompt_token_ids: list[int]
    reuses: Sequence[Reuse]
    row_ids: Sequence[str]
    size: int


def send(output: SchedulerOutput, to_choose: Sequence[WindowsToChoose]) -> None:
    """Let the workers choose these windows of this step."""
    vars(output)[ATTRIBUTE] = to_choose


def use_in_worker(worker: Worker, block_size: int) -> str | None:
    """Make a worker choose windows from now on. Called in its process, when its KV cache exists and
    is idle. Tries the pass on a few tokens.

    Returns:
        Why it cannot; None if it can.
    """
    runner = worker.model_runner
    if not is_known(runner):
        return "this vLLM's model runner has no known method that updates requests"
    try:
        second_layer = SecondLayer(runner, block_size)
        second_layer.try_it()
    except Exception as error:  # the first tokens of segments can be computed without it
        return reason_in(error)
    install(WindowChooser(second_layer), runner)
    return None


class SecondLayer:
    """The values of a model's second layer: those of a new prompt, and those that are cached.

    Raises:
        ValueError: the model has one layer, a pass cannot end in one, or the layout of the cache
            cannot be found.
    """

    def __init__(self, runner: RunnerV1 | RunnerV2, block_size: int) -> None:
        from vllm.model_executor.layers.attention.attention import Attention

        self._model = runner.get_model()
        layers = [layer for layer in self._model.modules() if isinstance(layer, Attention)]
        if len(layers) < 2:
            raise ValueError("the model has one attention layer")
        if any("forward" in vars(module) for module in self._model.modules()):
            raise ValueError("weights are offloaded, and come back in whole passes")
        self._first, self._second = layers[:2]
        self._layout = KVLayout(self._second, block_size)
        self._device = self._layout.cache.device
        self._block_size = block_size
        self._config = runner.vllm_config
        self._max_tokens = self._config.scheduler_config.max_num_batched_tokens

    def deviations(
        self, prompt_token_ids: Sequence[int], reuses: Sequence[Reuse]
    ) -> list[NDArray[np.float32]]:
        """How far values of each reused interval's tokens are from the donor's: of every
        `SAMPLE_EVERY`-th one, from the first on."""
        offsets = [torch.arange(0, reuse.num_tokens, SAMPLE_EVERY) for reuse in reuses]
        positions = [reuse.start + some for reuse, some in zip(reuses, offsets, strict=True)]
        computed = self.values(prompt_token_ids, torch.cat(positions))
        cached = torch.cat([self._cached(*pair) for pair in zip(reuses, offsets, strict=True)])
        deviations = (computed.float() - cached.float()).square().sum((1, 2)).cpu()
        return [some.numpy() for some in deviations.split([len(some) for some in offsets])]

    def values(self, prompt_token_ids: Sequence[int], positions: torch.Tensor) -> torch.Tensor:
        """The values of the prompt's tokens at ascending positions, shape (tokens, heads,
        head_size). Each pass is as long as one of the engine's, at most.

        Args:
            positions: on the CPU.
        """
        token_ids = torch.tensor(prompt_token_ids)
        everywhere = torch.arange(len(token_ids))
        shape = len(token_ids), self._first.num_kv_heads, self._first.head_size
        keys, values = torch.empty(2, *shape, dtype=self._layout.cache.dtype, device=self._device)
        with torch.inference_mode():
            for piece in everywhere.split(self._max_tokens):
                at = slice(int(piece[0]), int(piece[-1]) + 1)
                keys[at], values[at] = self._run_up_to(self._first, token_ids, piece)
            found = []
            for piece in positions.split(self._max_tokens):
                attend = partial(self._attend, piece, keys, values)
                with self._first.register_forward_hook(attend):
                    found.append(self._run_up_to(self._second, token_ids, piece)[1].clone())
            return torch.cat(found)

    def _run_up_to(
        self, layer: Attention, token_ids: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values of the tokens at `positions`."""

        def stop(_: Attention, inputs: tuple[torch.Tensor, ...]) -> NoReturn:
            raise _Reached(*inputs[1:])

        context = set_forward_context(
            None, self._config, num_tokens=len(positions), skip_compiled=True
        )
        with layer.register_forward_pre_hook(stop), context:
            try:
                self._model.forward(
                    input_ids=token_ids[positions].to(self._device),
                    positions=positions.to(self._device),
                )
            except _Reached as reached:
                key, value = reached.args
        shape = len(positions), layer.num_kv_heads, layer.head_size
        return key.view(shape), value.view(shape)

    def _attend(
        self,
        positions: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        _: Attention,
        inputs: tuple[torch.Tensor, ...],
        __: torch.Tensor,
    ) -> torch.Tensor:
        """The first layer's attention at some positions, given the keys and values at all, in place
        of its output: without metadata of a batch, vLLM's own attention computes nothing."""
        queries = inputs[0].view(-1, self._first.num_heads, self._first.head_size)
        pieces = zip(queries.split(MAX_QUERIES), positions.split(MAX_QUERIES), strict=True)
        scale = self._first.impl.scale
        return torch.cat([_attention(some, at, keys, values, scale) for some, at in pieces])

    def _cached(self, reuse: Reuse, offsets: torch.Tensor) -> torch.Tensor:
        """The donor's values, shape (tokens, heads, head_size).

        Args:
            offsets: of the tokens, from the first reused one.
        """
        places = reuse.donor_start % self._block_size + offsets
        blocks = torch.tensor(reuse.block_ids)[places // self._block_size]
        return self._layout.read_values(
            blocks.to(self._device), (places % self._block_size).to(self._device)
        )

    def try_it(self) -> None:
        """Raises what a pass raises, ValueError if its values are no numbers."""
        values = self.values(range(1, 2 * self._block_size), torch.arange(0, self._block_size, 3))
        if not bool(values.isfinite().all()):
            raise ValueError("a pass of the first layer gives values that are not finite")


class _Reached(Exception):
    """A pass has come to the attention of a layer, with these keys and values."""


class WindowChooser:
    """Moves the rows of a step to the windows that deviate most."""

    def __init__(self, second_layer: SecondLayer) -> None:
        self.second_layer = second_layer
        self._num_failures = 0

    def install_in_v1(self, runner: RunnerV1) -> None:
        def update(
            original: Callable[[SchedulerOutput], object], scheduler_output: SchedulerOutput
        ) -> object:
            self.move_rows(scheduler_output)
            return original(scheduler_output)

        wrap(runner, "_update_states")(update)

    def install_in_v2(self, runner: RunnerV2) -> None:
        def add(
            original: Callable[[SchedulerOutput], None], scheduler_output: SchedulerOutput
        ) -> None:
            self.move_rows(scheduler_output)
            original(scheduler_output)

        wrap(runner, "add_requests")(add)

    def move_rows(self, scheduler_output: SchedulerOutput) -> None:
        """To be called before a runner takes the new requests of a step."""
        to_choose = vars(scheduler_output).get(ATTRIBUTE, ())
        if to_choose and self._num_failures < MAX_FAILURES:
            rows = {row.req_id: row for row in scheduler_output.scheduled_new_reqs}
            for one in to_choose:
                self._move_rows(rows, one)

    def _move_rows(self, rows: Mapping[str, NewRequestData], to_choose: WindowsToChoose) -> None:
        try:
            chosen = [rows[row_id] for row_id in to_choose.row_ids]
            pairs = [*zip(chosen, self.choose(to_choose), strict=True)]
        except Exception:  # such as no memory: the rows are right where they are
            self._num_failures += 1
            logger.warning(
                "The first tokens of segments are computed instead of those that deviate most%s",
                ", from now on" if self._num_failures == MAX_FAILURES else "",
                exc_info=True,
            )
            return
        self._num_failures = 0
        for row, start in pairs:
            chunk = Chunk(start, start + to_choose.size)
            move_row(row, to_choose.prompt_token_ids, chunk)

    def choose(self, to_choose: WindowsToChoose) -> list[int]:
        """The positions at which the windows begin that deviate most, in ascending order."""
        starts, sums = [], []
        of_reuses = self.second_layer.deviations(to_choose.prompt_token_ids, to_choose.reuses)
        for reuse, deviations in zip(to_choose.reuses, of_reuses, strict=True):
            of_reuse = np.array(reuse.window_starts(to_choose.size))
            cumulated = np.concatenate(([0.0], deviations.cumsum(dtype=np.float64)))
            first = -(-(of_reuse - reuse.start) // SAMPLE_EVERY)
            starts.append(of_reuse)
            sums.append(cumulated[first + to_choose.size // SAMPLE_EVERY] - cumulated[first])
        most = np.argsort(-np.concatenate(sums), kind="stable")[: len(to_choose.row_ids)]
        return sorted(np.concatenate(starts)[most].tolist())


def _attention(
    queries: torch.Tensor,
    positions: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Causal attention of some tokens, shape (some, heads * head_size).

    Args:
        queries: of the tokens at `positions`, shape (some, heads, head_size).
        positions: ascending, on the CPU.
        keys, values: of all tokens, shape (tokens, kv_heads, head_size).
    """
    kv_heads = keys.shape[1]
    at = torch.arange(int(positions[-1]) + 1, device=keys.device)
    # Query heads that share a key head are further queries of it, which all kernels can compute.
    grouped = queries.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
    mask = (at <= positions.to(keys.device)[:, None]).repeat(grouped.shape[1], 1)
    attended = torch.nn.functional.scaled_dot_product_attention(
        grouped.flatten(1, 2)[None],
        keys[: len(at)].transpose(0, 1)[None],
        values[: len(at)].transpose(0, 1)[None],
        attn_mask=mask,
        scale=scale,
    )
    return attended[0].view_as(grouped).permute(2, 0, 1, 3).flatten(1)
