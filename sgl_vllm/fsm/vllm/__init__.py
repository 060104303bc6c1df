"""Structured output inside vLLM: the contact of the pure automata with its backends."""
