"""Jump-forward: forced tokens enter a running request in one forward pass."""
