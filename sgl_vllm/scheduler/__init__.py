"""The order of waiting requests, and the plugin's parts in vLLM's scheduler."""
