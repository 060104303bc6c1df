"""vLLM's V2 model runner without a GPU: its Triton kernels run in Triton's interpreter.

vLLM's CPU build has the V2 runner, with streams, events and pinned memory replaced by vLLM itself.
What it lacks is a Triton driver that reports itself active. This module puts one in place that only
exists, as no kernel is ever compiled, and works around what the interpreter does not take.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest


class _Driver:
    """vLLM asks whether there is one, and nothing else."""

    @staticmethod
    def is_active() -> bool:
        return True


def set_up(patch: pytest.MonkeyPatch) -> None:
    """Let this process run Triton kernels in the interpreter. Before vLLM is imported."""
    patch.setenv("TRITON_INTERPRET", "1")
    from triton import backends

    # vLLM looks for a backend of this name, which Triton's package does not contain.
    patch.setitem(backends.backends, "cpu", backends.Backend(compiler=None, driver=_Driver))
    _take_masks_of_integers(patch)
    _replace_top_k_kernel(patch)
    _leave_out_what_nothing_needs(patch)
    _sample_in_larger_blocks(patch)
    _copy_states_in_one_piece(patch)


def _take_masks_of_integers(patch: pytest.MonkeyPatch) -> None:
    """A mask that is a product of a scalar and a block is not boolean in the interpreter, but its
    loads and stores need one that is."""
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder

    def as_boolean(mask: Any) -> Any:
        if mask is not None and mask.data.dtype != np.bool_:
            mask.data = np.ascontiguousarray(mask.data.astype(np.bool_))
        return mask

    load = InterpreterBuilder.create_masked_load
    store = InterpreterBuilder.create_masked_store
    patch.setattr(
        InterpreterBuilder,
        "create_masked_load",
        lambda self, pointers, mask, *more: load(self, pointers, as_boolean(mask), *more),
    )
    patch.setattr(
        InterpreterBuilder,
        "create_masked_store",
        lambda self, pointers, value, mask, *more: store(
            self, pointers, value, as_boolean(mask), *more
        ),
    )


def _replace_top_k_kernel(patch: pytest.MonkeyPatch) -> None:
    """The interpreter does not take this kernel. vLLM's fallback in PyTorch samples the same."""
    from vllm.v1.sample.ops import topk_topp_sampler

    patch.setattr(
        topk_topp_sampler,
        "apply_top_k_top_p_triton",
        lambda logits, k, p, *more, **options: topk_topp_sampler.apply_top_k_top_p_pytorch(
            logits, k, p
        ),
    )


def _leave_out_what_nothing_needs(patch: pytest.MonkeyPatch) -> None:
    """Leave out what the interpreter does for each launch or operation and nothing here needs.

    It copies tensors to the host and back, where they are already. It puts its functions in the
    place of the language's and takes them out again, for kernels that are compiled, which none is.
    It computes all sums again in 64 bits, to find overflows. And it makes a table of types and a
    shape for each value.
    """
    from triton.runtime import interpreter

    executor = interpreter.GridExecutor
    patch.setattr(executor, "_init_args_hst", lambda self, args, options: (args, options))
    patch.setattr(executor, "_restore_args_dev", lambda self, *args: None)

    patch_language = interpreter._patch_lang
    patched: set[int] = set()

    def patch_once(fn: Any) -> Any:
        module = id(fn.__globals__)
        if module not in patched:
            patched.add(module)
            patch_language(fn)
        return interpreter._LangPatchScope()  # which restores nothing

    patch.setattr(interpreter, "_patch_lang", patch_once)

    builder = interpreter.interpreter_builder
    unchecked = dataclasses.replace(builder.options, sanitize_overflow=False)
    patch.setattr(builder, "options", unchecked)

    numpy_type = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def known_type(type_: Any) -> Any:
        scalar = type_.scalar
        if scalar.name not in known:
            known[scalar.name] = numpy_type(scalar)
        return known[scalar.name]

    patch.setattr(interpreter, "_get_np_dtype", known_type)

    make, shapes = interpreter.tl.tensor.__init__, {}

    def make_of_known_shape(self: Any, handle: Any, type_: Any) -> None:
        key = tuple(type_.shape.values) if type_.is_block() else ()
        if key not in shapes:
            make(self, handle, type_)
            shapes[key] = self.numel, self.shape
        self.handle, self.type, self.dtype = handle, type_, type_.scalar
        self.numel, self.shape = shapes[key]

    patch.setattr(interpreter.tl.tensor, "__init__", make_of_known_shape)


def _sample_in_larger_blocks(patch: pytest.MonkeyPatch) -> None:
    """The kernel that samples takes 1,024 tokens of the vocabulary at a time, which suits a GPU.

    With 4,096 the demo's vocabulary is one block, and the kernel's code runs once, not four times.
    """
    from vllm.v1.worker.gpu.sample import gumbel

    code = gumbel.gumbel_sample.__code__
    assert code.co_consts.count(1024) == 1
    constants = tuple(4096 if constant == 1024 else constant for constant in code.co_consts)
    patch.setattr(gumbel.gumbel_sample, "__code__", code.replace(co_consts=constants))


def _copy_states_in_one_piece(patch: pytest.MonkeyPatch) -> None:
    """The kernels that copy recurrent states divide each among 16 programs, which suits a GPU.

    Most of them have nothing to copy, but each takes as long to interpret as one that has.
    """
    from vllm.v1.worker import mamba_utils

    patch.setattr(mamba_utils, "_TEMPORAL_TILES", 1)
