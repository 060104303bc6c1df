"""What programs of SGLang's language import of `sglang.srt`. The server itself is vLLM's."""
