"""Many engines behind one door: which worker a request goes to, so that its prefix is cached there.

`routing` decides; it is pure, and knows neither Ray nor vLLM nor a network. Adapters feed it.
"""
