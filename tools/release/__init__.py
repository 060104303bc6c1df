"""`python -m tools.release`: builds a release, tests it, and says how to publish it.

__main__.py   the command: its steps, in their order
build.py      the wheel and the sdist, the same bytes from the same commit
notes.py      the release notes, from CHANGELOG.md
"""
