"""The interface between the plugin's parts and vLLM's model runners.

Owns the interface, and how the forced tokens of a step reach the runner. Does not own which tokens
are forced, nor when (`jump/jump.py`). Does not import vLLM at run time.

vLLM schedules every uncomputed token of a running request, and its runners know the tokens that
they sampled. So the plugin only has to send the forced ones:

    the row of a request    prompt, output .. t            t is computed, s sampled in flight
    ForcedRow               start = after t, f1 .. fk
    the row afterwards      prompt, output .. t f1 .. fk   s is overwritten
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Set
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput

Act: TypeAlias = "Callable[[SchedulerOutput], Set[str]]"
Update: TypeAlias = "Callable[[SchedulerOutput], object]"


class ForcedRow(NamedTuple):
    """The last tokens of a request, including forced tokens.

    Attributes:
        start: position of `tokens[0]`. For a running request, the first position that the step
            computes.
        tokens: all tokens of the request from `start` on.
    """

    start: int
    tokens: list[int]


def send_forced(output: SchedulerOutput, rows: dict[str, ForcedRow]) -> None:
    """Let the runners take these rows, by request id, before they compute this step."""
    vars(output)["sgl_forced"] = rows


def forced_in(output: SchedulerOutput) -> Mapping[str, ForcedRow]:
    rows: dict[str, ForcedRow] = vars(output).get("sgl_forced") or {}
    return rows


class Live(Protocol):
    """What vLLM's runners have in common."""

    vllm_config: VllmConfig
    kv_caches: list[torch.Tensor]

    def get_model(self) -> torch.nn.Module: ...


class Runner(ABC):
    """Wraps a worker's vLLM model runner. Class attributes describe the kind of runner.

    Attributes:
        updates_by: vLLM's method that applies a step's changes to requests. It identifies the kind.
        is_proven: the project's tests run it as users do: on CPUs, and in pipelines.
        has_ragged_graphs: it can capture full CUDA graphs for rows of different lengths.
        adds_with_output: when vLLM adds a request, it also sends the request's output so far.
        draws_by_position: the random numbers of a request with a seed depend on positions alone.
            Otherwise each sampled token advances a generator, and forced tokens do not.
        why_no_draft_model: why the tree is off beside a draft model, for several KV-cache groups.
    """

    name: ClassVar[str]
    updates_by: ClassVar[str]
    is_proven: ClassVar[bool] = False
    has_ragged_graphs: ClassVar[bool] = True
    adds_with_output: ClassVar[bool] = True
    draws_by_position: ClassVar[bool] = True
    why_no_draft_model: ClassVar[str] = "no test of this project runs it"

    def __init__(self, live: Live) -> None:
        self.live = live

    @abstractmethod
    def take_forced(self) -> None:
        """From now on, take the forced tokens of a step before it is computed."""

    @abstractmethod
    def before_forward(self, act: Act) -> None:
        """Call `act` in each later step, after vLLM has zeroed new blocks and copied others, and
        before the forward pass. `act` returns the requests whose position the scheduler has
        changed."""
