"""Which requests may jump, on which engines, and which forced runs are worth a jump.

Only the last tests need an engine.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.request import Request
from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, LogitsProcessor

from sgl_vllm.jump import processors
from sgl_vllm.jump.part import Limits, may_jump, may_open
from sgl_vllm.jump.processors import leaves_argmax_alone, why_no_jumps
from sgl_vllm.jump.short_runs import ShortRuns
from tests.engine.engine import Ask, Engine, words
from tests.engine.test_jump_forward import CARD
from tests.platforms.platform import chosen


def request(name: str = "one", features: Any = None, **options: Any) -> Request:
    grammar = StructuredOutputsParams(regex="a+")
    params = SamplingParams(structured_outputs=grammar)
    for option, value in options.items():
        setattr(params, option, value)
    return Request(name, list(range(40)), params, None, mm_features=features)


def feature(modality: str) -> list[MultiModalFeatureSpec]:
    place = PlaceholderRange(offset=4, length=8)
    return [MultiModalFeatureSpec(None, modality=modality, identifier="one", mm_position=place)]


@pytest.mark.parametrize(
    ("options", "limits", "jumps", "opens"),
    [
        ({}, {}, True, True),
        ({"prompt_logprobs": 0}, {}, True, False),
        ({"repetition_detection": "on"}, {}, True, False),
        ({"stop": ["x"]}, {}, True, True),
        # Where the frontend keeps what comes after a stop string.
        ({"stop": ["x"]}, {"drops_after_stop": False}, False, False),
        ({"logprobs": 1}, {"has_logprobs": False}, False, False),
        ({"presence_penalty": 0.5}, {"draws_by_position": False}, True, True),
        ({"seed": 3, "temperature": 0.0}, {"draws_by_position": False}, True, True),
        ({"seed": 3, "temperature": 1.0}, {"draws_by_position": False}, False, False),
        ({"seed": 3, "temperature": 1.0}, {}, True, True),
        ({"features": feature("image")}, {}, True, True),
        ({"features": feature("prompt_embeds")}, {}, False, False),
    ],
    ids=str,
)
def test_what_a_request_asks_for_decides_whether_it_jumps(options, limits, jumps, opens):
    one = request(**options)
    assert may_jump(one, Limits(**limits)) is jumps
    assert (jumps and may_open(one, Limits(**limits))) is opens


# -- runs too short for a jump beside a step in flight: decoded, in canonical tokens ---------------


def legal(masks: GrammarOutput) -> list[list[int]]:
    """The tokens of each row's bits."""
    rows = np.unpackbits(masks.grammar_bitmask.view(np.uint8), axis=1, bitorder="little")
    return [np.flatnonzero(row).tolist() for row in rows]


def test_only_the_next_token_of_a_run_is_legal_if_it_was() -> None:
    runs, one, other = ShortRuns(), request(), request("other")
    anything = list(range(128))
    for token in (31, 32, 64):  # the last bit of a word, and first ones
        runs.begin(one, [token, 5])
        masks = GrammarOutput(["other", "one", "gone"], np.full((3, 4), -1, np.int32))
        runs.narrow(masks, {"one": one, "other": other})
        assert legal(masks) == [anything, [token], anything]
    runs.begin(one, [31])
    masks = GrammarOutput(["one"], np.array([[0b1010, 0, 0, 0]], np.int32))
    runs.narrow(masks, {"one": one})
    assert legal(masks) == [[1, 3]]
    assert one not in runs


# -- logits processors -----------------------------------------------------------------------------


class Processor(LogitsProcessor):
    """Does nothing. vLLM constructs it with its configuration, a device and a flag."""

    def __init__(self, *arguments: object) -> None:
        pass

    def update_state(self, batch_update: object) -> None:
        pass

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
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


def test_only_a_declaration_that_holds_for_every_instance_counts():
    # A class without the method, as on the V2 runner, declares nothing.
    kinds = [Processor, Flattens, ByInstance, object, *BUILTIN_LOGITS_PROCESSORS]
    leaving = {"Flattens", "MinPLogitsProcessor"}
    assert {one.__name__ for one in kinds if leaves_argmax_alone(one)} == leaving


@pytest.mark.parametrize(
    ("processors", "says"),
    [
        ((), None),
        ((Flattens, f"{__name__}:Flattens"), None),
        ((Flattens, f"{__name__}:Processor", ByInstance), "processor Processor does not declare"),
        (("no.such.module:Thing",), "no.such.module:Thing cannot be loaded"),
    ],
)
def test_the_reason_names_the_first_processor_that_stands_in_the_way(processors, says):
    reason = why_no_jumps(Config(*processors))
    assert reason is None if says is None else says in str(reason)


def test_processors_of_installed_packages_count(monkeypatch):
    entry = EntryPoint("mine", f"{__name__}:ByInstance", processors.GROUP)
    monkeypatch.setattr(processors, "entry_points", lambda *, group: [entry])
    assert "ByInstance" in str(why_no_jumps(Config()))


def of_this_runner(config: pytest.Config, processor: type[Processor]) -> type:
    """The same for the V2 runner, whose interface differs."""
    if not chosen(config).uses_v2_runner:
        return processor
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as V2Processor

    class OnV2(V2Processor):
        is_argmax_invariant = processor.is_argmax_invariant

        def apply(self, logits: torch.Tensor, ctx: object) -> torch.Tensor:
            return logits

    OnV2.__qualname__ = processor.__qualname__
    return OnV2


def cards(**options: Any) -> list[Ask]:
    params = SamplingParams(**{"temperature": 0, "max_tokens": 80, **options})
    params.structured_outputs = StructuredOutputsParams(regex=CARD)
    return [Ask(words(length, seed=length), params) for length in (5, 60)]


def test_greedy_requests_jump_beside_a_processor_that_leaves_the_argmax_alone(start, request):
    want = start({}).tokens(cards())
    processor = of_this_runner(request.config, Flattens)
    engine: Engine = start({}, logits_processors=[processor])
    assert engine.tokens(cards()) == want
    jumps = engine.scheduler.sgl_vllm.stats().jump_forward
    assert jumps.forced_tokens > 20
    engine.run(cards(temperature=1.0))  # its random numbers would be the same, its output not
    assert engine.scheduler.sgl_vllm.stats().jump_forward.forced_tokens == jumps.forced_tokens


def test_nothing_jumps_beside_one_that_may_change_it(start, request):
    engine: Engine = start({}, logits_processors=[of_this_runner(request.config, Processor)])
    state = engine.scheduler.sgl_vllm.stats().parts["jump_forward"]
    assert "Processor" in state and "does not declare" in state
    engine.run(cards())
    assert engine.scheduler.sgl_vllm.stats().jump_forward is None
