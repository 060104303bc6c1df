"""Structured output: what the grammar forces, in tokens. `forced` is pure, `backend` reads vLLM's
grammars."""
