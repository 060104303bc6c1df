"""Modelled devices, and a virtual clock that counts what a pass on one of them would take.

    step n      | schedule | launch n | ... | sample n |        | update n-1 | schedule | launch n+1
    device                   | pass n              | sampling |                        | pass n+1

The processor's time in the scheduler is measured, all else is modelled. A full graph runs once it
is launched. A piecewise one runs while its pieces are launched, and ends no sooner than they.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

from vllm.v1.outputs import ModelRunnerOutput

GRAPHS = FULL, PIECEWISE, NONE = "full", "piecewise", "none"
"""Graph modes of a pass; `NONE` is a batch that is larger than any graph."""


@dataclass(frozen=True)
class Device:
    """Seconds on a device, and of the processor beside it.

    Attributes:
        weights_s: a pass takes at least this long: the weights are read once.
        token_s: for each token, beside (`adds`) or instead of the time above, if that is longer.
        source: where the figures are from, and which of them are guesses.
        piecewise_s: what a pass without a full graph takes longer.
        sampling_s: sampling, once a pass.
        launch_full_s: processor time to launch a full graph.
        launch_piecewise_s: the same for a pass without one.
        launch_sampling_s: the same for sampling.
        add_s: processor time of each request that is added to the batch.
        copying_s: the same of a pass that copies blocks, for hits that end inside them: two kernels
            a layer, however many blocks.
    """

    weights_s: float
    token_s: float
    source: str
    adds: bool = False
    piecewise_s: float = 0.7e-3
    sampling_s: float = 0.35e-3
    launch_full_s: float = 0.9e-3
    launch_piecewise_s: float = 5e-3
    launch_sampling_s: float = 0.6e-3
    add_s: float = 0.2e-3
    copying_s: float = 0.5e-3

    def pass_s(self, graph: str, num_tokens: int) -> float:
        compute_s = self.token_s * num_tokens
        base = self.weights_s + compute_s if self.adds else max(self.weights_s, compute_s)
        return base + (0.0 if graph == FULL else self.piecewise_s)


def _published(tb_s: float, tflop_s: float, billions: float, source: str) -> Device:
    """A dense model of 16-bit weights on a device of this bandwidth and this many dense TFLOP/s."""
    return Device(
        weights_s=2e9 * billions / (0.75e12 * tb_s),
        token_s=2e9 * billions / (0.5e12 * tflop_s),
        source=f"{billions} billion weights. NVIDIA's {source} dense. Guesses: 75 % of the "
        "bandwidth and half of the FLOP/s are reached; launches, sampling and the cost of leaving "
        "full graphs are those of `spike`.",
    )


DEVICES = {
    "H100": _published(3.35, 989, 7.6, "H100 data sheet, SXM: 3.35 TB/s, 989 TFLOP/s bfloat16"),
    "H200": _published(4.8, 989, 7.6, "H200 data sheet, SXM: 4.8 TB/s, 989 TFLOP/s bfloat16"),
    "A10G": _published(0.6, 70, 7.6, "A10G data sheet for AWS: 600 GB/s, 70 TFLOP/s bfloat16"),
    "T4": _published(0.32, 65, 3.1, "Turing whitepaper, T4: 320 GB/s, 65 TFLOP/s float16"),
    "spike": Device(
        weights_s=4.3e-3,
        token_s=9.5e-6,
        source="7.6 billion weights, a probe of an H200: 4.3 ms + 9.5 us a token + 0.35 ms "
        "sampling. Guesses: launches, cost of leaving full graphs, adding a request, copying.",
        adds=True,
    ),
}

IO_S = 0.15e-3
"""Processor time of the engine's loop beside the scheduler: a guess."""

_RESULT_S = 4e-5
"""From the end of sampling to the processor: a guess."""


class Clock:
    """Virtual seconds since it was reset. `waited_s` of them, the processor waited for a device."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.now_s = self.waited_s = self._free_s = 0.0

    def launch(
        self, device: Device, graph: str, num_tokens: int, num_added: int, *, copies: bool = False
    ) -> None:
        """Launch a pass, which the device runs once it has finished the pass before."""
        is_full = graph == FULL
        launch_s = device.launch_full_s if is_full else device.launch_piecewise_s
        launch_s += num_added * device.add_s + copies * device.copying_s
        begin_s = self.now_s + launch_s * (1.0 if is_full else 0.4)
        self.now_s += launch_s
        end_s = max(self._free_s, begin_s) + device.pass_s(graph, num_tokens)
        self._free_s = max(end_s, self.now_s)

    def sample(self, device: Device) -> Late:
        """The sampling after the pass launched last."""
        self.now_s += device.launch_sampling_s
        self._free_s = max(self._free_s, self.now_s) + device.sampling_s
        return Late(self, self._free_s + _RESULT_S)

    def wait(self, until_s: float) -> None:
        self.waited_s += max(0.0, until_s - self.now_s)
        self.now_s = max(self.now_s, until_s)


class Late(Future[ModelRunnerOutput]):
    """A result that is there at a moment of the clock."""

    def __init__(self, clock: Clock, at_s: float) -> None:
        super().__init__()
        self._clock, self._at_s = clock, at_s

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        self._clock.wait(self._at_s)
        return super().result(timeout)
