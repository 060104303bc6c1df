"""`python -m benchmarks.pace`: what a step costs the processor, and that at a GPU's pace, without a
GPU."""
