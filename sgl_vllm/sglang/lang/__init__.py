"""SGLang's `sglang.lang`: the language under SGLang's module names."""
