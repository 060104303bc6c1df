"""Triton kernels for attention over a paged KV cache that requests share. Installed as
`sgl_vllm.kernels`; what needs torch and triton, which vLLM brings, is in its modules alone.

- `extend_attention`: prefill of new tokens on a cached prefix
- `slot_copy`: leading slots of blocks into other blocks, all layers in one launch
- `reference`: what these compute, in plain PyTorch
"""
