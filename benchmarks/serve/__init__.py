"""vLLM's own load generator, `vllm bench serve`, against stock vLLM and the plugin."""
