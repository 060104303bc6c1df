"""Tracing: a program as a graph, recorded by calling its function with stand-ins."""
