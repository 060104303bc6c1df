"""The Triton kernels against vLLM's own: `python -m benchmarks.kernels`."""
