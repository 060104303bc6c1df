"""`sgl-vllm demo`: one program, on stock vLLM and on vLLM with the plugin, side by side.

`program.py` is the program, `run.py` runs it on both and shows the result, `model/` is the model.
"""
