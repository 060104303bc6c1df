"""An older name of `sglang.srt.utils.hf_transformers_utils`."""

from sgl_vllm.sglang.srt.utils.hf_transformers_utils import get_tokenizer

__all__ = ["get_tokenizer"]
