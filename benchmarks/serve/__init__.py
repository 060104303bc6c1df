"""vLLM's own load generator, `vllm bench serve`, against stock vLLM and the plugin.

    python -m benchmarks.serve --help

`datasets` says what is asked for, `load` runs the load generator, `result` joins what it wrote.
"""
