"""Which parts an engine would have, without starting it: from a model's configuration and flags"""
