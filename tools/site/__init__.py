"""`python -m tools.site`: the documentation as a website, from the Markdown that GitHub shows.

__main__.py   the command: the pages, and the list of versions
conf.py       Sphinx's configuration
navigation.py the sidebar and the links, as a Sphinx extension
templates/, static/   what the theme does not have
"""
