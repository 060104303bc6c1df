"""SGLang's `sglang.lang.backend`: its backends, over those of `sgl_vllm`."""
