"""KV-cache groups other than the tree's own full attention."""
