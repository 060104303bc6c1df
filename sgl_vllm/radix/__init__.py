"""The radix tree over the KV cache: `tree` is pure, `manager` puts it into vLLM."""
