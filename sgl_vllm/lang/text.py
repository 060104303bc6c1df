"""Which strings can be sent as text.

Owns this check. It imports nothing of the language.
"""


def check_unicode(text: str) -> None:
    """ValueError for half of a surrogate pair, which UTF-8 cannot express. Cost: a pass over text
    that is not ASCII."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise ValueError(
            f"the text is not valid Unicode: it has half of a surrogate pair, {half!r}, at "
            f"character {error.start}; decode it with errors='replace'"
        ) from None
