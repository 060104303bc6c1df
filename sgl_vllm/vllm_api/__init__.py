"""The one contact with vLLM: what is touched of it, checked against the installed one."""
