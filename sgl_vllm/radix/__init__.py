"""The prefix cache: a radix tree over KV blocks (pure), inside vLLM's pool and cache manager."""
