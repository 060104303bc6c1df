"""What the automata raise for a format that they do not compile.

Each means "use another backend", not "the request is wrong": the caller decides.
"""


class TooComplexError(ValueError):
    """The format needs more states, time or memory than allowed."""


class UnsupportedPatternError(ValueError):
    """The pattern uses a construct that is not regular, such as look-around."""


class UnsupportedSchemaError(ValueError):
    """The schema uses a keyword, or a combination of keywords, that is not compiled here."""
