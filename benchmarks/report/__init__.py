"""`python -m benchmarks.report`: results of benchmarks.ab as a page, a table and plots.

__main__.py   the command
loading.py    results as their files have them, spreads, and the names that tell them apart
tables.py     what a cell says; the table as Markdown, and in the README
plots.py      pictures, as SVG that takes the page's colours
page.py       the page: page.html, filled in; sort.js sorts its tables
"""
