"""Copies of a segment's KV to another position, in the worker.

Owns the message from the scheduler, and what a worker does with it before its forward pass. Does
not own which tokens are copied (`reuse.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

import torch

from sgl_vllm.approximate.kv_layout import KVLayout
from sgl_vllm.approximate.rotation import Rotation
from sgl_vllm.vllm_api.patching import wrap

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention.attention import Attention
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker

ATTRIBUTE = "sgl_vllm_turned_copies"
"""Of a `SchedulerOutput`: the step's copies. Absent from steps without any."""

ALWAYS_TURN_KEYS = frozenset(
    {
        "GPTJAttention",
        "LlamaAttention",
        "MixtralAttention",
        "Qwen2Attention",
        "Qwen2MoeAttention",
        "Qwen3Attention",
        "Qwen3MoeAttention",
    }
)
"""vLLM's classes of attention layers that turn all keys by their `rotary_emb`, and do nothing else
with a key after that. Most models' layers are of one of these."""


class TurnedCopy(NamedTuple):
    """A run of tokens whose KV is copied to later or earlier positions.

    Attributes:
        sources, targets: blocks, of consecutive tokens.
        source_offset, target_offset: the place of the first token in the first of them.
        shift: by how many positions keys are turned.
    """

    sources: tuple[int, ...]
    source_offset: int
    targets: tuple[int, ...]
    target_offset: int
    num_tokens: int
    shift: int


def send(output: SchedulerOutput, copies: Sequence[TurnedCopy]) -> None:
    """Let the workers carry out `copies` before the forward pass of this step."""
    vars(output)[ATTRIBUTE] = copies


def use_in_worker(worker: Worker, block_size: int) -> str | None:
    """Make a worker carry out turned copies from now on. Called in its process, when its KV cache
    exists and is idle. Compares its rotation with the model's own.

    Returns:
        Why it cannot; None if it can.
    """
    runner = worker.model_runner
    if not _is_v1(runner):
        return "this model runner keeps the position of each request in the worker"
    try:
        layers = [
            (KVLayout(layer, block_size), rotation)
            for layer, rotation in _rotations_of(runner).items()
        ]
    except ValueError as error:
        return str(error)
    except Exception as error:  # requests can be served without it
        return f"{type(error).__name__}: {error}"
    TurnedCopier(layers, block_size).install(runner)
    return None


def _is_v1(runner: object) -> TypeGuard[GPUModelRunner]:
    return hasattr(runner, "_update_states")


class TurnedCopier:
    """Carries copies out in all layers, each with the rotation of its keys."""

    def __init__(self, layers: Sequence[tuple[KVLayout, Rotation]], block_size: int) -> None:
        self._layers = layers
        self._block_size = block_size
        self._device = layers[0][0].cache.device

    def install(self, runner: GPUModelRunner) -> None:
        """Carry out the copies of each step of a runner, after its new blocks are zeroed and vLLM's
        own copies are made, and before its forward pass."""
        wrap(runner, "_update_states")(self._update)

    def _update(
        self, original: Callable[[SchedulerOutput], object], scheduler_output: SchedulerOutput
    ) -> object:
        result = original(scheduler_output)
        copies: Sequence[TurnedCopy] | None = vars(scheduler_output).get(ATTRIBUTE)
        if copies:
            self.copy(copies)
        return result

    def copy(self, copies: Sequence[TurnedCopy]) -> None:
        """The sources hold what they held before, so the order of the copies does not matter. No
        target is a source."""
        source = self._slots((one.sources, one.source_offset, one.num_tokens) for one in copies)
        target = self._slots((one.targets, one.target_offset, one.num_tokens) for one in copies)
        shifts = torch.repeat_interleave(
            torch.tensor([one.shift for one in copies]),
            torch.tensor([one.num_tokens for one in copies]),
        ).to(self._device)
        angles = {rotation: rotation.angles(shifts) for _, rotation in self._layers}
        for layout, rotation in self._layers:
            keys, values = layout.read(*source)
            layout.write(*target, rotation.turn(keys, angles[rotation]), values)

    def _slots(
        self, runs: Iterable[tuple[tuple[int, ...], int, int]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """For each token its block, and its place in it."""
        blocks, offsets = [], []
        for ids, first, num_tokens in runs:
            places = torch.arange(first, first + num_tokens)
            blocks.append(torch.tensor(ids)[places // self._block_size])
            offsets.append(places % self._block_size)
        return torch.cat(blocks).to(self._device), torch.cat(offsets).to(self._device)


def _rotations_of(runner: GPUModelRunner) -> Mapping[Attention, Rotation]:
    """The rotation of each attention layer's keys.

    Raises:
        ValueError: a layer may do something else with its keys, for a log line.
    """
    from vllm.model_executor.layers.attention.attention import Attention
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    modules = dict(runner.get_model().named_modules())
    rotations: dict[Attention, Rotation] = {}
    made: dict[RotaryEmbedding, Rotation] = {}
    for name, layer in modules.items():
        if not isinstance(layer, Attention):
            continue
        parent = modules[name.rpartition(".")[0]]
        kind = type(parent).__name__
        if kind not in ALWAYS_TURN_KEYS:
            raise ValueError(f"it is not known whether layers of {kind} turn keys by position")
        rotary = getattr(parent, "rotary_emb", None)
        if not isinstance(rotary, RotaryEmbedding) or (
            type(rotary).forward_native is not RotaryEmbedding.forward_native
        ):
            raise ValueError(f"keys are not turned by position alone ({type(rotary).__name__})")
        if rotary not in made:
            made[rotary] = _rotation_of(rotary)
        rotations[layer] = made[rotary]
    num_cached = len(runner.kv_caches)
    if not rotations or len(rotations) != num_cached:
        raise ValueError(f"{len(rotations)} of {num_cached} layers with a KV cache are known")
    return rotations


def _rotation_of(rotary: torch.nn.Module) -> Rotation:
    """That of a model's rotary embedding. ValueError if it does not turn keys as the model does."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    assert isinstance(rotary, RotaryEmbedding)
    cos_sin = rotary._compute_cos_sin_cache().float().cpu()
    rotation = Rotation(cos_sin, rotary.is_neox_style)
    last = len(cos_sin) - 1
    places = torch.tensor([[0, 0, last, last // 2, 3], [1, last, 0, last // 3, last]])
    keys = torch.randn(5, 2, rotary.head_size, generator=torch.Generator().manual_seed(0))
    before, after = (
        rotary.forward_static(
            at, keys.flatten(1), keys.flatten(1), rotary.head_size, rotary.rotary_dim, cos_sin,
            rotary.is_neox_style,
        )[1]
        for at in places
    )  # fmt: skip
    assert before is not None and after is not None
    turned = rotation.turn(before.view_as(keys), rotation.angles(places[1] - places[0]))
    if not torch.allclose(turned, after.view_as(keys), atol=0.02):
        raise ValueError("the model's rotary embedding turns keys in another way")
    return rotation
