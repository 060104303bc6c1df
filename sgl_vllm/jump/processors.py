"""Custom logits processors: which ones an engine has, and whether jumps may work beside them.

Owns reading what a processor declares. Does not own which requests jump (`part.py`). vLLM's own
processors (min-p, logit bias, minimum tokens) are not custom.

A processor that does not change the argmax changes no greedy request, whatever output it reads. So
greedy requests jump beside it, and sampled ones do not: a processor that reads the
output would find it in the prompt (V1 runner), or find its own state reset (V2 runner).
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import ModelConfig

GROUP = "vllm.logits_processors"
"""The entry points through which installed packages add processors to every engine."""


class _NoInstance:
    """Stands for a processor that has not been constructed: it has no attributes."""

    def __getattribute__(self, name: str) -> object:
        raise LookupError(name)


def custom_processors(model_config: ModelConfig) -> list[EntryPoint | type]:
    """The custom processors of an engine, loaded or as references."""
    given = model_config.logits_processors or ()
    return [
        *entry_points(group=GROUP),
        *(EntryPoint(one, one, GROUP) if isinstance(one, str) else one for one in given),
    ]


def why_no_jumps(model_config: ModelConfig) -> str | None:
    """Why nothing may jump beside the custom processors of an engine; None if greedy requests may.

    Imports the processors' modules, as vLLM's worker does. Constructs none of them.
    """
    for processor in custom_processors(model_config):
        try:
            loaded = processor if isinstance(processor, type) else processor.load()
        except Exception as error:
            name = processor.value if isinstance(processor, EntryPoint) else processor.__name__
            return f"the logits processor {name} cannot be loaded in the engine: {error!r}"
        if not leaves_argmax_alone(loaded):
            name = getattr(loaded, "__qualname__", repr(loaded))
            return f"the logits processor {name} does not declare that it leaves the argmax alone"
    return None


def leaves_argmax_alone(processor: type) -> bool:
    """Whether `processor.is_argmax_invariant()` is True for every instance.

    vLLM's V1 interface has this method. Its V2 interface does not, but a processor may define it.
    It is called without an instance, because constructing one can allocate memory on the device. A
    method that looks at its instance therefore counts as False.
    """
    declares = getattr(processor, "is_argmax_invariant", None)
    try:
        return callable(declares) and declares(_NoInstance()) is True
    except Exception:
        return False
