"""Copies of a segment's KV to another position, in the worker.

Owns the message from the scheduler, and what a worker does with it before its forward pass. Does
not own which tokens are copied (`reuse.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, NamedTuple

import torch

from sgl_vllm.approximate.kv_layout import KVLayout
from sgl_vllm.approximate.rotation import Rotation
from sgl_vllm.vllm_api.runners import runner_in

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention.attention import Attention
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu_worker import Worker

    from sgl_vllm.vllm_api.runners.runner import Live

ATTRIBUTE = "sgl_vllm_turned_copies"
"""Of a `SchedulerOutput`: the step's `StepCopies`. Absent from steps without any."""

ALWAYS_TURN_KEYS = {
    *("GPTJAttention", "LlamaAttention", "MixtralAttention", "Qwen2Attention"),
    *("Qwen2MoeAttention", "Qwen3Attention", "Qwen3MoeAttention"),
}
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


class StepCopies(NamedTuple):
    """What a step copies before its forward pass.

    Attributes:
        moved: the requests that go on behind what is copied for them.
    """

    copies: Sequence[TurnedCopy]
    moved: Set[str]


def send(output: SchedulerOutput, step: StepCopies) -> None:
    """Let the workers carry out the copies of this step."""
    vars(output)[ATTRIBUTE] = step


def use_in_worker(worker: Worker, block_size: int) -> str | None:
    """Make a worker carry out turned copies from now on. Called in its process, when its KV cache
    exists and is idle. Compares its rotation with the model's own, and tests a copy on two blocks,
    which it restores. Returns why it cannot; None if it can.
    """
    try:
        runner = runner_in(worker)
        layers = [
            (KVLayout(layer, block_size), rotation)
            for layer, rotation in _rotations_of(runner.live).items()
        ]
        copier = TurnedCopier(layers, block_size)
        if not copier.is_right():
            return "the self-test of its copies failed on this device"
    except Exception as error:  # requests can be served without it
        return f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    runner.before_forward(copier.carry_out)
    return None


class TurnedCopier:
    """Carries copies out in all layers, each with the rotation of its keys: after a runner has
    zeroed a step's new blocks and made vLLM's own copies, and before its forward pass."""

    def __init__(self, layers: Sequence[tuple[KVLayout, Rotation]], block_size: int) -> None:
        self._layers = layers
        self._block_size = block_size
        self._device = layers[0][0].cache.device

    def carry_out(self, output: SchedulerOutput) -> Set[str]:
        """The copies of a step. Returns the requests that it has moved."""
        step: StepCopies | None = vars(output).get(ATTRIBUTE)
        if step is None:
            return frozenset()
        self.copy(step.copies)
        return step.moved

    def is_right(self) -> bool:
        """Whether a copy from block 0 to block 1 leaves there, in all layers, the values, and the
        keys as turned on a CPU."""
        num_tokens, shift = self._block_size - 1, -5
        generator = torch.Generator().manual_seed(0)
        before = [layout.cache[:2].clone() for layout, _ in self._layers]
        try:
            for layout, _ in self._layers:
                size = layout.cache[0].numel()
                numbers = torch.randn(2, size, generator=generator)
                layout.cache[:2] = numbers.to(layout.cache)
            self.copy([TurnedCopy((0,), 0, (1,), 1, num_tokens, shift)])
            places = torch.arange(num_tokens, device=self._device)
            for layout, rotation in self._layers:
                wanted_keys, wanted = (one.cpu() for one in layout.read(places))
                keys, values = (one.cpu() for one in layout.read(places + self._block_size + 1))
                angles = rotation.angles(torch.tensor([shift]))
                turned = rotation.turn(wanted_keys.float(), angles, torch.zeros_like(places).cpu())
                if not torch.equal(values, wanted):
                    return False
                if not torch.allclose(keys.float(), turned, atol=0.05):
                    return False
            return True
        finally:
            for (layout, _), old in zip(self._layers, before, strict=True):
                layout.cache[:2] = old

    def copy(self, copies: Sequence[TurnedCopy]) -> None:
        """The sources hold what they held before, so the order of the copies does not matter. No
        target is a source."""
        source = self._slots((one.sources, one.source_offset, one.num_tokens) for one in copies)
        target = self._slots((one.targets, one.target_offset, one.num_tokens) for one in copies)
        lengths = torch.tensor([one.num_tokens for one in copies])
        of_token = self._on_device(torch.arange(len(copies)).repeat_interleave(lengths))
        shifts = torch.tensor([one.shift for one in copies])
        angles = {
            rotation: self._on_device(rotation.angles(shifts))
            for rotation in {rotation for _, rotation in self._layers}
        }
        for layout, rotation in self._layers:
            keys, values = layout.read(source)
            layout.write(target, rotation.turn(keys, angles[rotation], of_token), values)

    def _slots(self, runs: Iterable[tuple[tuple[int, ...], int, int]]) -> torch.Tensor:
        """The slot of each token, of runs of blocks, a place in the first, and a length."""
        slots = []
        for ids, first, num_tokens in runs:
            places = torch.arange(first, first + num_tokens)
            blocks = torch.tensor(ids)[places // self._block_size]
            slots.append(blocks * self._block_size + places % self._block_size)
        return self._on_device(torch.cat(slots))

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Without waiting for what the device has yet to do."""
        if self._device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)


def _rotations_of(runner: Live) -> Mapping[Attention, Rotation]:
    """The rotation of each attention layer's keys. ValueError, for a log line, if a layer may do
    something else with its keys."""
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
            max_positions = runner.vllm_config.model_config.max_model_len
            made[rotary] = Rotation(rotary, max_positions)
        rotations[layer] = made[rotary]
    num_cached = len(runner.kv_caches)
    if not rotations or len(rotations) != num_cached:
        raise ValueError(f"{len(rotations)} of {num_cached} layers with a KV cache are known")
    return rotations
