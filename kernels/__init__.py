"""Triton kernels for attention over a paged KV cache that requests share. Installed as
`sgl_vllm.kernels`; what needs torch and triton, which vLLM brings, is in its modules alone.

- `extend_attention`: prefill of new tokens on a cached prefix
- `slot_copy`: leading slots of blocks into other blocks, all layers in one launch
- `prefix_attention`: decode that reads what requests share once, by the plan of `prefix_plan`
- `attention_backend`: it as a backend of vLLM's; `decode_step` is what that needs besides
- `checks`: what they ask of their arguments alike
- `reference`: what these compute, in plain PyTorch
"""
