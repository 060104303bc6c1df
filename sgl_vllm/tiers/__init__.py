"""What lies below the GPU: vLLM's KV connectors beside the tree, and a file tier with checksums."""
