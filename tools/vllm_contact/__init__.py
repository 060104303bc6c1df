"""Whether vLLM and our code still fit each other, read from the source of both."""
