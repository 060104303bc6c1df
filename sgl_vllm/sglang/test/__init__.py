"""What SGLang's benchmarks and tests of its language import of `sglang.test`."""
