"""`python -m benchmarks.report`: results of benchmarks.ab as a table, also in a page of the docs.

__main__.py   the command
loading.py    results as their files have them, spreads, and the names that tell them apart
tables.py     what a cell says; the table as Markdown, and in a page
"""
