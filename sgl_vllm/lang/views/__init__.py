"""Draws a program's state: in HTML, in a terminal, and as a picture of its forks."""
