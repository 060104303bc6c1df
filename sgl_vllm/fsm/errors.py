"""What the automata raise for a format that they do not compile.

Each but `RefusedFormatError` means "use another backend", not "the request is wrong": the caller
decides.
"""


class RefusedFormatError(ValueError):
    """No backend may compile the format: those that take it read it differently."""


class TooComplexError(ValueError):
    """The format needs more states, time or memory than allowed."""


class UnsupportedPatternError(ValueError):
    """The pattern uses a construct that is not regular, such as look-around."""


class UnsupportedSchemaError(ValueError):
    """The schema uses a keyword, or a combination of keywords, that is not compiled here.

    Attributes:
        place: a JSON pointer to the innermost subschema that was being compiled; None until known.
    """

    place: str | None = None


class UnsupportedGrammarError(ValueError):
    """The grammar or structural tag uses a construct that the automata do not support."""
