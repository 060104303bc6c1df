"""Jumps beside custom logits processors: on where they leave the argmax alone."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, LogitsProcessor

from sgl_vllm.jump import processors
from sgl_vllm.jump.processors import leaves_argmax_alone, why_no_jumps
from tests.engine.engine import Ask, Engine, words
from tests.engine.test_jump_forward import CARD

NAME = __name__


class Processor(LogitsProcessor):
    """Does nothing. vLLM constructs it with its configuration, a device and a flag."""

    def __init__(self, *arguments: object) -> None:
        self.num_calls = 0

    def update_state(self, batch_update: object) -> None:
        pass

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return logits

    def is_argmax_invariant(self) -> bool:
        return False


class Flattens(Processor):
    """Makes every sampled token equally likely among the legal ones, and no greedy one."""

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.where(logits.isfinite(), 0.0, logits)

    def is_argmax_invariant(self) -> bool:
        return True


class ByInstance(Processor):
    invariant = True

    def is_argmax_invariant(self) -> bool:
        return self.invariant


class Config:
    """All that is read of vLLM's model configuration."""

    def __init__(self, *processors: object) -> None:
        self.logits_processors = list(processors)


@pytest.mark.parametrize(
    ("processor", "is_invariant"), [(Processor, False), (Flattens, True), (ByInstance, False)]
)
def test_only_a_declaration_that_holds_for_every_instance_counts(processor, is_invariant):
    assert leaves_argmax_alone(processor) is is_invariant


def test_vllms_own_processors_declare_what_they_do():
    found = {one.__name__: leaves_argmax_alone(one) for one in BUILTIN_LOGITS_PROCESSORS}
    assert found == {
        "MinTokensLogitsProcessor": False,
        "LogitBiasLogitsProcessor": False,
        "MinPLogitsProcessor": True,
    }


def test_a_class_without_the_method_as_on_the_v2_runner_declares_nothing():
    assert not leaves_argmax_alone(object)


def test_the_reason_names_the_first_processor_that_stands_in_the_way():
    assert why_no_jumps(Config()) is None
    assert why_no_jumps(Config(Flattens, f"{NAME}:Flattens")) is None
    reason = why_no_jumps(Config(Flattens, f"{NAME}:Processor", ByInstance))
    assert (
        reason == "the logits processor Processor does not declare that it leaves the argmax alone"
    )


def test_a_processor_that_cannot_be_loaded_is_named():
    reason = why_no_jumps(Config("no.such.module:Thing"))
    assert reason is not None and "no.such.module:Thing cannot be loaded" in reason


def test_processors_of_installed_packages_count(monkeypatch):
    entry = EntryPoint("mine", f"{NAME}:ByInstance", processors.GROUP)
    monkeypatch.setattr(processors, "entry_points", lambda *, group: [entry])
    reason = why_no_jumps(Config())
    assert reason is not None and "ByInstance" in reason


# -- in an engine ----------------------------------------------------------------------------------


def asks(**options: Any) -> list[Ask]:
    grammar = StructuredOutputsParams(regex=CARD)
    params = SamplingParams(**{"temperature": 0, "max_tokens": 80, **options})
    params.structured_outputs = grammar
    return [Ask(words(length, seed=length), params) for length in (5, 60)]


def of_this_runner(start, processor: type[Processor]) -> type:
    """The same for the V2 runner, whose interface differs."""
    if not start({}).scheduler.use_v2_model_runner:
        return processor
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as V2Processor

    class OnV2(V2Processor):
        is_argmax_invariant = processor.is_argmax_invariant

        def apply(self, logits: torch.Tensor, ctx: object) -> torch.Tensor:
            return logits

    OnV2.__qualname__ = processor.__qualname__
    return OnV2


def test_greedy_requests_jump_beside_a_processor_that_leaves_the_argmax_alone(start):
    processor = of_this_runner(start, Flattens)
    want = start({}).tokens(asks())
    engine: Engine = start({}, logits_processors=[processor])
    assert engine.scheduler.sgl_vllm.stats().parts["jump_forward"] == "on"
    assert engine.tokens(asks()) == want
    jumps = engine.scheduler.sgl_vllm.stats().jump_forward
    assert jumps.forced_tokens > 20
    engine.run(asks(temperature=1.0))  # its random numbers would be the same, its output not
    assert engine.scheduler.sgl_vllm.stats().jump_forward.forced_tokens == jumps.forced_tokens


@pytest.mark.parametrize("processor", [Processor, ByInstance])
def test_nothing_jumps_beside_one_that_may_change_it(start, processor):
    engine: Engine = start({}, logits_processors=[of_this_runner(start, processor)])
    state = engine.scheduler.sgl_vllm.stats().parts["jump_forward"]
    assert processor.__name__ in state and "does not declare" in state
    engine.run(asks())
    assert engine.scheduler.sgl_vllm.stats().jump_forward is None
