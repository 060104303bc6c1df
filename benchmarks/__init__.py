"""Measurements against stock vLLM; see `docs/` for what each workload is."""
