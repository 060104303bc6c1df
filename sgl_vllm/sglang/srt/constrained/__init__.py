"""What programs import of `sglang.srt.constrained`."""
