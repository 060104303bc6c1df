"""vLLM's scheduler without a model, for benchmarks and tests.

Owns how a scheduler of vLLM or of the plugin is made without an engine, and a stand-in for the KV
cache's memory that notices when a pass would read what was computed for other tokens.
"""
