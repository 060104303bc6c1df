"""Well-known models through vLLM's grouping of layers: `python -m tools.layouts`"""
