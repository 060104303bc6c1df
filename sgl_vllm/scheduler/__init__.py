"""The order of waiting requests (`policy`, pure), the jump (`jump`), and their place in vLLM's
scheduler (`scheduler`)."""
