"""Backends: where a program's text is computed."""
