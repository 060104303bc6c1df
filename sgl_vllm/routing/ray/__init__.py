"""Routing across replicas under Ray Serve."""
