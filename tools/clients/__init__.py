"""Clients that others wrote: their environments, the programs of docs/clients.md, and its table."""
