"""`python -m tools.support`: the tables of docs/support.md and the README."""
