"""Third-party clients: their environments, the programs of docs/clients.md, and its table."""
