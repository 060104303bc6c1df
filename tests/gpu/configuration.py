"""How the engines under test are configured: one configuration a process, named in the environment.

    SGL_VLLM_GPU_CONFIGURATION=v1-sync-eager-triton-plain python -m pytest tests/gpu
    SGL_VLLM_TEST_DEVICE=cpu python -m pytest tests/gpu          # the same tests, without a GPU

Knows neither torch nor vLLM: `tools/gpu/suite.py` reads it in any Python.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

DEVICE_VARIABLE = "SGL_VLLM_TEST_DEVICE"
CONFIGURATION_VARIABLE = "SGL_VLLM_GPU_CONFIGURATION"
UNVERIFIED_VARIABLE = "SGL_VLLM_GPU_UNVERIFIED"

# Physical orders that vLLM can give its KV cache: layers, blocks, heads, slots, content.
LAYOUTS = ("LBNHC", "LBHNC", "LHBNC", "BLNHC", "BLHNC", "BHLNC")
KV_CACHE_BYTES = 2 << 30
"""For 64 requests of 6,144 tokens with the shape of Qwen2.5-0.5B (12 KiB a token)."""
BACKENDS = {"flash": "FLASH_ATTN", "triton": "TRITON_ATTN"}
_WORDS = (
    ("v2", "v1"),
    ("async", "sync"),
    ("graphs", "eager"),
    (*BACKENDS,),
    ("invariant", "plain", "float32"),
)


def on_cpu() -> bool:
    return os.environ.get(DEVICE_VARIABLE, "cuda") == "cpu"


def unverified() -> dict[str, str]:
    """The plugin's options that switch on every part, whatever its self-check would find, where the
    environment asks for that."""
    return {"self_check": "off"} if os.environ.get(UNVERIFIED_VARIABLE) == "1" else {}


@dataclass(frozen=True)
class Configuration:
    """`numerics`: `invariant` is vLLM's batch-invariant mode, in which a request's tokens do not
    depend on what else is in the batch, so that equal means equal. In `plain` they do, in stock as
    with the plugin: there, answers may differ where two tokens are next to equally likely.
    `float32` computes in IEEE single precision, as a CPU does: near ties are so rare there that
    equal means equal, too. Only the Triton backend can."""

    runner: str = "v2"
    scheduling: str = "async"
    graphs: str = "graphs"
    backend: str = "flash"
    numerics: str = "invariant"

    @classmethod
    def of(cls, name: str) -> Configuration:
        """`name` as in `str()`; what it leaves out is as by default.

        Raises:
            ValueError: it has a word that is none of the known ones.
        """
        words = [word for word in name.split("-") if word]
        if unknown := set(words) - set(itertools.chain(*_WORDS)):
            raise ValueError(f"{', '.join(unknown)}: a configuration is e.g. {cls()}; {_known()}")
        return cls(*(next((w for w in words if w in known), known[0]) for known in _WORDS))

    @classmethod
    def of_environment(cls) -> Configuration:
        return cls.of(os.environ.get(CONFIGURATION_VARIABLE, ""))

    def __str__(self) -> str:
        return "-".join(astuple(self))

    @property
    def environment(self) -> Mapping[str, str]:
        """What vLLM is to be started with."""
        if on_cpu():
            return {}
        variables = {
            "VLLM_USE_V2_MODEL_RUNNER": str(int(self.runner == "v2")),
            "VLLM_BATCH_INVARIANT": str(int(self.numerics == "invariant")),
        }
        if self.numerics == "float32":
            variables["TRITON_F32_DEFAULT"] = "ieee"  # its default, tf32, keeps 10 bits
        return variables

    @property
    def engine_args(self) -> dict[str, Any]:
        """For `tests.engine.engine.Engine`, whose own are a CPU's."""
        if on_cpu():
            return {}
        return {
            "dtype": "float32" if self.numerics == "float32" else "bfloat16",
            "enforce_eager": self.graphs == "eager",
            "async_scheduling": self.scheduling == "async",
            "attention_backend": BACKENDS[self.backend],
            # Fixed, so that nothing is measured at start and several processes fit on one GPU. The
            # fraction is then only what must be free.
            "kv_cache_memory_bytes": KV_CACHE_BYTES,
            "gpu_memory_utilization": 0.05,
        }

    @property
    def server_args(self) -> list[str]:
        """`engine_args` as `vllm serve` takes them."""
        flags = []
        for name, value in self.engine_args.items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                flags.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                flags += [f"--{flag}", str(value)]
        return flags


def all_configurations() -> list[Configuration]:
    """Every one in the batch-invariant mode, the default first."""
    return [Configuration(*words) for words in itertools.product(*_WORDS[:-1])]


def _known() -> str:
    return "; ".join(" or ".join(words) for words in _WORDS)
