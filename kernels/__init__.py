"""Triton kernels for attention over a paged KV cache that requests share.

Installed as `sgl_vllm.kernels`. Importing the package imports neither torch nor triton; its modules
do.

- `prefix_attention`: decode that reads what requests share once, planned by `prefix_plan`
  for the shared blocks that `prefix_levels` finds
- `attention_backend`: vLLM's FlashAttention backend with that kernel; `decode_step` decides when
- `reference`: what the kernels compute, in plain PyTorch
"""
