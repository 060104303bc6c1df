"""vLLM's defaults for an NVIDIA H100, on a machine that need not have one.

Owns what vLLM is told about the device. vLLM itself derives everything else from it: asynchronous
scheduling, the model runner, the size of blocks. It is a prediction, because the attention kernels
of a GPU cannot be loaded here, so the layers are built with those that Triton has on every device.

For a process that never serves: `pretend` comes before anything else of vLLM is imported.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any  # Any: what vLLM and PyTorch are asked

import torch
from torch.overrides import TorchFunctionMode
from vllm import platforms
from vllm.platforms import Platform, PlatformEnum
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from sgl_vllm.vllm_api.patching import wrap

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.selector import AttentionSelectorConfig


def pretend() -> None:
    """Make this process plan for an H100."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Triton needs no GPU then
    os.environ["VLLM_KIMI_K3_GEMM_AR"] = "0"  # a kernel that would be loaded with the layers
    _allow_triton()
    _allow_cuda()
    wrap(platforms, "resolve_current_platform_cls_qualname")(_planned_gpu)
    _allow_experts_without_gate()


def _planned_gpu(original: Callable[[], str]) -> str:
    return f"{PlannedGpu.__module__}.{PlannedGpu.__qualname__}"


def _allow_triton() -> None:
    """vLLM's CPU builds take Triton, which the V2 runner needs, for missing if it has no backend of
    this name. No kernel is compiled."""
    try:
        backends = importlib.import_module("triton.backends")
    except ImportError:
        return
    backends.backends.setdefault("cpu", backends.Backend(compiler=None, driver=_Driver))


class _Driver:
    @staticmethod
    def is_active() -> bool:
        return True


def _allow_cuda() -> None:
    """Let layers ask PyTorch for a stream, or for a tensor on the GPU."""
    _CudaAsMeta().__enter__()
    torch.cuda.Stream = torch.cuda.Event = torch.accelerator.empty_cache = SimpleNamespace


class _CudaAsMeta(TorchFunctionMode):  # type: ignore[misc]  # PyTorch is read as Any
    """A tensor that a layer places on the GPU by name is on `meta`, as the layer itself is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def _allow_experts_without_gate() -> None:
    """vLLM has them (Nemotron 3) on some devices only, which is the last thing that it checks."""
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

    @wrap(FusedMoEConfig, "__post_init__")
    def check_all_but_the_device(original: Callable[..., None], config: FusedMoEConfig) -> None:
        with contextlib.suppress(NotImplementedError):
            original(config)


def _always(answer: object) -> Any:
    """A class method that answers every question like this."""
    return classmethod(lambda cls, *args, **kwargs: answer)


class PlannedGpu(Platform):
    """An H100 as far as vLLM's configuration asks. To the layers it is a device that vLLM does not
    know, so that they load no kernels."""

    _enum = PlatformEnum.OOT
    device_name = "cuda"
    device_type = "cuda"
    dispatch_key = "CUDA"
    ray_device_key = "GPU"
    dist_backend = "nccl"
    device_control_env_var = "CUDA_VISIBLE_DEVICES"

    import_kernels = _always(None)  # there are none
    get_device_capability = _always(DeviceCapability(9, 0))
    get_device_name = _always("NVIDIA H100 80GB HBM3")
    get_device_total_memory = _always(80 << 30)
    num_compute_units = _always(132)
    current_device = _always(torch.device("meta"))
    is_pin_memory_available = _always(False)
    support_hybrid_kv_cache = support_static_graph_mode = supports_fp8 = _always(True)

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        if vllm_config.parallel_config.worker_cls == "auto":
            vllm_config.parallel_config.worker_cls = "vllm.v1.worker.gpu_worker.Worker"
        # The kernels for quantized weights are not here either. The KV cache is the same without.
        vllm_config.quant_config = None

    @classmethod
    def get_attn_backend_cls(
        cls,
        selected_backend: AttentionBackendEnum | None,
        attn_selector_config: AttentionSelectorConfig,
        num_heads: int | None = None,
    ) -> str:
        if not attn_selector_config.use_mla:
            return AttentionBackendEnum.TRITON_ATTN.get_path()
        if attn_selector_config.use_sparse:
            return AttentionBackendEnum.FLASHMLA_SPARSE.get_path()
        return AttentionBackendEnum.TRITON_MLA.get_path()

    @classmethod
    def get_mla_prefill_backend_cls(cls, mla_selector_config: object) -> Any:
        registry = importlib.import_module("vllm.v1.attention.backends.mla.prefill.registry")
        return registry.MLAPrefillBackendEnum.CPU.get_class()
