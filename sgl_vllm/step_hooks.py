"""The moments of a scheduler's step at which a part may act. By default, a part does nothing.

Owns the moments and their arguments. Does not own their order among the parts
(`scheduler/assembly.py`), nor when vLLM reaches them (`scheduler/scheduler.py`). Imports no vLLM at
run time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any  # Any: counters of any part

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request


class StepHooks:
    """A part of the scheduler. The first four moments come in the order of the parts, and what
    comes after a pass in the opposite order."""

    def expect(self, request: Request) -> None:
        """A new request has arrived."""

    def before_schedule(self, prompts_done: Sequence[Request]) -> None:
        """A step begins. The step before has scheduled the last of these requests' prompts."""

    def while_scheduling(self) -> AbstractContextManager[None]:
        """What is to be entered while vLLM schedules a step."""
        return nullcontext()

    def before_update(
        self,
        scheduled: SchedulerOutput,
        sampled: ModelRunnerOutput,
        requests: Mapping[str, Request],
    ) -> None:
        """vLLM is about to read what a pass has sampled. `requests` are all unfinished ones."""

    def after_schedule(self, output: SchedulerOutput) -> Iterable[tuple[Request, int]]:
        """vLLM has scheduled a step. Returns the tokens that the step computes of requests beside
        those in `output`."""
        return ()

    def charge(self, computed: Iterable[tuple[Request, int]]) -> None:
        """The step computes so many tokens of requests beside those in its output."""

    def follows_outputs(self) -> bool:
        """Whether `after_update` has anything to do, after this step."""
        return True

    def after_update(
        self, outputs: Sequence[EngineCoreOutput], unfinished: Mapping[str, Request]
    ) -> None:
        """A step has these outputs. Called only if `follows_outputs`."""

    # -- inside vLLM's step -------------------------------------------------------------------

    def grammar_is_ready(self, request: Request) -> None:
        """A waiting request has got its grammar, and can run."""

    def looked_up(self, request: Request, num_hit: int) -> None:
        """A waiting request was looked up in the prefix cache."""

    def cut_to_stop(self, request: Request, start: int, num_new_tokens: int) -> int:
        """How many of the tokens from `start` on the next pass computes, with recurrent layers."""
        return num_new_tokens

    def narrow(self, masks: GrammarOutput) -> None:
        """A pass is about to sample within these masks."""

    def cut_accepted(self, request: Request, tokens: list[int], *, is_stale: bool) -> None:
        """vLLM is about to append `tokens`, which a pass has sampled or accepted."""

    def drafts_are_known(self) -> None:
        """A drafter's tokens for the next pass are known."""

    # -- at any time --------------------------------------------------------------------------

    def sections(self) -> Mapping[str, Any]:
        """The part's counters, by their field of `EngineStats`."""
        return {}

    def renew(self) -> None:
        """Begin again, as at start. No request runs or waits, and the cache is empty."""
