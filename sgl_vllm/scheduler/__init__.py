"""The order of waiting requests, and vLLM's schedulers with the plugin's parts in them."""
