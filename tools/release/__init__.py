"""`python -m tools.release`: builds a release, tests it, and says how to publish it."""
