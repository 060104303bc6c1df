"""Triton kernels for attention over a paged KV cache that requests share. Installed as
`sgl_vllm.kernels`; what needs torch and triton, which vLLM brings, is in its modules alone.
"""
