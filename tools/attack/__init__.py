"""An attack on a real server: hostile requests, and what other clients notice of them."""
