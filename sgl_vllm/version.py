"""The plugin's version. Apart from the package, so that a server's module can read it without the
language."""

__version__ = "0.1.0"
