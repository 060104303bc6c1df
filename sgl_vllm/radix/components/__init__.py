"""KV-cache groups beside the tree's own full attention."""
