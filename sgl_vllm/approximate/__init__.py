"""Approximate reuse: the KV of segments that was computed at another place in another prompt"""
